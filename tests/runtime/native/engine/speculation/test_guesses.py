"""Guesses of next tokens change no bit of any result, on a compiled tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmc.manifest import write_manifest
from llmc.runtime.binding import Artifact, Engine, LlmcError
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams as LLMParams
from llmc.runtime.request_error import RequestError
from llmc.runtime.speculation import Speculation, parse_speculation

from support.compiled import compile_tiny
from support.engine_driver import random_ids
from support.families import CASES
from support.repeating import repeating_requests, run_twice
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native


@pytest.mark.parametrize("options", [{"num_blocks": 100}, {"num_blocks": 9}, {"num_blocks": 60, "max_num_seqs": 3}])
def test_guesses_change_no_bit(options: dict[str, Any], llama: tuple[Path, Artifact]) -> None:
    requests = repeating_requests()
    plain, without = run_twice(llama[1], requests, **options)
    found, stats = run_twice(llama[1], requests, speculate_tokens=5, speculate_always=1, **options)
    assert found == plain
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert 0 < stats.num_speculative_steps <= stats.num_steps < without.num_steps
    assert without.drafted_tokens == without.num_speculative_steps == 0
    assert (stats.num_preemptions > 0) == (options["num_blocks"] == 9)
    # How many guesses go along when that is measured depends on the machine: what comes out does not.
    assert run_twice(llama[1], requests, speculate_tokens=5, **options)[0] == plain


def test_a_draft_changes_no_bit(llama: tuple[Path, Artifact]) -> None:
    """One that is the model itself is always right: it draws with the same random numbers, and has the same bits."""
    requests = repeating_requests()
    options: dict[str, Any] = {"num_blocks": 100, "max_num_seqs": 5}
    plain, without = run_twice(llama[1], requests, **options)
    found, stats = run_twice(
        llama[1], requests, speculate_tokens=3, speculate_always=1, draft=llama[1], num_threads=2, **options
    )
    assert found == plain
    assert 0 < stats.accepted_tokens == stats.drafted_tokens
    assert stats.num_decode_steps < without.num_decode_steps


def test_a_draft_has_no_states(llama: tuple[Path, Artifact], tmp_path: Path, kernel_cache: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "lfm2", **CASES["lfm2"][1])
    built = compile_tiny(model, tmp_path / "states", kernel_cache, buckets="prefill=1x16,decode=1x32", dtype="f32")
    refusal = r"^Layers of the draft have a state, which no guess can be taken back from"
    with built as states, pytest.raises(LlmcError, match=refusal):
        Engine(llama[1], num_threads=1, speculate_tokens=5, draft=states)


def test_a_draft_is_warm_before_requests_and_in_the_budget(llama: tuple[Path, Artifact]) -> None:
    model = llama[0].parent / "artifact"
    graphs = llama[1].graphs()
    for skip in (False, True):
        with LLM(model, num_threads=1, draft=model, memory_utilization=0.5, kv_bytes=1 << 20, skip_warmup=skip) as llm:
            assert llm.engine.has_draft
            assert llm.warm_up.num_warm == (0 if skip else len(graphs))
            assert llm.budget is not None
            assert any("the draft's" in line for line in llm.budget.lines)
            assert llm.engine.warm_draft() > 0
    with Engine(llama[1], num_threads=1) as engine, pytest.raises(LlmcError, match="engine has no draft to make warm"):
        engine.warm_draft()


def test_drafts_that_do_not_fit(llama: tuple[Path, Artifact], tmp_path: Path) -> None:
    model = llama[0].parent / "artifact"
    with pytest.raises(RequestError, match=r"speculate 'draft:3' needs a model that guesses"):
        LLM(model, num_threads=1, speculate="draft:3")
    with pytest.raises(RequestError, match=r"speculate 'ngram' leaves the draft .* nothing to do"):
        LLM(model, num_threads=1, speculate="ngram", draft=model)
    with pytest.raises(RequestError, match=r"draft .*: cannot read .*; is .* an llmc artifact\?"):
        LLM(model, num_threads=1, draft=tmp_path)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    manifest = json.loads((other / "manifest.json").read_text(encoding="utf-8"))
    files = {"tokenizer.json": {"bytes": 3, "sha256": "0" * 64}}
    if "tokenizer.json" in manifest["files"]:
        write_manifest(other / "manifest.json", {**manifest, "files": {**manifest["files"], **files}})
        with pytest.raises(
            RequestError, match=r"the draft .*other has another tokenizer.json than .*: compile a draft"
        ):
            LLM(model, num_threads=1, draft=other)
    with pytest.raises(LlmcError, match="draft is given but speculate_tokens is 0"):
        Engine(llama[1], num_threads=1, draft=llama[1])


def test_answers_of_llm_are_the_same(llama: tuple[Path, Artifact]) -> None:
    """With ends at stop ids and at a limit; usage counts what was kept."""
    model = llama[0].parent / "artifact"
    prompts = [random_ids(5, 30), random_ids(6, 12) * 3]
    params = LLMParams(max_tokens=30, temperature=0.0, logit_bias={9: 30.0, 11: 29.0}, logprobs=2, ignore_eos=True)
    told = []
    for options in ({}, {"speculate": "ngram:6:always"}, {"draft": model, "speculate": "draft:4:always"}):
        with LLM(model, num_threads=1, **options) as llm:
            told.append(
                [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.usage) for o in llm.generate(prompts, params)]
            )
            assert (llm.stats().accepted_tokens > 0) == bool(options)
    assert told[0] == told[1] == told[2]


def test_an_engine_names_what_it_cannot_guess(llama: tuple[Path, Artifact]) -> None:
    with pytest.raises(LlmcError, match=r"speculate_tokens is 65; use 0 \(none\) to 64"):
        Engine(llama[1], num_threads=1, speculate_tokens=65)


def test_what_speculate_takes() -> None:
    assert parse_speculation("off") == parse_speculation(None) == Speculation()
    assert parse_speculation(None, "d") == parse_speculation("draft", "d") == Speculation(16, draft=Path("d"))
    assert [str(parse_speculation(*given)) for given in (("off",), ("ngram:3",), ("draft:2", "d"))] == [
        *("off", "ngram:3", "draft:2")
    ]
    assert parse_speculation("ngram").tokens > 0
    assert parse_speculation("ngram:5") == Speculation(5)
    assert parse_speculation("ngram:64:always") == Speculation(64, always=True)
    assert Speculation(3, always=True).engine_options() == {"speculate_tokens": 3, "speculate_always": 1}
    number: Any = 5
    wrong = ("", "on", "ngram:", "ngram:0", "ngram:65", "ngram:x", "ngram:3:ever", "ngram:3:always:1", "off:3", number)
    for text in wrong:
        with pytest.raises(
            RequestError, match=r"speculate .* is unknown: use off, ngram or draft, or ngram:K with 1 to"
        ):
            parse_speculation(text)
