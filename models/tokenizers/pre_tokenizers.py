"""Regular expressions that split a text before byte merging, by their name in `tokenizer.ggml.pre`.

They are those of the models' own tokenizers. Each splits the pieces left by earlier ones; text between matches stays
whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CHINESE = r"[一-龥ࠀ-一가-퟿]+"


def _modern(numbers: str, *, marks: bool = False) -> str:
    """GPT-4's expression; models differ in the length of numbers. marks: they are parts of words, as letters are."""
    letter, letters = (r"[\p{L}\p{M}]", r"\p{L}\p{M}") if marks else (r"\p{L}", r"\p{L}")
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{numbers}| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    )


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(contractions: str, numbers: str) -> str:
    """Words also end where lower case turns to upper case."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{_UPPER}*{_LOWER}+{contractions}|{before}{_UPPER}+{_LOWER}*{contractions}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _of_kimi() -> str:
    """As gpt-4o's, except that Chinese characters are separate words."""
    no_han = r"&&[^\p{Han}]]"
    upper, lower = _UPPER.replace("]", no_han), _LOWER.replace("]", no_han)
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{upper}*{lower}+{_CONTRACTIONS}?|{before}{upper}+{lower}*{_CONTRACTIONS}?"
    return rf"\p{{Han}}+|{words}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class PreTokenizer:
    """expressions: applied in order. nfc: compose characters first. ignore_merges: a piece that is a token is used
    whole, regardless of merges. bos: whether texts begin with bos if the file does not say."""

    expressions: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False

    def merging_whole_first(self) -> PreTokenizer:
        """A copy with ignore_merges."""
        return replace(self, ignore_merges=True)


_LLAMA3 = PreTokenizer((_modern(r"\p{N}{1,3}"),), ignore_merges=True, bos=True)
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN = PreTokenizer((_GPT2,))
_GPT4 = PreTokenizer((_modern(r"\p{N}"),))
_DBRX = PreTokenizer((_modern(r"\p{N}{1,3}"),))
# Cased letters, except in some scripts: small Armenian, Georgian, parts of Latin, mathematical.
_CASED_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}\x{A790}-\x{AB68}"
    r"\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DFFF}]]"
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN,
    "mpt": _PLAIN,
    "olmo": _PLAIN,
    "phi-2": _PLAIN,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "lfm2": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _DBRX,
    "smaug-bpe": _DBRX,
    "qwen2": PreTokenizer(_GPT4.expressions, nfc=True),
    "qwen35": PreTokenizer((_modern(r"\p{N}", marks=True),), nfc=True),
    "deepseek-r1-qwen": _GPT4,
    "stablelm2": _GPT4,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "smollm": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        ("[\r\n]", rf"\s?{_CASED_LETTERS}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CHINESE, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}")),
    "deepseek-v3": PreTokenizer((
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
        r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    )),
    "tekken": PreTokenizer((_cased("", r"\p{N}"),), ignore_merges=True, bos=True),
    "kimi-k2": PreTokenizer((_of_kimi(),), ignore_merges=True),
    "gpt-4o": PreTokenizer((_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),)),
}  # fmt: skip
"""By exact name."""
