"""Adapters by name: PEFT's files, what is refused and how it is said, and the Python API."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmc.cli.main import main
from llmc.manifest import read_manifest, write_manifest
from llmc.runtime.adapters import adapters as named_adapters
from llmc.runtime.adapters import tensors as tensor_files
from llmc.runtime.adapters.adapters import Adapters
from llmc.runtime.adapters.peft import read_adapter
from llmc.runtime.adapters.tensors import AdapterError
from llmc.runtime.binding import Artifact, Engine
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams
from llmc.runtime.request_error import RequestError

from support.adapter_setting import RANK, SLOTS, Setting
from support.adapters import PREFIX, logprobs_of, make_adapter, merged_model
from support.engine_driver import random_ids

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"


def changed(setting: Setting, path: Path, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    """Adapter a with other tensors, or with more in its configuration."""
    shutil.copytree(setting.adapters["a"], path)
    settings = json.loads((path / "adapter_config.json").read_text()) | config
    (path / "adapter_config.json").write_text(json.dumps(settings))
    if tensors is not None:
        save_file(tensors, path / "adapter_model.safetensors")
    return path


@pytest.fixture(scope="module")
def adapters(setting: Setting) -> Any:
    with Artifact(setting.artifact) as artifact, Engine(artifact) as engine:
        yield Adapters(setting.artifact, artifact, engine)


def pair(rank: int = 8, rows: int = 60, columns: int = 60, module: str = Q) -> dict[str, Any]:
    numbers = np.random.default_rng(0)
    a, b = numbers.random((rank, columns), np.float32), numbers.random((rows, rank), np.float32)
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


@pytest.mark.parametrize(
    ("tensors", "config", "why"),
    [
        (None, {"peft_type": "IA3"}, "peft_type is 'IA3'; llmc loads only LORA adapters"),
        (None, {"use_dora": True}, "use_dora is True, which cannot be loaded while the model runs; merge"),
        (None, {"init_lora_weights": "pissa_niter_4"}, "changes the model under the adapter too"),
        (None, {"init_lora_weights": "lora_ga"}, "changes the model under the adapter too"),
        (None, {"layer_replication": [[0, 1]]}, r"'layer_replication' is \[\[0, 1\]\], which llmc does not know"),
        (pair() | {f"{Q}.lora_diag": np.zeros(8, np.float32)}, {}, "lora_diag' is a part of LoRA that llmc does not k"),
        (None, {"rank_pattern": {"(": 3}}, r"rank_pattern has '\(', which is not a pattern"),
        (None, {"r": 9, "rank_pattern": {}}, "has rank 8 where adapter_config.json says 9"),
        (None, {"lora_alpha": "much"}, "lora_alpha is 'much', which is not a number"),
        (pair(RANK + 1), {"r": RANK + 1}, f"has rank {RANK + 1}, and the artifact takes up to {RANK}; compile it with "
         f"--lora-rank {RANK + 1}"),
        (pair(rows=61), {}, "is for a layer of 61 by 60, and the model's is 60 by 60"),
        (pair(module=f"{PREFIX}lm_head", rows=516), {}, "'lm_head' is for a layer of 516 by 60, and the model's is"),
        (pair(module=f"{PREFIX}model.layers.9.mlp.down_proj"), {}, "is not a layer of this artifact .*; merge the"),
        (pair(module=f"{PREFIX}model.layers.0.mlp.experts.1.up_proj"), {}, "run time; compile it with --lora-experts"),
        ({f"{PREFIX}model.embed_tokens.lora_embedding_A": np.zeros((8, 515), np.float32)}, {}, "has one of lora_A and"),
        ({f"{PREFIX}lm_head.weight": np.zeros((515, 60), np.float32)}, {}, "more than LoRA of a layer"),
        ({"x": np.zeros(1, np.float32)}, {}, "does not begin with base_model.model."),
        (dict([next(iter(pair().items()))]), {}, "has one of lora_A and lora_B and not the other"),
        (pair() | {f"{Q}.lora_B.weight": np.full((60, 8), np.nan, np.float32)}, {}, "infinite or not numbers"),
        (pair() | {f"{Q}.lora_B.weight": np.zeros((60, 7), np.float32)}, {}, "which do not fit"),
        (pair() | {f"{Q}.lora_B.weight": np.zeros((60, 8), np.int32)}, {}, "has the type 'I32'; use one of F32"),
        ({}, {}, "has no tensors"),
    ],
)  # fmt: skip
def test_what_is_refused(
    tensors: dict[str, Any] | None, config: dict[str, Any], why: str, adapters: Adapters, setting: Setting,
    tmp_path: Path,
) -> None:  # fmt: skip
    path = changed(setting, tmp_path / "x", tensors, **config)
    with pytest.raises(AdapterError, match=why) as refused:
        adapters.load("x", path)
    assert "\n" not in str(refused.value)
    assert adapters.all() == []


@pytest.mark.parametrize("begin", ["model.", ""])
def test_changes_of_parts_that_the_artifact_has_not(begin: str, setting: Setting, tmp_path: Path) -> None:
    manifest = read_manifest(setting.artifact)
    manifest["lora"]["unread"] = ["vision_tower.", "model.vision_tower.", "projector."]
    write_manifest(tmp_path / "manifest.json", manifest)
    tower = pair(rank=99, module=f"{PREFIX}{begin}vision_tower.layers.0.self_attn.q_proj")
    tower |= {f"{PREFIX}{begin}projector.weight": np.zeros((5, 5), np.float32)}
    with Artifact(setting.artifact) as artifact, Engine(artifact) as engine:
        adapters = Adapters(tmp_path, artifact, engine)
        path = changed(setting, tmp_path / "both", pair() | tower)
        assert adapters.load("both", path).rank == 8
        with pytest.raises(AdapterError, match="has no tensors of parts that read text, so there is nothing to load"):
            adapters.load("none", changed(setting, tmp_path / "none", tower))


def test_a_clone_without_git_lfs(adapters: Adapters, setting: Setting, tmp_path: Path) -> None:
    path = changed(setting, tmp_path / "x")
    (path / "adapter_model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    with pytest.raises(
        AdapterError, match=r"adapter_model\.safetensors is a pointer of Git LFS and not the file itself"
    ):
        adapters.load("x", path)


def test_layers_of_the_vocabulary_that_were_left_out(setting: Setting, tmp_path: Path) -> None:
    """Where their slots would be too large: it is said, by all names that adapters have for them."""
    manifest = read_manifest(setting.artifact)
    lora = manifest["lora"]
    lora |= {"linears": lora["linears"][1:-1], "left_out": [lora["linears"][0], lora["linears"][-1]]}
    lora["left_out"][1]["parts"][0]["module"] = "output"
    write_manifest(tmp_path / "manifest.json", manifest)
    embedding = f"{PREFIX}model.embed_tokens.lora_embedding_"
    of_table = {f"{embedding}A": np.ones((8, 515), np.float32), f"{embedding}B": np.ones((60, 8), np.float32)}
    of_head = [pair(module=f"{PREFIX}{name}", rows=515) for name in ("lm_head", "model.output")]
    with Artifact(setting.artifact) as artifact, Engine(artifact) as engine:
        adapters = Adapters(tmp_path, artifact, engine)
        for number, tensors in enumerate((of_table, *of_head)):
            with pytest.raises(AdapterError, match=r"more than kernels count; compile it with fewer --lora-slots"):
                adapters.load("x", changed(setting, tmp_path / str(number), tensors))


def test_files_that_are_none(adapters: Adapters, setting: Setting, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"has no adapter_config\.json; give the directory"):
        adapters.load("x", tmp_path / "nowhere")
    path = changed(setting, tmp_path / "x")
    weights = path / "adapter_model.safetensors"
    data = weights.read_bytes()
    for damaged in (b"", data[:7], data[:-1], b"\xff" * 8 + data[8:], data[:8] + b"x" + data[9:]):
        weights.write_bytes(damaged)
        with pytest.raises(AdapterError, match="truncated or corrupt"):
            adapters.load("x", path)
    weights.unlink()
    with pytest.raises(AdapterError, match=r"has no adapter_model\.safetensors"):
        adapters.load("x", path)
    (path / "adapter_model.bin").write_bytes(b"PK")
    with pytest.raises(AdapterError, match=r"has adapter_model\.bin and no adapter_model\.safetensors.*--merge-lora"):
        adapters.load("x", path)
    (path / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match="is not valid JSON"):
        adapters.load("x", path)


def test_base_weights_are_not_read(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an embedding or output projection PEFT saves its whole weight, here of a type that no adapter has."""
    base = {f"{PREFIX}lm_head.base_layer.weight": np.zeros((515, 60), np.int8)}
    read, floats = list[int](), tensor_files._floats

    def counted(data: bytes, dtype: str) -> Any:
        read.append(len(data))
        return floats(data, dtype)

    monkeypatch.setattr(tensor_files, "_floats", counted)
    assert list(read_adapter(changed(setting, tmp_path / "x", pair() | base), {}).layers) == [Q.removeprefix(PREFIX)]
    assert read == [4 * 8 * 60] * 2
    with pytest.raises(AdapterError, match=r"'lm_head\.base_layer\.weight' does not begin with base_model\.model\."):
        read_adapter(changed(setting, tmp_path / "y", {"lm_head.base_layer.weight": np.zeros(1, np.float32)}), {})


def test_a_number_stands_for_braces_alone(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other text in braces is part of a module's name."""
    parts = [{"module": "a.{x}.{}.b", "rows": 60}]
    lora = {"linears": [{"weight": "w", "columns": 60, "experts": 2, "parts": parts}], "orders": []}
    monkeypatch.setattr(named_adapters, "read_manifest", lambda path: {"lora": lora})
    with Artifact(setting.artifact) as artifact:
        adapters = Adapters(setting.artifact, artifact, None)
        assert list(adapters._module_places()) == ["a.{x}.0.b", "a.{x}.1.b"]


def test_names_and_slots(setting: Setting) -> None:
    with Artifact(setting.artifact) as artifact, Engine(artifact) as engine:
        adapters = Adapters(setting.artifact, artifact, engine)
        for name in "abc":
            adapters.load(name, setting.adapters[name])
        with pytest.raises(AdapterError, match="the adapter 'a' is loaded already; unload it first"):
            adapters.load("a", setting.adapters["a"])
        with pytest.raises(AdapterError, match=rf"every slot of {SLOTS} has an adapter \(a, b, c\); unload one"):
            adapters.load("d", setting.adapters["a"])
        with pytest.raises(AdapterError, match="there is no adapter 'd'; loaded: a, b, c"):
            adapters.unload("d")
        with pytest.raises(AdapterError, match="there is no adapter 'd'"):
            adapters.id_of("d")
        adapters.unload("b")
        assert [one.name for one in adapters.all()] == ["a", "c"]
        assert adapters.load("d", setting.adapters["b"]).rank == RANK


def test_half_precision_files(setting: Setting, tmp_path: Path) -> None:
    """bf16 and f16 are widened: they have the bits of their float32 values."""
    import ml_dtypes

    prompt, found = random_ids(5, 12), []
    tensors = load_file(setting.adapters["a"] / "adapter_model.safetensors")
    with LLM(setting.artifact, num_threads=1) as llm:
        for kind in (np.float16, ml_dtypes.bfloat16):
            rounded = {name: value.astype(kind) for name, value in tensors.items()}
            for number, values in enumerate((rounded, {n: v.astype(np.float32) for n, v in rounded.items()})):
                path = changed(setting, tmp_path / f"{np.dtype(kind).name}{number}", values)
                llm.load_adapter("x", path)
                found.append(llm.generate(prompt, SamplingParams(max_tokens=4, temperature=0.0, logprobs=2), lora="x"))
                llm.unload_adapter("x")
    assert [o.outputs[0].logprobs for o in found[0]] == [o.outputs[0].logprobs for o in found[1]]
    assert [o.outputs[0].logprobs for o in found[2]] == [o.outputs[0].logprobs for o in found[3]]
    assert found[0][0].outputs[0].logprobs != found[2][0].outputs[0].logprobs


def test_the_python_api(setting: Setting) -> None:
    prompts = [random_ids(i, 10 + i) for i in range(4)]
    with LLM(setting.artifact, num_threads=1, lora={"a": setting.adapters["a"], "b": setting.adapters["b"]}) as llm:
        names = [None, "a", "b", "a"]
        mixed = llm.generate(prompts, GREEDY, lora=names)
        for prompt, name, output in zip(prompts, names, mixed, strict=True):
            (alone,) = llm.generate(prompt, GREEDY, lora=name)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
            text = [*prompt, *output.outputs[0].token_ids]
            model = merged_model(setting.model, None if name is None else setting.adapters[name])
            assert logprobs_of(model, text)[len(prompt) - 1 : -1].argmax(-1).tolist() == text[len(prompt) :]
        assert [delta.error for delta in llm.stream(prompts[0], GREEDY, lora="b")][-1] is None
        with pytest.raises(RequestError, match="2 names of adapters for 4 prompts"):
            llm.generate(prompts, GREEDY, lora=["a", "b"])
        with pytest.raises(RequestError, match="there is no adapter 'z'; loaded: a, b"):
            llm.generate(prompts, GREEDY, lora="z")
        llm.unload_adapter("a")
        with pytest.raises(RequestError, match="there is no adapter 'a'; loaded: b"):
            llm.generate(prompts, GREEDY, lora="a")


def test_nothing_heavy_is_imported(setting: Setting) -> None:
    code = (
        "import sys; from llmc.runtime.llm import LLM; from llmc.runtime.params import SamplingParams\n"
        "with LLM(sys.argv[1], lora={'a': sys.argv[2]}) as llm:\n"
        "    llm.generate([[5, 6]], SamplingParams(max_tokens=2), lora='a')\n"
        "print(sorted({'torch', 'tvm', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    command = [sys.executable, "-P", "-c", code, str(setting.artifact), str(setting.adapters["a"])]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["run", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_run(setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [random_ids(7, 12), random_ids(8, 12)]
    with LLM(setting.artifact, num_threads=1, lora={n: setting.adapters[n] for n in "ab"}) as llm:
        expected = {
            name: [list(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY, lora=name)]
            for name in (None, "a", "b")
        }
    file = tmp_path / "p.jsonl"
    common = (setting.artifact, "--prompts", file, "--json", "-q", "--temperature", "0", "--max-tokens", "6",
              "--ignore-eos")  # fmt: skip
    one, other = (f"{name}={setting.adapters[name]}" for name in "ab")

    def ids(out: str) -> list[list[int]]:
        return [record["outputs"][0]["token_ids"] if "outputs" in record else record["token_ids"]
                for record in json.loads(out)["results"]]  # fmt: skip

    file.write_text("\n".join(json.dumps({"prompt_token_ids": p}) for p in prompts))
    code, out, _ = run(capsys, *common, "--lora", one)
    assert (code, ids(out)) == (0, expected["a"])
    code, out, _ = run(capsys, *common, "--lora", one, "--lora", other)
    assert (code, ids(out)) == (0, expected[None])
    lines = [{"prompt_token_ids": p, "lora": name} for p, name in zip(prompts, "ba", strict=True)]
    file.write_text("\n".join(map(json.dumps, lines)))
    code, out, _ = run(capsys, *common, "--lora", one, "--lora", other)
    assert (code, ids(out)) == (0, [expected["b"][0], expected["a"][1]])
    code, _, error = run(capsys, *common, "--lora", one)
    assert code != 0
    assert "prompt 0 is for the adapter 'b': --lora gives a" in error
    for option, why in (("a", "is not NAME=PATH"), ("=x", "is not NAME=PATH")):
        code, _, error = run(capsys, *common, "--lora", option)
        assert code != 0
        assert why in error


def test_an_artifact_without_room_says_so(tiny_artifact: Any, setting: Setting, capsys: Any) -> None:
    with pytest.raises(AdapterError, match="takes no adapters; compile the model with --lora-slots"):
        LLM(tiny_artifact.artifact, lora={"a": setting.adapters["a"]})
    code = main(["compile", "model", "-o", "out", "--lora-rank", "8"])
    assert code != 0
    assert "add --lora-slots N" in " ".join(capsys.readouterr().err.split())


def test_conversions_of_names(setting: Setting, tmp_path: Path) -> None:
    """Scales of patterns and of rank-stabilised adapters are PEFT's."""
    path = make_adapter(tmp_path / "x", setting.model, ("q_proj", "down_proj"), rank=4, seed=5)
    settings = json.loads((path / "adapter_config.json").read_text())
    settings |= {"use_rslora": True, "lora_alpha": 3, "alpha_pattern": {r"layers\.1\.mlp\.down_proj": 5}}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    from llmc.runtime.adapters.peft import read_adapter

    found = read_adapter(path, {}).layers
    assert found["model.layers.0.self_attn.q_proj"].scale == 1.5
    assert found["model.layers.1.mlp.down_proj"].scale == 2.5
