"""Guided decoding over the vocabulary of a real model: 151 646 tokens under 151 936 logits."""

from __future__ import annotations

import json

import jsonschema_rs
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from llmc.runtime.guided.compiler import GuideCompiler
from llmc.runtime.guided.constraint import MAX_GRAMMAR_BYTES, MAX_SOURCE_BYTES, Guided

from support.guides import PERSON, allowed, random_text
from support.paths import SHARED

QWEN = SHARED / "tokenizers" / "qwen2-0.5b"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_TOKENS, NUM_LOGITS = 151_646, 151_936
EOS = 151_645

pytestmark = pytest.mark.skipif(not QWEN.is_dir(), reason=f"no tokenizer at {QWEN}")


@pytest.fixture(scope="module")
def qwen() -> Tokenizer:
    tokenizer = Tokenizer(BPE.from_file(str(QWEN / "vocab.json"), str(QWEN / "merges.txt")))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    assert tokenizer.get_vocab_size() == NUM_TOKENS
    return tokenizer


@pytest.fixture(scope="module")
def compiler(qwen: Tokenizer) -> GuideCompiler:
    return GuideCompiler(qwen.to_str(), NUM_LOGITS, [EOS])


@pytest.mark.parametrize("seed", range(6))
def test_any_text_is_json_that_the_schema_accepts(qwen: Tokenizer, compiler: GuideCompiler, seed: int) -> None:
    ending = [token for text in ('"', "}", "]", ",", "0") if (token := qwen.token_to_id(text)) is not None]
    assert len(ending) == 5
    guide = compiler.compile(Guided.json_schema(PERSON))()
    text = random_text(guide, seed, compiler=compiler, eos=EOS, ending=ending)
    jsonschema_rs.validator_for(PERSON, validate_formats=True).validate(json.loads(text))


@pytest.mark.parametrize(
    "text", ['{"name": "Zoë 東京 😀", "age": 7}', '{\n  "name": "say \\"hi\\"\\n",\n  "age": 120\n}']
)
def test_what_the_model_would_write_passes(qwen: Tokenizer, compiler: GuideCompiler, text: str) -> None:
    """Merged as its tokenizer does: quotes, spaces, punctuation and halves of characters in one token."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    guide = compiler.compile(Guided.json_schema({**schema, "additionalProperties": False}))()
    for token in qwen.encode(text).ids:
        assert token in allowed(guide)
        guide.accept(token)
    assert EOS in allowed(guide)


def test_masks_cover_the_vocabulary_and_no_padding(qwen: Tokenizer, compiler: GuideCompiler) -> None:
    guide = compiler.compile(Guided.regex(r"(.|\n)*"))()
    tokens = allowed(guide)
    assert guide.mask().size == -(-NUM_TOKENS // 32)
    assert max(tokens) <= EOS
    assert not {qwen.token_to_id(name) for name in SPECIAL[:2]} & set(tokens), "special tokens are no text"
    # What is missing are pieces of characters that cannot begin a text.
    assert len(tokens) > 0.99 * NUM_TOKENS


@pytest.mark.parametrize(
    "guided",
    [
        lambda: Guided.json_schema({"enum": [f"value {i}" for i in range(8000)]}),
        lambda: Guided.json_schema(
            {
                "type": "object",
                "properties": {f"property_{i}": {"type": "string", "maxLength": 40} for i in range(1500)},
            }
        ),
        lambda: Guided.choice([f"choice number {i}" for i in range(5000)]),
        lambda: Guided.grammar("start: " + " | ".join(f'"x{i}" start' for i in range(1800)) + ' | "z"'),
    ],
    ids=["enum", "properties", "choice", "grammar"],
)
def test_grammars_near_the_limit_compile(compiler: GuideCompiler, guided: object) -> None:
    made = guided()  # type: ignore[operator]
    limit = MAX_GRAMMAR_BYTES if made.kind == "grammar" else MAX_SOURCE_BYTES
    assert limit / 2 < len(made.source) <= limit
    guide = compiler.compile(made)()
    assert allowed(guide)
    assert not guide.finished
