"""Texts and single values of Python, as JSON: by the rules of Python's lexer, never by evaluation.

Source: https://docs.python.org/3/reference/lexical_analysis.html.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable

from ..text_machine import Step, TextMachine

_SIMPLE = {"\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
           "\n": "", "/": "/"}  # fmt: skip
"""Characters after a backslash. The slash is JSON's, which models write as well."""
_DIGITS = {"x": 2, "u": 4, "U": 8}
"""Hexadecimal digits after these."""
_INTEGER = re.compile(r"0(_?0)*|[1-9](_?[0-9])*")
_OTHER_INTEGER = re.compile(r"0([xX](_?[0-9a-fA-F])+|[oO](_?[0-7])+|[bB](_?[01])+)")
_FLOAT = re.compile(
    r"(?P<whole>[0-9](_?[0-9])*)?(\.(?P<part>([0-9](_?[0-9])*)?))?([eE](?P<power>[+-]?[0-9](_?[0-9])*))?"
)
_MOST_DIGITS = 1000  # of integers that are not decimal: Python converts no very long ones
# Models also write JSON's words.
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ENDS = frozenset(",()[]{}:='\"")


class PythonText(TextMachine):
    """Reads texts and words of Python."""

    def _bare(self) -> Step[str]:
        """Reads up to white space or what may follow a value."""
        start = self._position
        while (char := (yield from self._peek())) and not char.isspace() and char not in _ENDS:
            self._position += 1
        return self._buffer[start : self._position]

    def _text(self, tell: Callable[[str], None]) -> Step[bool]:
        """Reads the text that begins here and tells its parts as JSON, without quotes. False where it stops being one.

        tell: may drop what was read from the buffer.
        """
        quote = yield from self._quote()
        if quote in ('""', "''"):
            return True
        while True:
            start = self._position
            while self._position < len(self._buffer) and self._buffer[self._position] not in ("\\", quote[0]):
                self._position += 1
            if self._position > start:
                tell(json.dumps(self._buffer[start : self._position], ensure_ascii=False)[1:-1])
            char = yield from self._peek()
            if char == "\\":
                start = self._position
                escaped = yield from self._escape()
                if escaped is None:
                    if not self._ended or self._position < len(self._buffer):
                        self._position = start
                    return False
                tell(escaped)
            elif char == quote[0]:
                if (yield from self._literal(quote)):
                    return True
                self._position += 1
                tell(json.dumps(char)[1:-1])
            elif not char:
                return False

    def _quote(self) -> Step[str]:
        """Reads what opens a text: one quote or three; two for an empty text, which they end, too."""
        quote = yield from self._peek()
        self._position += 1
        for _ in range(2):
            if (yield from self._peek()) != quote[0]:
                return quote
            self._position += 1
            quote += quote[0]
        return quote

    def _escape(self) -> Step[str | None]:
        """Reads an escape and returns it as JSON; None if it is malformed or cut off."""
        self._position += 1
        char = yield from self._peek()
        self._position += 1
        if not char:
            self._position = len(self._buffer)
            return None
        if char == "\r":
            yield from self._literal("\n")
            return ""
        if char in _SIMPLE:
            return _as_json(_SIMPLE[char])
        if char in _DIGITS:
            digits = yield from self._take("0123456789abcdefABCDEF", _DIGITS[char])
            code = int(digits, 16) if len(digits) == _DIGITS[char] else 0x110000
            return _of_code(code)
        if char in "01234567":
            self._position -= 1
            return _of_code(int((yield from self._take("01234567", 3)), 8))
        if char == "N":
            return (yield from self._named_character())
        # Python keeps other backslashes.
        return _as_json(f"\\{char}")

    def _take(self, allowed: str, most: int) -> Step[str]:
        start = self._position
        while self._position - start < most and (char := (yield from self._peek())) and char in allowed:
            self._position += 1
        return self._buffer[start : self._position]

    def _named_character(self) -> Step[str | None]:
        if not (yield from self._literal("{")):
            return None
        start = self._position
        while (char := (yield from self._peek())) and (char.isalnum() or char in " -"):
            self._position += 1
        name = self._buffer[start : self._position]
        if not (yield from self._literal("}")):
            return None
        try:
            return _as_json(unicodedata.lookup(name))
        except KeyError:
            return None


def is_argument_name(word: str) -> bool:
    """Whether an argument may have this name without quotes: as in Python, with hyphens and dots."""
    return word.replace("-", "").replace(".", "").isidentifier()


def value_as_json(word: str) -> str | None:
    """A number, True, False or None as JSON; None if the word is something else. Numbers keep their digits."""
    if word in _WORDS:
        return _WORDS[word]
    sign = "-" if word.startswith("-") else ""
    number = word.removeprefix(sign or "+")
    if _INTEGER.fullmatch(number):
        return sign + (number.replace("_", "").lstrip("0") or "0")
    if _OTHER_INTEGER.fullmatch(number):
        return sign + str(int(number, 0)) if len(number) <= _MOST_DIGITS else None
    found = _FLOAT.fullmatch(number)
    if found is None or not (found["whole"] or found["part"]) or (found["part"] is None and found["power"] is None):
        return None
    whole, part, power = ((found[name] or "").replace("_", "") for name in ("whole", "part", "power"))
    return f"{sign}{whole.lstrip('0') or '0'}.{part or '0'}" + (f"e{power}" if power else "")


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _of_code(code: int) -> str | None:
    """A character as JSON. Halves of surrogate pairs stay escapes, which make one character if both are there."""
    if code > 0x10FFFF:
        return None
    return f"\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else _as_json(chr(code))
