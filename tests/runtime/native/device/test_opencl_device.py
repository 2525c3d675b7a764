"""The opencl device where something goes wrong: a library whose calls fail stands for drivers and devices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.targets.gpu import backend
from llmc.compiler.targets.gpu.opencl import NEXT_PROGRAM, PRELUDE, OpenClTarget
from llmc.compiler.targets.gpu.sampling import sampling_specs
from llmc.runtime.binding import Artifact, Device, Engine, LlmcError, Replayer
from llmc.runtime.binding.hand_over import HandedText

from support.artifacts import TinyArtifact, made_once
from support.compiled import Pages, compile_tiny, replay
from support.opencl import needs_opencl, stub_library
from support.tiny_models import make_tiny_model

_ONE_BUCKET: dict[str, Any] = {"buckets": "prefill=[1]x[16],decode=[1]x[32]", "block_size": 16, "target": "opencl"}


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_library(tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    def make(root: Path) -> None:
        model = make_tiny_model(root / "model", "llama")
        compile_tiny(model, root / "out", kernel_cache, **_ONE_BUCKET).close()

    return made_once(tmp_path_factory, "opencl-one-bucket", make) / "out"


def with_programs(
    monkeypatch: pytest.MonkeyPatch, programs: Callable[[Sequence[bytes]], list[Sequence[bytes]]]
) -> None:
    """Has files consist of `programs(codes of all kernels)`."""

    def link(_: OpenClTarget, codes: Sequence[bytes], path: Path) -> None:
        texts = [b"\n".join((PRELUDE.encode(), *kernels)) for kernels in programs(codes)]
        path.write_bytes(NEXT_PROGRAM.encode().join(texts))

    monkeypatch.setattr(OpenClTarget, "link", link)


def programs_of(artifact: Path, stub: Path, cache: Path) -> tuple[int, int]:
    """How many programs an engine has, and how many of them it found in `cache`."""
    with Artifact(artifact) as opened:
        engine = Engine(opened, num_blocks=4, opencl_library=str(stub), program_cache=str(cache))
    return engine.stats.device["programs"], engine.stats.device["cached_programs"]


def replayer(artifact: Path, stub: Path, cache: Path) -> Replayer:
    with Artifact(artifact) as opened:
        return Replayer(opened, num_blocks=4, opencl_library=str(stub), program_cache=str(cache))


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("platforms=0", "no driver is installed; install the driver"),
        ("GetPlatformIDs=-1001", "no driver is installed; install the driver"),
        ("GetPlatformIDs=-6", "Listing OpenCL drivers failed: the host has no memory left"),
        ("devices=0", "the installed drivers have none; install the driver"),
        ("available=0", "is not available now; wait"),
        ("CreateContext=-5", "out of resources"),
    ],
)
def test_a_machine_without_a_device(stub: Path, monkeypatch: pytest.MonkeyPatch, fails: str, says: str) -> None:
    monkeypatch.setenv("STUB_OPENCL", fails)
    with pytest.raises(LlmcError, match=says):
        Device("opencl", {"library": str(stub)})


def test_a_library_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(LlmcError, match=r"OpenCL cannot be loaded .*name one with library="):
        Device("opencl", {"library": str(tmp_path / "nothing.so")})
    with pytest.raises(
        LlmcError, match=r"libm.so.6 is not a loader of OpenCL 1.2 or later: it has no clGetPlatformIDs"
    ):
        Device("opencl", {"library": "libm.so.6"})


def test_a_device_that_is_not_there(stub: Path) -> None:
    with pytest.raises(LlmcError, match=r"no OpenCL device number 3; this machine has numbers 0 … 0"):
        Device("opencl", {"library": str(stub), "device": 3})
    with pytest.raises(LlmcError, match=r"has no option 'threads'; it knows library, device, eager, graph_mib"):
        Device("opencl", {"library": str(stub), "threads": 3})


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (
            "BuildProgram=-11",
            r"'\w+' of kernels.cl does not build on 'stub': line 1: no such word; choose another device",
        ),
        ("BuildProgram=-6", r"Building '\w+' of kernels.cl on 'stub' failed: the host has no memory left"),
        ("CreateKernel=-6", r"Making kernel '\w+' on 'stub' failed: the host has no memory left"),
        ("items=32", "groups of 64 work items and this device at most 32; choose another device"),
        ("memory=1000", r"needs \d+ MiB .* and 'stub' has 0 MiB; ask for a smaller KV pool"),
        ("buffer=1000", "KV pool needs a buffer of .*takes at most 0 MiB"),
        ("CreateBuffer=-4", "the device has no memory left .*; lower --gpu-memory-utilization"),
        ("EnqueueFillBuffer=-4", "the device has no memory left"),
        ("EnqueueWriteBuffer=-5", "Copying weights to 'stub' failed: the device is out of resources"),
        ("CreateCommandQueue=-2", "the device is not available .*; wait for whoever has it"),
        ("EnqueueNDRangeKernel=-5", "Launching a kernel on 'stub' failed: the device is out of resources"),
        ("SetKernelArg=-38", "Giving a kernel its arguments"),
    ],
)
def test_loading_fails(
    artifact: Path, stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, says: str
) -> None:
    monkeypatch.setenv("STUB_OPENCL", fails)
    with pytest.raises(LlmcError, match=says):
        replayer(artifact, stub, tmp_path / "cache")


@pytest.mark.parametrize(
    "fails",
    ["EnqueueWriteBuffer@1=-5", "EnqueueNDRangeKernel=-5", "EnqueueReadBuffer@1=-14", "Flush=-36"],
)
def test_a_step_fails_and_the_device_goes_on(
    artifact: Path, stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    device, pages = replayer(artifact, stub, tmp_path / "cache"), Pages(4, 16)
    for _ in range(2):
        monkeypatch.setenv("STUB_OPENCL", fails)
        with pytest.raises(LlmcError, match=r"(on|to|from) 'stub'"):
            replay(device, 0, pages, [(0, [3, 4, 5], 0)])
        monkeypatch.delenv("STUB_OPENCL")
        assert replay(device, 0, pages, [(0, [3, 4, 5], 0)]).shape[0] == 1


@pytest.mark.parametrize(
    "fails",
    ["EnqueueReadBuffer@1=-14", "EnqueueMarkerWithWaitList=-14", "WaitForEvents=-14", "Flush@2=-14", "Flush@1=-14"],
)
def test_a_device_that_fails_ends_requests_one_by_one_and_goes_on(
    artifact: Path, stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Also where the next step is being chained to the one that runs: nothing waits then."""
    waiting = ctypes.CDLL(str(stub)).stub_opencl_waiting
    with Artifact(artifact) as opened:
        engine = Engine(opened, num_blocks=4, opencl_library=str(stub), program_cache=str(tmp_path))
    monkeypatch.setenv("STUB_OPENCL", fails)
    engine.submit([3, 4, 5], max_tokens=3, ignore_eos=True)
    with pytest.raises(LlmcError, match="a command failed on the device"):
        engine.step()
    failed = [event for event in engine.poll() if event.kind == "failed"]
    assert [event.error_message for event in failed]
    assert waiting() == 0
    monkeypatch.delenv("STUB_OPENCL")
    engine.submit([3, 4, 5], max_tokens=3, ignore_eos=True)
    while engine.step():
        engine.check_integrity()
    assert sum(event.kind == "token" for event in engine.poll()) == 3
    assert engine.stats.device["chained_steps"] >= 2


def test_a_device_that_is_lost_stays_lost(
    artifact: Path, stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenCL names no such error: it is lost if a few bytes do not come back from it."""
    with Artifact(artifact) as opened:
        engine = Engine(opened, num_blocks=4, opencl_library=str(stub), program_cache=str(tmp_path))
    monkeypatch.setenv("STUB_OPENCL", "EnqueueReadBuffer=-5")
    engine.submit([3, 4, 5], max_tokens=3, ignore_eos=True)
    lost = "failed: the device is out of resources .*; the device 'stub' is lost to this process: restart it"
    for _ in range(2):
        with pytest.raises(LlmcError, match=lost) as raised:
            engine.step()
        assert raised.value.name == "device_lost"
        monkeypatch.delenv("STUB_OPENCL", raising=False)
        engine.submit([3, 4, 5], max_tokens=3, ignore_eos=True)
    assert [event.error_code for event in engine.poll() if event.kind == "failed"] == [raised.value.code] * 2


def test_a_device_that_is_lost_while_it_idles(
    artifact: Path, stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Artifact(artifact) as opened:
        engine = Engine(opened, num_blocks=4, opencl_library=str(stub), program_cache=str(tmp_path))
    engine.check_device(10.0)
    monkeypatch.setenv("STUB_OPENCL", "EnqueueWriteBuffer=-5")
    for _ in range(2):
        with pytest.raises(LlmcError, match="'stub' does not answer while nothing runs; it is lost to this") as raised:
            engine.check_device(10.0)
        assert raised.value.name == "device_lost"
        monkeypatch.delenv("STUB_OPENCL", raising=False)
    engine.submit([3, 4, 5], max_tokens=3, ignore_eos=True)
    with pytest.raises(LlmcError, match="does not answer while nothing runs"):
        engine.step()


def test_an_artifact_whose_kernels_pass_no_tokens_on(
    stub: Path, kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of level 0: steps are prepared, and begin when the tokens before them are known."""
    monkeypatch.setattr(backend, "sampling_specs", lambda vocab: sampling_specs(vocab)[:-1])
    model = make_tiny_model(tmp_path / "model", "llama")
    ladder = "prefill=[1]x[16],decode=[1]x[32]"
    with compile_tiny(model, tmp_path / "out", kernel_cache, buckets=ladder, target="opencl") as artifact:
        engine = Engine(artifact, num_blocks=4, opencl_library=str(stub), program_cache=str(tmp_path))
    engine.submit([3, 4, 5], max_tokens=3, ignore_eos=True)
    while engine.step():
        engine.check_integrity()
    assert sum(event.kind == "token" for event in engine.poll()) == 3
    assert engine.stats.num_ahead_steps == 2
    assert engine.stats.device["chained_steps"] == 0


def test_a_block_that_cannot_be_read_leaves_nothing_behind(
    artifact: Path, stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of the layers before may not arrive in memory that the caller has freed."""
    with Artifact(artifact) as opened:
        prompt = [3] * (opened.info.block_size + 1)
        engine = Engine(opened, num_blocks=4, opencl_library=str(stub), program_cache=str(tmp_path))
    engine.submit(prompt, max_tokens=1, ignore_eos=True)
    while engine.step():
        pass
    waiting, text = ctypes.CDLL(str(stub)).stub_opencl_waiting, HandedText(engine, prompt)
    monkeypatch.setenv("STUB_OPENCL", "EnqueueReadBuffer@3=-5")
    with pytest.raises(LlmcError, match="Reading a KV block of 'stub' failed: the device is out of resources"):
        text.export()
    assert waiting() == 0
    monkeypatch.delenv("STUB_OPENCL")
    assert text.export().num_blocks == 1
    assert waiting() == 0


def test_programs_are_built_once(artifact: Path, stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cached() -> int:
        return programs_of(artifact, stub, tmp_path / "a" / "b")[1]

    count = len((artifact / "kernels.cl").read_text().split(NEXT_PROGRAM))
    assert [cached(), cached()] == [0, count]
    file, *others = (tmp_path / "a" / "b").iterdir()
    assert len(others) == count - 1
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:10], b"", whole + b"x", bytes([whole[0] ^ 1]) + whole[1:], whole[:-1] + b"?"):
        file.write_bytes(damaged)
        assert cached() == count - 1
        assert file.read_bytes() == whole
    # A driver may refuse what an older one wrote.
    monkeypatch.setenv("STUB_OPENCL", "CreateProgramWithBinary=-42")
    assert cached() == 0


def test_artifacts_share_what_was_built(artifact: Path, stub: Path, kernel_cache: Path, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", intermediate_size=96)
    compile_tiny(model, tmp_path / "out", kernel_cache, **_ONE_BUCKET).close()
    texts = [set((folder / "kernels.cl").read_text().split(NEXT_PROGRAM)) for folder in (artifact, tmp_path / "out")]
    assert programs_of(artifact, stub, tmp_path / "programs") == (len(texts[0]), 0)
    common = len(texts[0] & texts[1])
    assert 0 < common < len(texts[1])
    assert programs_of(tmp_path / "out", stub, tmp_path / "programs") == (len(texts[1]), common)


def test_files_with_all_kernels_in_one_program(
    stub: Path, kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As compilers wrote them earlier."""
    with_programs(monkeypatch, lambda codes: [codes])
    model = make_tiny_model(tmp_path / "model", "llama")
    compile_tiny(model, tmp_path / "out", kernel_cache, **_ONE_BUCKET).close()
    assert [programs_of(tmp_path / "out", stub, tmp_path / "programs")[1] for _ in range(2)] == [0, 1]
    monkeypatch.setenv("STUB_OPENCL", "BuildProgram=-11")
    with pytest.raises(LlmcError, match=r"^kernels\.cl does not build on 'stub': line 1"):
        programs_of(tmp_path / "out", stub, tmp_path / "other")


def test_a_kernel_that_is_not_in_its_file(
    stub: Path, kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_programs(monkeypatch, lambda codes: [[code] for code in codes[1:]])
    model = make_tiny_model(tmp_path / "model", "llama")
    compile_tiny(model, tmp_path / "out", kernel_cache, **_ONE_BUCKET).close()
    with pytest.raises(LlmcError, match=r"kernels.cl' is damaged: it has no kernel '\w+'; compile the artifact again"):
        programs_of(tmp_path / "out", stub, tmp_path / "programs")


@needs_opencl
def test_the_first_kernel_that_does_not_build_is_named(
    kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many threads build: those behind it may fail earlier."""
    with_programs(monkeypatch, lambda codes: [[b"__kernel void fails_%d(int a) { a = b; }" % i] for i in range(9)])
    model = make_tiny_model(tmp_path / "model", "llama")
    compile_tiny(model, tmp_path / "out", kernel_cache, **_ONE_BUCKET).close()
    for _ in range(3):
        with (
            Artifact(tmp_path / "out") as opened,
            pytest.raises(LlmcError, match=r"^'fails_0' of kernels\.cl does not"),
        ):
            Engine(opened, num_blocks=4)


def test_an_artifact_of_another_target(artifact: Path, tiny_artifact: TinyArtifact, stub: Path) -> None:
    opencl, cpu = Device("opencl", {"library": str(stub)}), Device("cpu")
    with Artifact(tiny_artifact.artifact) as other, Artifact(artifact) as own:
        with pytest.raises(LlmcError, match=r"for devices of kind 'cpu' .* this one is of kind 'opencl'"):
            Engine(other, device=opencl)
        with pytest.raises(LlmcError, match=r"for devices of kind 'opencl' .* this one is of kind 'cpu'"):
            Engine(own, device=cpu)
