"""The cuda device where something goes wrong: a driver that checks every call and fails what a test names."""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.targets.gpu.cuda import ARCHITECTURES
from llmc.compiler.targets.gpu.devices import cuda_capabilities
from llmc.compiler.targets.registry import resolve_target
from llmc.runtime.binding import Artifact, Device, Engine, LlmcError, Replayer
from llmc.runtime.graphs_file import read_graphs
from llmc.runtime.llm import LLM
from llmc.runtime.warm_up.budget import BudgetError

from support.artifacts import TinyArtifact
from support.compiled import Pages, compile_tiny, replay
from support.cuda import Stub, fake_nvcc, stub_library
from support.cuda_device import checked_stub, two_buckets
from support.inspected import inspected_text
from support.paths import ROOT
from support.tiny_models import make_tiny_model

_CUDA_H = Path("/usr/local/cuda/include/cuda.h")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_library(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def stub(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    with checked_stub(library, monkeypatch) as stub:
        yield stub


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    return two_buckets(tmp_path_factory, kernel_cache)


def replayer(artifact: Path, stub: Stub, **options: Any) -> Replayer:
    with Artifact(artifact) as opened:
        return Replayer(opened, num_blocks=4, cuda_library=str(stub.library), **options)


def engine(artifact: Path, stub: Stub, **options: Any) -> Engine:
    with Artifact(artifact) as opened:
        return Engine(opened, num_blocks=4, cuda_library=str(stub.library), **options)


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("Init=100", "Starting the CUDA driver failed: the driver finds no GPU .* check that nvidia-smi lists it"),
        ("Init=34", "a placeholder for building and no driver"),
        ("Init=803", "library and kernel module of the driver are of different versions .*; update the driver"),
        ("devices=0", "Looking for a GPU failed: the driver finds no GPU"),
        ("PrimaryCtxRetain=46", "Opening the GPU 'stub' failed: another process has the GPU for itself .*; stop that"),
        ("PrimaryCtxRetain=2", "Opening the GPU 'stub' failed: the GPU has no memory left"),
        ("DeviceGetName=999", r"failed: unknown error \(CUDA error 999\); the GPU is lost to this process"),
    ],
)
def test_a_machine_without_a_device(stub: Stub, monkeypatch: pytest.MonkeyPatch, fails: str, says: str) -> None:
    monkeypatch.setenv("STUB_CUDA", fails)
    with pytest.raises(LlmcError, match=says):
        Device("cuda", {"library": str(stub.library)})


def test_a_library_that_is_none(tmp_path: Path, stub: Stub) -> None:
    with pytest.raises(LlmcError, match=r"The CUDA driver cannot be loaded .*install NVIDIA's driver"):
        Device("cuda", {"library": str(tmp_path / "nothing.so")})
    with pytest.raises(LlmcError, match=r"libm.so.6 is not a driver of CUDA 11.4 or later: it has no cuInit"):
        Device("cuda", {"library": "libm.so.6"})
    with pytest.raises(LlmcError, match=r"no GPU number 3; this process may use numbers 0 … 0"):
        Device("cuda", {"library": str(stub.library), "device": 3})
    with pytest.raises(LlmcError, match=r"has no option 'threads'; it knows library, device, eager, graph_mib"):
        Device("cuda", {"library": str(stub.library), "threads": 3})


def test_what_it_says_of_itself(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_CUDA", "capability=120 memory=1000 others=300")
    with Device("cuda", {"library": str(stub.library)}) as device:
        facts = device.facts
    assert (facts["target"], facts["compute_capability"], facts["driver"]) == ("cuda:sm_120", "12.0", "13.0")
    assert (facts["memory_bytes"], facts["free_memory_bytes"]) == ("1000", "700")


def test_a_gpu_says_what_to_compile_for(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that there is: its own, or that of a GPU before it."""
    named = {int(name[3:]): f"cuda:{name}" for name in ARCHITECTURES if not name.endswith("a")}
    assert len(named) > 5
    others = {75: "none, for no kernels are written for GPUs before sm_80", 88: "cuda:sm_86", 121: "cuda:sm_120"}
    for capability, target in (named | others).items():
        monkeypatch.setenv("STUB_CUDA", f"capability={capability}")
        with Device("cuda", {"library": str(stub.library)}) as device:
            assert device.facts["target"] == target


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (
            "capability=75",
            "code for sm_80, sm_90, compute_80 and 'stub' is sm_75; no kernels are written for GPUs before",
        ),
        (
            "capability=100 builds=0",
            r"for compute_80 on 'stub' \(line 1: no such word\) failed: the driver cannot build",
        ),
        ("capability=120 ModuleLoadData=222", "the code is newer than the driver .*; update the driver, or compile"),
        ("ModuleLoadData=200", "Loading kernel .* for sm_90 on 'stub' failed: the code is damaged"),
        ("ModuleGetFunction=500", "kernels.cuda.* has no kernel"),
        ("items=32", "groups of 64 work items and this device at most 32; choose another device"),
        ("memory=1000", r"needs \d+ MiB .* and 'stub' has 0 MiB; ask for a smaller KV pool"),
        ("others=17179869184", r"needs \d+ MiB .* and 'stub' has 0 MiB free; ask for a smaller KV pool"),
        (
            "MemAlloc@7=2",
            "Taking 0 MiB for inputs from 'stub' failed: the GPU has no memory left .*; lower --gpu-memory-ut",
        ),
        ("MemAlloc=2", "for weights from 'stub' failed"),
        ("MemHostAlloc=2", "has no 3 MiB that can be pinned for weights on their way; free memory, or raise the limit"),
        ("MemcpyToDevice=700", "Copying weights to the GPU failed: a kernel used an address .* the GPU is lost"),
        ("StreamCreate=2", "Opening a stream failed"),
        ("EventRecord=999", "Copying weights to the GPU failed"),
        ("GraphAddKernelNode=1", r"Recording a graph failed: unknown error \(CUDA error 1\); if it fails again"),
        ("GraphInstantiate=1", "Instantiating a graph failed"),
        ("GraphLaunch=701", "Replaying a graph failed: a kernel needs more than the GPU has"),
        ("StreamSynchronize@6=719", "failed: a kernel failed"),
    ],
)
def test_loading_fails(artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch, fails: str, says: str) -> None:
    monkeypatch.setenv("STUB_CUDA", fails)
    with pytest.raises(LlmcError, match=says):
        replayer(artifact, stub)


def test_code_is_chosen_by_the_gpu(artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, from_ptx in ((80, 0), (86, 0), (89, 0), (90, 0), (100, 1), (120, 1)):
        monkeypatch.setenv("STUB_CUDA", f"capability={capability}")
        opened = engine(artifact, stub)
        counted = opened.stats.device
        assert counted["programs_from_ptx"] == from_ptx * counted["programs"] > -1
        opened.close()


@pytest.mark.parametrize(("options", "how"), [({}, "replayed"), ({"eager": True}, "launched")])
def test_a_step_runs_the_commands_of_its_graph(artifact: Path, stub: Stub, options: dict[str, bool], how: str) -> None:
    device, tables = replayer(artifact, stub, **options), read_graphs(artifact)
    for index, graph in enumerate(tables.graphs):
        stub.launches()
        replay(device, index, Pages(4, 16), [(0, [3], 0)])
        commands = tables.commands[graph.first_command : graph.first_command + graph.num_commands]
        wanted = []
        for command in commands:
            kernel = tables.kernels[command.kernel]
            _, rows, groups, tile_rows = kernel.launch[:4]
            tiles = -(-(1, graph.max_tokens, graph.max_samples)[rows] // tile_rows)
            wanted.append((kernel.symbol, tiles * groups, how))
        assert stub.launches() == wanted
    device.close()


def test_graphs_beyond_the_budget_are_launches(artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    def counted(facts: str, **options: object) -> dict[str, int]:
        assert stub.report() == ""
        stub.recover()
        monkeypatch.setenv("STUB_CUDA", facts)
        # No kernel runs, so the host draws: a step that was chained would run twice.
        opened = engine(artifact, stub, overlap=False, **options)
        opened.submit([3, 4, 5], max_tokens=2)
        while opened.step():
            pass
        stats = opened.stats.device
        launched[:] = [graph.launched for graph in opened.graph_stats()]
        opened.close()
        names = ("recorded_graphs", "launched_graphs", "replayed_steps", "launched_steps", "graph_bytes")
        return {name: stats[name] for name in names}

    whole, part = {"graph_mib": 2}, {"graph_mib": 1}
    assert list(counted("graph=1048576", **whole).values()) == [2, 0, 2, 0, 2 << 20]
    # The decode graph is kept, which saves more, unless its share says otherwise. What a kind leaves the other gets.
    assert list(counted("graph=1048576", **part).values()) == [1, 1, 1, 1, 1 << 20]
    assert launched == [1, 0]
    assert list(counted("graph=1048576", graph_prompt_mib=1, **part).values()) == [1, 1, 1, 1, 1 << 20]
    assert launched == [0, 1]
    assert list(counted("graph=1048576", graph_prompt_mib=0, **whole).values()) == [2, 0, 2, 0, 2 << 20]
    assert launched == [0, 0]
    assert list(counted("graph=1048577", **part).values()) == [0, 2, 0, 2, 0]
    assert list(counted("", graph_mib=0).values()) == [0, 2, 0, 2, 0]
    assert list(counted("", eager=True).values()) == [0, 2, 0, 2, 0]
    # What a driver has no room for, too.
    assert list(counted("GraphInstantiate@2=2").values()) == [1, 1, 1, 1, 1 << 20]


@pytest.mark.parametrize(
    "fails", ["MemcpyToDevice=2", "GraphLaunch=2", "MemcpyToHost=1", "EventRecord=1", "EventSynchronize=2"]
)
def test_a_step_fails_and_the_device_goes_on(
    artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    device, pages = replayer(artifact, stub), Pages(4, 16)
    for _ in range(2):
        monkeypatch.setenv("STUB_CUDA", fails)
        with pytest.raises(LlmcError, match=r"GPU|graph|step"):
            replay(device, 0, pages, [(0, [3, 4, 5], 0)])
        monkeypatch.delenv("STUB_CUDA")
        assert replay(device, 0, pages, [(0, [3, 4, 5], 0)]).shape[0] == 1
    device.close()


@pytest.mark.parametrize("fails", ["GraphLaunch=719", "GraphLaunch=702", "EventSynchronize=700", "MemcpyToDevice=214"])
def test_a_lost_device_stays_lost(artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    device, pages = replayer(artifact, stub), Pages(4, 16)
    monkeypatch.setenv("STUB_CUDA", fails)
    with pytest.raises(LlmcError, match=r"; the GPU is lost to this process: restart it, and look at the kernel's log"):
        replay(device, 0, pages, [(0, [3, 4, 5], 0)])
    monkeypatch.delenv("STUB_CUDA")
    stub.recover()
    # The first error is what is told, whatever a driver says later.
    with pytest.raises(LlmcError, match=rf"An earlier step on 'stub' failed: .*CUDA error {fails[-3:]}\)"):
        replay(device, 0, pages, [(0, [3, 4, 5], 0)])
    device.close()


def test_a_lost_device_fails_requests_one_by_one(artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = engine(artifact, stub)
    monkeypatch.setenv("STUB_CUDA", "StreamSynchronize=719")
    opened.submit([3, 4, 5], max_tokens=2)
    with pytest.raises(LlmcError, match="a kernel failed"):
        opened.step()
    failed = [event for event in opened.poll() if event.kind == "failed"]
    assert [event.error_message for event in failed]
    opened.close()
    stub.recover()


@pytest.mark.parametrize(
    ("fails", "within_s", "says"),
    [
        ("EventQuery=719", 60.0, "Asking the idle GPU for a sign of life failed: a kernel failed .*the GPU is lost"),
        ("EventRecord=999", 60.0, r"sign of life failed: unknown error \(CUDA error 999\)"),
        (
            "EventQuery=600",
            0.02,
            "The GPU 'stub' does not answer while nothing runs; the GPU is lost to this process",
        ),
    ],
)
def test_a_device_that_is_lost_while_it_idles(
    artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch, fails: str, within_s: float, says: str
) -> None:
    with engine(artifact, stub) as opened:
        stub.launches()
        # What does not lose it is an answer.
        for now in ("", "EventRecord=2", "EventQuery=1"):
            monkeypatch.setenv("STUB_CUDA", now)
            opened.check_device(60.0)
        monkeypatch.setenv("STUB_CUDA", fails)
        with pytest.raises(LlmcError, match=says) as raised:
            opened.check_device(within_s)
        assert raised.value.name == "device_lost"
        assert stub.launches() == []
        monkeypatch.delenv("STUB_CUDA")
        opened.submit([3, 4, 5], max_tokens=2)
        with pytest.raises(LlmcError, match="the GPU is lost"):
            opened.step()
    # Who asked a silent driver has the GPU until it answers.
    end = time.monotonic() + 60
    while stub.report() != "" and time.monotonic() < end:
        time.sleep(0.01)
    assert stub.report() == ""
    stub.recover()


def test_an_artifact_of_another_target(artifact: Path, tiny_artifact: TinyArtifact, stub: Stub) -> None:
    cuda, cpu = Device("cuda", {"library": str(stub.library)}), Device("cpu")
    with Artifact(tiny_artifact.artifact) as other, Artifact(artifact) as own:
        with pytest.raises(LlmcError, match=r"for devices of kind 'cpu' .* this one is of kind 'cuda'"):
            Engine(other, device=cuda)
        with pytest.raises(LlmcError, match=r"for devices of kind 'cuda' .* this one is of kind 'cpu'"):
            Engine(own, device=cpu)
    cuda.close()


@pytest.mark.skipif(not _CUDA_H.exists(), reason="no header of CUDA here")
def test_the_driver_is_declared_as_it_is(tmp_path: Path) -> None:
    """Every function, structure and number against NVIDIA's header."""
    api = (ROOT / "runtime" / "native" / "device" / "cuda" / "cu_api.h").read_text()
    functions = re.findall(r'X\((\w+),\s*"(\w+)",', api.replace("\\\n", " "))
    assert len(functions) > 30
    numbers = dict(re.findall(r"constexpr CuResult k(Cu\w+) = (\d+);", api))
    known = {number for _, number in re.findall(r"CUDA_(?:ERROR_)?(\w+)\s*=\s*(\d+)", _CUDA_H.read_text())}
    assert set(numbers.values()) <= known
    head = """
        #include <cuda.h>
        #include <cstddef>
        #include "device/cuda/cu_api.h"
        template <class> struct Of;
        template <class R, class... A> struct Of<R(A...)> { static constexpr size_t sizes[] = {sizeof(A)...}; };
        template <class R, class... A> struct Of<R (*)(A...)> : Of<R(A...)> {};
        template <class A, class B> constexpr bool Same() {
          if (sizeof(A::sizes) != sizeof(B::sizes)) return false;
          for (size_t i = 0; i < sizeof(A::sizes) / sizeof(size_t); ++i) if (A::sizes[i] != B::sizes[i]) return false;
          return true;
        }
        using Node = CUDA_KERNEL_NODE_PARAMS_v1;
        static_assert(sizeof(llmc::CuKernelNode) == sizeof(Node));
        static_assert(offsetof(llmc::CuKernelNode, block) == offsetof(Node, blockDimX));
        static_assert(offsetof(llmc::CuKernelNode, arguments) == offsetof(Node, kernelParams));
        using Config = CUlaunchConfig;
        static_assert(sizeof(llmc::CuLaunchConfig) == sizeof(Config));
        static_assert(offsetof(llmc::CuLaunchConfig, stream) == offsetof(Config, hStream));
        static_assert(offsetof(llmc::CuLaunchConfig, num_attributes) == offsetof(Config, numAttrs));
        static_assert(sizeof(llmc::CuLaunchAttribute) == sizeof(CUlaunchAttribute));
        static_assert(alignof(llmc::CuLaunchAttribute) == alignof(CUlaunchAttribute));
        static_assert(offsetof(llmc::CuLaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
        static_assert(offsetof(CUlaunchAttributeValue, programmaticStreamSerializationAllowed) == 0);
        static_assert(llmc::kCuProgrammaticSerialization == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
        static_assert(llmc::kCuCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
        static_assert(llmc::kCuCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
        static_assert(llmc::kCuMultiprocessors == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        static_assert(llmc::kCuMaxThreadsPerBlock == CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
        static_assert(llmc::kCuSharedBytesPerBlock == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
        static_assert(llmc::kCuStreamNonBlocking == CU_STREAM_NON_BLOCKING);
        static_assert(llmc::kCuEventDisableTiming == CU_EVENT_DISABLE_TIMING);
        static_assert(llmc::kCuJitErrorLog == CU_JIT_ERROR_LOG_BUFFER);
        static_assert(llmc::kCuJitErrorLogBytes == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES);
    """
    checks = [
        f'static_assert(Same<Of<decltype(::{symbol})>, Of<decltype(llmc::CuFunctions::{name})>>(), "{symbol}");'
        for name, symbol in functions
    ]
    source = tmp_path / "api.cc"
    source.write_text("\n".join((head, *checks)))
    command = ["c++", "-std=c++17", "-fsyntax-only", f"-I{_CUDA_H.parent}", f"-I{ROOT}/runtime/native", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_inspect_says_what_is_needed_and_what_is_here(
    artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(stub.library))
    text = inspected_text(artifact)
    assert "target: cuda:sm_80,sm_90, for devices of kind cuda with level 1" in text
    assert "this machine: device stub, target cuda:sm_90, memory_bytes 17179869184" in text
    monkeypatch.setenv("STUB_CUDA", "devices=0")
    assert "this machine: no device of kind cuda: Looking for a GPU failed" in inspected_text(artifact)


@pytest.mark.slow
def test_inspect_opening_and_packing_agree_on_where_code_runs(
    tmp_path: Path, kernel_cache: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers by wgmma have no PTX if there is no other architecture, whatever other kernels have."""
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(stub.library))
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    model = make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1, **sizes, num_key_value_heads=2)
    target = "cuda:sm_90a+wgmma"
    with fake_nvcc(tmp_path):
        compile_tiny(
            model, tmp_path / "out", kernel_cache, buckets="prefill=[1]x[16],decode=[1]x[32]", target=target,
            dtype="bf16",
        ).close()  # fmt: skip
    for capability, named in ((80, 80), (90, None), (103, 103), (121, 120)):
        monkeypatch.setenv("STUB_CUDA", f"capability={capability}")
        cuda_capabilities.cache_clear()
        text = inspected_text(tmp_path / "out")
        advice = f"has no code for this GPU, which is sm_{capability}: compile it with --target cuda:sm_{named}"
        assert (advice in text) == (named is not None) == ("the artifact does not run here" in text)
        assert resolve_target(target).runs_here() == (named is None)
        if named is None:
            replayer(tmp_path / "out", stub).close()
        else:
            has = "sm_90a, compute_90" if capability < 90 else "sm_90a"  # of the first kernel that has none
            says = f"code for {has} and 'stub' is sm_{capability}; compile it with --target cuda:sm_{named}$"
            with pytest.raises(LlmcError, match=says):
                replayer(tmp_path / "out", stub)
    cuda_capabilities.cache_clear()


def test_a_budget_of_the_devices_memory(artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares are of what the GPU has free; graphs whose instances have no room are launched, and none is dropped."""
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(stub.library))
    monkeypatch.setenv("STUB_CUDA", f"memory={64 << 20} others={16 << 20} graph={1 << 20}")
    with LLM(artifact, memory_utilization=0.5, graph_reserved_memory=0.13) as llm:
        assert llm.budget is not None
        assert llm.budget.dropped == ()
        assert llm.budget.device_options["graph_mib"] == 2
        assert "48.0 MiB free on the device, memory-utilization 0.5: 24.0 MiB to use" in llm.budget.lines[0]
        stats = llm.engine.stats
        assert stats.device["recorded_graphs"] == 2
        assert 10 << 20 < stats.device["kv_pool_bytes"] <= llm.budget.kv_bytes
    for ratio, launched in ((0.3, [1, 0]), (0.6, [0, 1])):
        with LLM(artifact, memory_utilization=0.5, graph_reserved_memory=0.08, graph_prompt_ratio=ratio) as llm:
            assert [graph.launched for graph in llm.engine.graph_stats()] == launched
    with pytest.raises(
        BudgetError, match=r"memory-utilization 0.001 of the device's 50331648 free bytes is 50331, but"
    ):
        LLM(artifact, memory_utilization=0.001)
    with pytest.raises(BudgetError, match=r"kv-bytes 33554432 is more than the"):
        LLM(artifact, memory_utilization=0.5, kv_bytes=32 << 20)
    monkeypatch.setenv("STUB_CUDA", "devices=0")
    with pytest.raises(LlmcError, match="the driver finds no GPU"):
        LLM(artifact, memory_utilization=0.5)


def test_weights_on_the_host_make_room(artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as was asked for, whatever the ring takes: in the device's memory, and for the KV cache of a budget."""
    monkeypatch.setenv("LLMC_CUDA_LIBRARY", str(stub.library))
    with engine(artifact, stub, eager=True) as opened:
        weight_bytes = opened.stats.device["weight_bytes"]

    def has_room(memory: int) -> bool:
        monkeypatch.setenv("STUB_CUDA", f"memory={memory}")
        with contextlib.suppress(LlmcError), engine(artifact, stub, eager=True):
            return True
        return False

    least = next(memory for memory in itertools.count(weight_bytes, 256 << 10) if has_room(memory))
    monkeypatch.setenv("STUB_CUDA", f"memory={least - (1 << 20)}")
    with engine(artifact, stub, eager=True, offload_mib=1) as opened:
        stats = opened.stats.device
    assert stats["offloaded_weight_bytes"] - stats["offload_ring_bytes"] >= 1 << 20
    assert 0 < stats["offload_ring_bytes"] <= stats["offloaded_weight_bytes"] // 4
    with pytest.raises(LlmcError, match=r"needs \d+ MiB|for .* from 'stub' failed"):
        engine(artifact, stub, eager=True, offload_mib=1, offload_ring_mib=64)

    monkeypatch.setenv("STUB_CUDA", f"memory={64 << 20}")
    rooms = []
    for offload_mib in (0, 1):
        given = {"offload_mib": offload_mib}
        with LLM(artifact, memory_utilization=0.25, device_options=given) as llm:
            assert llm.budget is not None
            assert ("1.0 MiB on the host" in llm.budget.lines[1]) == bool(offload_mib)
            rooms.append(llm.budget.kv_bytes)
    assert 0 <= (1 << 20) - (rooms[1] - rooms[0]) < 1 << 19


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.exhaustive), 7])
@pytest.mark.parametrize("options", [{}, {"offload_mib": 1}, {"offload_mib": 1, "eager": True}], ids=str)
def test_each_call_fails_once(
    artifact: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], step: int
) -> None:
    """From opening the device to the end of a request. It is opened, or says why not; the request has its tokens, or an
    error; and all is given back."""

    def run() -> list[int] | str:
        try:
            # No kernel computes anything, so the host draws, from the same rows each time.
            with engine(artifact, stub, device_sampling=False, **options) as opened:
                opened.submit([3, 4, 5], max_tokens=3, ignore_eos=True, temperature=0.0)
                while opened.step():
                    opened.check_integrity()
                return [event.token_id for event in opened.poll() if event.kind == "token"]
        except LlmcError as error:
            return error.name

    expected, found = run(), list[list[int] | str]()
    for call in itertools.count(1, step):
        before = stub.num_failed()
        monkeypatch.setenv("STUB_CUDA", f"only={call} code={1 + call // step % 2}")
        found.append(run())
        monkeypatch.delenv("STUB_CUDA")
        assert stub.report() == "", call
        if stub.num_failed() == before:
            break
    assert found[-1] == expected
    assert set(map(str, found)) - {str(expected)} <= {
        "device_failed",
        "out_of_memory",
        "not_found",
        "unsupported_target",
    }
    assert {"device_failed", "out_of_memory"} <= set(map(str, found))
    assert len(found) * step > 150
