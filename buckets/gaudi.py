"""The bucket text format of Intel Gaudi's vLLM plugin (VLLM_BUCKETING_FROM_FILE).

    LINE  = "(" SIZES "," SIZES "," SIZES ")"             batch, query length, context in blocks
    SIZES = N | "[" N { "," N } "]" | "range(" N [ "," N [ "," N ] ] ")"

A line is one entry, the Cartesian product of its sizes; `#` starts a comment. A query length of 1 makes a decode
bucket, any other a prefill bucket; there are no mixed ones. Described at
https://docs.vllm.ai/projects/gaudi/en/latest/features/bucketing_mechanism.html, "Specifying Buckets in a File"; a
sample is vllm_gaudi/extension/bucketing/bucketing_file.txt there.

Differences: a malformed line is an error, not skipped. The context of a prefill bucket adds no graph here
(`llmc.buckets.spec`). The plugin counts decode blocks of the whole batch, an llmc bucket those of each sequence; so
(64, 1, 1024) becomes 64 sequences of 1024 / 64 blocks. One long sequence among short ones fits the former but not the
latter. So the largest batch with the largest context of one sequence is added if it is missing.
"""

from __future__ import annotations

import re
from itertools import product

from .bucket import MAX_BUCKETS, MAX_DIM, BucketError
from .grids import Limits, Pairs, in_tokens, short

_TOKEN = re.compile(r"\s*(?:([0-9]{1,9})(?![0-9])|(range\b)|([-()\[\],]))", re.ASCII)
_MAX_SHAPES = 1 << 16
_FORM = "(BATCH, QUERY, BLOCKS) with numbers, lists and range(), such as (1, [256, 512], 0)"


def parse_gaudi(text: str, name: str, limits: Limits) -> dict[str, Pairs]:
    """(batch, seq) pairs by phase, seq in tokens. name: quoted in errors, with the line. Raises BucketError."""
    prefill: set[tuple[int, int]] = set()
    blocks: set[tuple[int, int]] = set()
    for batch, query, context in parse_shapes(text, name):
        if query > 1:
            prefill.add((batch, query))
        else:
            blocks.add((batch, max(1, -(-context // batch))))
    grids: dict[str, Pairs] = {"prefill": sorted(prefill)} if prefill else {}
    if blocks:
        # Like the plugin, clip a context to max_model_len.
        end = limits.max_model_len or MAX_DIM
        decode = {(batch, min(end, in_tokens([context], limits)[0])) for batch, context in blocks}
        decode.add((max(batch for batch, _ in decode), max(seq for _, seq in decode)))
        grids["decode"] = sorted(decode)
    return grids


def parse_shapes(text: str, name: str) -> list[tuple[int, int, int]]:
    """(batch, query, context blocks) as written, without duplicates. Raises BucketError, which quotes `name`."""
    shapes: dict[tuple[int, int, int], None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        batches, queries, contexts = _Line(line, f"{name}:{number}").parse()
        if len(batches) * len(queries) * len(contexts) > MAX_BUCKETS:
            raise BucketError(f"{name}:{number}: {short(line)} is more than {MAX_BUCKETS} buckets: use larger steps")
        for shape in product(batches, queries, contexts):
            if shape[0] < 1 or shape[1] < 1:
                raise BucketError(f"{name}:{number}: ({', '.join(map(str, shape))}) has a size of 0: use 1 or more")
            shapes[shape] = None
        if len(shapes) > _MAX_SHAPES:
            raise BucketError(f"{name}:{number}: more than {_MAX_SHAPES} buckets up to here: use larger steps")
    if not shapes:
        raise BucketError(f"bucket file {name} has no buckets: write lines like (1, 2048, 0)")
    return list(shapes)


class _Line:
    """Recursive descent over one line; the grammar has no names and no calls except range()."""

    def __init__(self, line: str, where: str) -> None:
        self._line, self._where = line, where
        self._tokens: list[str] = []
        position = 0
        while position < len(line):
            match = _TOKEN.match(line, position)
            if match is None:
                raise self._error(f"{line[position:].strip()[:20]!r} is not a number, list, range() or bracket")
            self._tokens.append(match[match.lastindex or 1])
            position = match.end()
        self._next = 0

    def parse(self) -> tuple[list[int], list[int], list[int]]:
        self._expect("(")
        entries = [self._sizes()]
        for _ in range(2):
            self._expect(",")
            entries.append(self._sizes())
        self._accept(",")
        self._expect(")")
        if self._next != len(self._tokens):
            raise self._error(f"{self._tokens[self._next]!r} follows the closing bracket")
        return entries[0], entries[1], entries[2]

    def _sizes(self) -> list[int]:
        if self._accept("["):
            sizes = self._numbers("]")
        elif self._accept("range"):
            self._expect("(")
            arguments = self._numbers(")")
            if len(arguments) > 3 or (len(arguments) == 3 and arguments[2] == 0):
                raise self._error("range() takes a start, an end and a step that is not 0")
            values = range(*arguments)
            if len(values) > MAX_BUCKETS:
                raise self._error(f"the range has {len(values)} sizes, the limit is {MAX_BUCKETS}")
            sizes = list(values)
        else:
            sizes = [self._number()]
        if not sizes:
            raise self._error("a list or range is empty")
        bad = next((size for size in sizes if not 0 <= size <= MAX_DIM), None)
        if bad is not None:
            raise self._error(f"size {bad} is out of range: use 0 to {MAX_DIM}")
        return sizes

    def _numbers(self, end: str) -> list[int]:
        numbers = [self._number()]
        while not self._accept(end):
            self._expect(",")
            if self._accept(end):
                break
            numbers.append(self._number())
        return numbers

    def _number(self) -> int:
        sign = -1 if self._accept("-") else 1
        token = self._tokens[self._next] if self._next < len(self._tokens) else "the end"
        if not token.isdigit():
            raise self._error(f"a number is missing before {token!r}")
        self._next += 1
        return sign * int(token)

    def _accept(self, token: str) -> bool:
        if self._next < len(self._tokens) and self._tokens[self._next] == token:
            self._next += 1
            return True
        return False

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            got = repr(self._tokens[self._next]) if self._next < len(self._tokens) else "the end of the line"
            raise self._error(f"{token!r} is missing before {got}")

    def _error(self, what: str) -> BucketError:
        return BucketError(f"{self._where}: {short(self._line)}: {what}; write {_FORM}")
