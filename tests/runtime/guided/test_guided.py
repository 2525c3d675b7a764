"""Guided decoding: every text is what the grammar says, masks know the vocabulary, and bad grammars are told apart."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.guided.compiler import GuideCompiler, GuideError, TokenGuide
from llmc.runtime.guided.constraint import MAX_GRAMMAR_BYTES, MAX_SOURCE_BYTES, MAX_TEXT_BYTES, Guided, schema_text
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams
from llmc.runtime.request_error import RequestError

from support.guides import COMPILER, EOS, NUM_TOKENS, PERSON, TOKENIZER, allowed, random_text

SCHEMAS: dict[str, dict[str, Any] | bool] = {
    "person": PERSON,
    "any_of": {"anyOf": [{"type": "integer"}, {"type": "object", "properties": {"x": {"const": "é\n"}}}]},
    "recursive": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "boolean"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["value", "children"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "map": {"type": "object", "additionalProperties": {"type": ["integer", "null"]}},
    "formats": {
        "type": "object",
        "properties": {"day": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "uuid"}},
        "required": ["day", "id"],
        "additionalProperties": False,
    },
    "tuple": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number", "minimum": 2.5}], "minItems": 2},
    "all_of": {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"type": "integer"}}}]},
    "true": True,
}


def text_of(compiler: GuideCompiler, token: int) -> str:
    return compiler._tokenizer.decode_str([token])


def parse(text: str) -> Any:
    """JSON with numbers beyond float's range (1e999 is a valid number) brought back into it."""
    return json.loads(text, parse_float=lambda number: min(max(float(number), -1e300), 1e300))


@pytest.mark.parametrize("name", SCHEMAS)
def test_any_text_is_json_that_the_schema_accepts(name: str) -> None:
    make = COMPILER.compile(Guided.json_schema(SCHEMAS[name]))
    validator = jsonschema_rs.validator_for(SCHEMAS[name], validate_formats=True)
    for seed in range(8):
        validator.validate(parse(random_text(make(), seed)))


_NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
_LEAVES = st.one_of(
    st.just({"type": "string"}),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, *[st.integers(0, 5)] * 2
    ),
    st.just({"type": "number"}),
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, *[st.integers(0, 999)] * 2),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda values: {"enum": values}, st.lists(_NAMES | st.integers(-9, 9), min_size=1, max_size=4)),
)


def _objects(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], num_required: int, closed: bool) -> dict[str, Any]:
        schema = {"type": "object", "properties": properties, "required": list(properties)[:num_required]}
        return {**schema, "additionalProperties": False} if closed else schema

    return st.builds(build, st.dictionaries(_NAMES, children, max_size=4), st.integers(0, 4), st.booleans())


_SCHEMAS = st.recursive(
    _LEAVES,
    lambda children: st.one_of(
        _objects(children),
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 3}, children),
        st.builds(lambda options: {"anyOf": options}, st.lists(children, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@settings(max_examples=100)
@given(schema=_SCHEMAS, seed=st.integers(0, 1 << 30))
def test_generated_schemas(schema: dict[str, Any], seed: int) -> None:
    guide = COMPILER.compile(Guided.json_schema(schema))()
    text = random_text(guide, seed)
    jsonschema_rs.validator_for(schema).validate(parse(text))


def test_json_object_is_an_object() -> None:
    for seed in range(5):
        assert isinstance(json.loads(random_text(COMPILER.compile(Guided.json_object())(), seed)), dict)


@pytest.mark.parametrize("pattern", ["[a-f]{3,9}", r"\d{4}-\d\d/\w", "a/b\\/c\n(x|y)?", "(é|日本)+z", r'"\\"'])
def test_regex(pattern: str) -> None:
    make = COMPILER.compile(Guided.regex(pattern))
    for seed in range(5):
        assert re.fullmatch(pattern, random_text(make(), seed), re.ASCII)


def test_choice() -> None:
    choices = ["yes", "no", 'with "quotes" /', "日本\n", "yes, but"]
    make = COMPILER.compile(Guided.choice(choices))
    seen = {random_text(make(), seed, num_free=100) for seed in range(60)}
    assert seen <= set(choices)
    assert len(seen) > 2


@pytest.mark.parametrize("text", ['start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"'], ids=["lark", "gbnf"])
def test_grammar(text: str) -> None:
    make = COMPILER.compile(Guided.grammar(text))
    for seed in range(5):
        found = re.fullmatch(r"(\(*)x(\)*)", random_text(make(), seed, num_free=20))
        assert found is not None
        assert len(found[1]) == len(found[2])


def test_mask_covers_the_tokenizer_and_no_padding() -> None:
    guide = COMPILER.compile(Guided.regex(r"(.|\n)*"))()
    tokens = allowed(guide)
    assert max(tokens) == NUM_TOKENS - 1
    assert len(tokens) > NUM_TOKENS - 100
    assert 0 not in tokens, "a special token is no text"
    assert guide.mask().size * 32 == NUM_TOKENS


def test_mask_of_a_model_with_fewer_logits_than_the_tokenizer() -> None:
    guide = GuideCompiler(TOKENIZER, 1000, [EOS]).compile(Guided.regex("[a-z ]+"))()
    assert guide.mask().size == 32


def test_several_eos_tokens_end_a_text() -> None:
    guide = GuideCompiler(TOKENIZER, NUM_TOKENS, [EOS, 0]).compile(Guided.regex("a"))()
    guide.accept(next(token for token in allowed(guide) if text_of(COMPILER, token) == "a"))
    assert allowed(guide) == [0, EOS]


def test_guides_of_one_grammar_are_independent() -> None:
    make = COMPILER.compile(Guided.json_schema(PERSON))
    first, second = make(), make()
    alone = random_text(make(), 7)
    for token in (allowed(first)[0],):
        first.accept(token)
    assert random_text(second, 7) == alone


def test_space_between_tokens_of_json_is_bounded() -> None:
    guide = COMPILER.compile(Guided.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 1}))()
    for token in COMPILER._tokenizer.tokenize_str("[\n" + " " * 32):
        guide.accept(token)
    assert all(text_of(COMPILER, token).strip() for token in allowed(guide))


def test_refused_token() -> None:
    guide = COMPILER.compile(Guided.regex("abc"))()
    with pytest.raises(GuideError, match="cannot go on"):
        guide.accept(5)
    assert not guide.finished


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Guided.json_schema({"type": "strin"}), r"at #: Invalid type: strin"),
        (lambda: Guided.json_schema({"properties": {"a": {"items": {"not": {}}}}}), r'#/properties/a/items: .*"not"'),
        (
            lambda: Guided.json_schema({"properties": {"x/y": {"$ref": "#/$defs/q"}}}),
            r"#/properties/x~1y: .*'/\$defs/q'",
        ),
        (lambda: Guided.json_schema({"$defs": {"q": {"uniqueItems": True}}, "$ref": "#/$defs/q"}), r"#/\$defs/q: "),
        (lambda: Guided.json_schema({"anyOf": [{"type": "null"}, {"format": "zz"}]}), "#/anyOf/1: Unknown format: zz"),
        (
            lambda: Guided.json_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}),
            "'a' is unsatisfiable",
        ),
        (lambda: Guided.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "use anyOf"),
        (lambda: Guided.json_schema({"$ref": "https://example.org/schema"}), "example.org"),
        (lambda: Guided.json_schema("{"), "not valid JSON: Expecting"),
        (lambda: Guided.json_schema("[1]"), r"is \[1\]: give an object"),
        (lambda: Guided.json_schema(False), "accepts nothing"),
        (lambda: Guided.json_schema({"maximum": 10**30}), "at most 64 bits"),
        (lambda: Guided.json_schema({"const": object()}), "holds a object: use JSON types"),
        (lambda: Guided.json_schema({"const": "\ud800"}), "half a surrogate pair"),
        (lambda: Guided.json_schema({"enum": ["x" * MAX_SOURCE_BYTES]}), f"at most {MAX_SOURCE_BYTES} are taken"),
        (lambda: Guided.json_schema({"enum": [0] * MAX_SOURCE_BYTES}), f"at most {MAX_SOURCE_BYTES} are taken"),
        (lambda: Guided.json_schema(" " * MAX_SOURCE_BYTES + "{}"), f"at most {MAX_SOURCE_BYTES} are taken"),
        (lambda: Guided.json_schema({"const": "x" * 100_000}), f"a text in .* at most {MAX_TEXT_BYTES} are taken"),
        (lambda: Guided.json_schema({"const": {"description": "x" * 9000}}), f"at most {MAX_TEXT_BYTES} are taken"),
        (lambda: Guided.json_schema({"items": {"pattern": "x" * 9000}}), f"at most {MAX_TEXT_BYTES} are taken"),
        (lambda: Guided.json_schema({"properties": {"x" * 9000: {}}}), f"a name in .* at most {MAX_TEXT_BYTES} are"),
        (lambda: Guided.regex("a" * (MAX_TEXT_BYTES + 1)), f"at most {MAX_TEXT_BYTES} are taken"),
        (lambda: Guided.grammar("root ::= " + "a" * MAX_GRAMMAR_BYTES), f"at most {MAX_GRAMMAR_BYTES} are taken"),
        (lambda: Guided.choice(["a", "b" * (MAX_TEXT_BYTES + 1)]), f"at most {MAX_TEXT_BYTES} are taken"),
        (lambda: Guided.choice(["a"] * (MAX_SOURCE_BYTES + 1)), f"at most {MAX_SOURCE_BYTES} are taken"),
        (lambda: Guided.choice(["a" * 8000] * 17), f"at most {MAX_SOURCE_BYTES} are taken"),
        (lambda: Guided.regex("a("), "unclosed group"),
        (lambda: Guided.regex(r"(?=a)b"), "look-around"),
        (lambda: Guided.regex(""), "give a text that is not empty"),
        (lambda: Guided.grammar("start: b\nb: c"), "line 2, column 4: unknown name"),
        (lambda: Guided.grammar("root ::= ("), "not valid GBNF"),
        (lambda: Guided.grammar(f"start: <[{NUM_TOKENS}]>"), f"too large: {NUM_TOKENS}"),
        (lambda: Guided.choice([]), r"\[\]: give a list of texts"),
        (lambda: Guided.choice(["a", 3]), "choice 3 is not"),  # type: ignore[list-item]
    ],
)
def test_what_is_refused(make: Callable[[], Guided], message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        COMPILER.compile(make())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("depth", [60, 100_000])
def test_deep_schemas_are_refused_without_recursion(depth: int) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="nested more than 100 levels"):
        Guided.json_schema(schema)


def test_what_is_too_large_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send megabytes: the size is known before anything is written or read as JSON."""
    for name in ("dumps", "loads"):
        monkeypatch.setattr(json, name, lambda *_, **__: pytest.fail("it was copied"))
    for schema in ({"enum": ["x" * 100] * MAX_SOURCE_BYTES}, {"x" * MAX_SOURCE_BYTES: {}, "y": 1}, "[" * 10**6):
        with pytest.raises(RequestError, match="at most"):
            Guided.json_schema(schema)


def test_lenient_schemas_ignore_what_cannot_be_enforced() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}
    text = random_text(COMPILER.compile(Guided.json_schema(schema, strict=False))(), 1)
    assert all(isinstance(value, int) for value in json.loads(text))


def test_a_schema_cannot_change_the_options() -> None:
    assert '"lenient"' not in schema_text("it", {"x-guidance": {"lenient": True}}, strict=True)


def test_cache_is_bounded_and_keeps_what_is_used() -> None:
    compiler = GuideCompiler(TOKENIZER, NUM_TOKENS, [EOS], cache_entries=2)
    for pattern in ("a", "b", "a", "c"):
        compiler.compile(Guided.regex(pattern))
    assert compiler.num_cached == 2
    assert [guided for guided in compiler._cache] == [Guided.regex("a"), Guided.regex("c")]


def test_models_that_cannot_be_guided() -> None:
    with pytest.raises(RequestError, match="no end-of-sequence token"):
        GuideCompiler(TOKENIZER, NUM_TOKENS, [])
    with pytest.raises(RequestError, match="cannot use this model's tokenizer"):
        GuideCompiler("{}", NUM_TOKENS, [EOS])
    with pytest.raises(RequestError, match="cannot use this model's tokenizer"):
        GuideCompiler(TOKENIZER, NUM_TOKENS, [NUM_TOKENS])


SMALL = Guided.json_schema(
    {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}, "required": ["a"], "additionalProperties": False}
)


RECORD = """{"type": "object", "properties": {"number": {"enum": [1, 2]}, "truth": {"type": "boolean"}},
    "required": ["number", "truth"], "additionalProperties": false}"""


def test_llm_generates_what_the_guide_says(chat_artifact: Path) -> None:
    prompts = ["one", "another one", "x"]
    params = SamplingParams(max_tokens=40, seed=3, guided=SMALL)
    with LLM(chat_artifact, num_threads=1) as llm:
        together = llm.generate(prompts, [params, SamplingParams(max_tokens=8, seed=1), params])
        alone = [llm.generate(prompt, params)[0] for prompt in (prompts[0], prompts[2])]
        many = llm.generate("one", SamplingParams(n=4, max_tokens=40, seed=5, guided=Guided.choice(["yes", "no"])))[0]
    guided = [together[0], together[2]]
    for output in guided:
        assert json.loads(output.outputs[0].text)["a"] in (1, 2, 3)
        assert output.outputs[0].finish_reason == "stop"
    assert [output.outputs for output in guided] == [output.outputs for output in alone]
    assert {output.text for output in many.outputs} <= {"yes", "no"}


def test_llm_stops_in_the_middle_of_a_grammar(chat_artifact: Path) -> None:
    with LLM(chat_artifact, num_threads=1) as llm:
        output = llm.generate("x", SamplingParams(max_tokens=3, seed=3, guided=Guided.regex("[ab]{9}")))[0].outputs[0]
    assert output.finish_reason == "length"
    assert re.fullmatch("[ab]{3}", output.text)


def test_llm_with_a_stop_string_and_a_guide(chat_artifact: Path) -> None:
    params = SamplingParams(n=2, max_tokens=30, seed=1, stop=["c"], guided=Guided.regex("[ab]{2,4}c[ab]{3}"))
    with LLM(chat_artifact, num_threads=1) as llm:
        outputs = llm.generate("x", params)[0].outputs
    for output in outputs:
        assert re.fullmatch("[ab]{2,4}", output.text)
        assert (output.finish_reason, output.stop_reason) == ("stop", "c")


def test_guesses_change_no_bit_of_guided_text(chat_artifact: Path) -> None:
    """With what the grammar forces, with n > 1, stop strings, logprobs and limits, beside requests without a guide."""
    common: dict[str, Any] = {"max_tokens": 40, "logprobs": 2}
    record = Guided.json_schema({"type": "array", "minItems": 3, "maxItems": 3, "items": json.loads(RECORD)})
    params = [
        SamplingParams(seed=3, guided=record, **common),
        SamplingParams(temperature=0.0, guided=record, **common),
        SamplingParams(n=3, seed=5, guided=Guided.choice(["yes, it is", "no, it is not"]), **common),
        SamplingParams(seed=1, n=2, stop=["c"], guided=Guided.regex("(ab|ba){2,6}c(ab){9}"), **common),
        SamplingParams(seed=4, guided=Guided.regex("(ab){9}"), max_tokens=7),
        SamplingParams(temperature=0.0, **common),
    ]
    prompts = [f"text {number}" for number in range(len(params))]
    told = []
    for speculate in ("off", "ngram:6:always", "ngram:6"):
        with LLM(chat_artifact, num_threads=1, num_blocks=200, speculate=speculate) as llm:
            outputs = llm.generate(prompts, params)
            told.append([(output.outputs, output.usage) for output in outputs])
            before, alone = llm.stats().accepted_tokens, llm.generate(prompts[0], params[0])[0]
            assert alone.outputs == outputs[0].outputs
            if "always" in speculate:
                assert llm.stats().accepted_tokens > before
    assert told[0] == told[1] == told[2]


def test_llm_refuses_before_anything_runs(chat_artifact: Path, tmp_path: Path) -> None:
    with LLM(chat_artifact, num_threads=1) as llm:
        with pytest.raises(RequestError, match="unclosed group"):
            llm.generate("x", SamplingParams(guided=Guided.regex("(")))
        with pytest.raises(RequestError, match="make it with a method of Guided"):
            llm.generate("x", SamplingParams(guided={"type": "object"}))  # type: ignore[arg-type]
    bare = tmp_path / "artifact"
    shutil.copytree(chat_artifact, bare)
    (bare / "tokenizer.json").unlink()
    with LLM(bare, num_threads=1) as llm, pytest.raises(RequestError, match="needs the tokenizer"):
        llm.generate([[3, 4]], SamplingParams(guided=SMALL))


def test_llm_fails_only_the_request_whose_guide_breaks(chat_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(guide: TokenGuide) -> np.ndarray:
        raise GuideError("guided decoding cannot go on: too complex")

    monkeypatch.setattr(TokenGuide, "mask", broken)
    with LLM(chat_artifact, num_threads=1) as llm:
        failed, fine = llm.generate(["x", "y"], [SamplingParams(guided=SMALL), SamplingParams(max_tokens=4, seed=2)])
    assert failed.error is not None
    assert (failed.error.code, failed.outputs[0].finish_reason) == ("guide", "error")
    assert fine.error is None
    assert len(fine.outputs[0].token_ids) > 0
