"""What PTX does on every path before a kernel waits for earlier ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_WAIT = "griddepcontrol.wait"
_ACCESS = re.compile(r"(ld|st|atom|red|cp\.async\.\w+\.shared)(\.(?!param|shared|local|const)\w+(::\w+)?)*$")


@dataclass
class _Block:
    """waits: at its end, a path that came here has waited; None: not known yet."""

    lines: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)
    waited: bool | None = None


def unawaited(kernel: str) -> set[str]:
    """Parameters by number, such as `param_0`, through which a kernel reads or writes on a path on which it has not
    waited. With `exit` if a path ends so, and `unknown` for an address of no parameter."""
    blocks, first = _blocks(kernel)
    owners = _owners(kernel)
    blocks[first].waited = False
    found: set[str] = set()
    todo = [first]
    while todo:
        name = todo.pop()
        block = blocks[name]
        waited = bool(block.waited)
        for line in block.lines:
            if _WAIT in line:
                waited = True
            elif not waited and _op(line) in ("ret", "exit"):
                found.add("exit")
            elif not waited and _ACCESS.match(_op(line)):
                found |= _touched(line, owners)
        for other in block.next:
            before = blocks[other].waited
            now = waited if before is None else before and waited
            if now != before:
                blocks[other].waited = now
                todo.append(other)
    return found


def early_operands(kernel: str, names: Sequence[str]) -> set[str]:
    """What `unawaited` finds, by name. names: of a kernel's pointers, of which the last one is to its scalars."""
    numbers = {f"param_{number}": name for number, name in enumerate(names[:-1])}
    numbers[f"param_{2 * len(names) - 2}"] = names[-1]  # behind an offset of each operand
    return {numbers.get(one, one) for one in unawaited(kernel)}


def _op(line: str) -> str:
    return re.sub(r"^@!?%p\d+\s+", "", line).split()[0].rstrip(";")


def _touched(line: str, owners: dict[str, str]) -> set[str]:
    """The parameters that an access is about: the last address is the one in global memory."""
    addresses = re.findall(r"\[(%\w+)", line)
    return {owners.get(addresses[-1], "unknown")} if addresses else set()


def _owners(kernel: str) -> dict[str, str]:
    """By register, the pointer that its address is made of."""
    owners: dict[str, str] = {}
    changed = True
    while changed:
        changed = False
        for line in kernel.splitlines():
            match = re.match(r"\s*(?:@!?%p\d+\s+)?([a-z][\w.]*)\s+(%rd\d+), (.*);", line)
            if match is None or match[2] in owners:
                continue
            op, to, given = match.groups()
            if op.startswith("ld.param"):
                owner = re.search(r"param_\d+", given)
                of = [owner[0]] if owner else []
            elif op.startswith(("ld", "atom")):
                of = []
            else:
                of = [owners[one] for one in re.findall(r"%rd\d+", given) if one in owners]
            if of:
                owners[to], changed = of[0], True
    return owners


def _blocks(kernel: str) -> tuple[dict[str, _Block], str]:
    """The blocks of a kernel's body by label, and the first of them."""
    current, blocks = "begin", {"begin": _Block()}
    for line in _lines(kernel):
        if line.endswith(":"):
            label = line[:-1]
            blocks.setdefault(label, _Block())
            if current:
                blocks[current].next.append(label)
            current = label
            continue
        if not current:
            continue
        block = blocks[current]
        block.lines.append(line)
        op = _op(line)
        if op.startswith("bra"):
            label = line.split()[-1].rstrip(";")
            blocks.setdefault(label, _Block())
            block.next.append(label)
        if (op.startswith("bra") or op in ("ret", "exit")) and not line.startswith("@"):
            current = ""
        elif op.startswith("bra"):
            after = f"after {len(blocks)}"
            blocks[after] = _Block()
            block.next.append(after)
            current = after
    return blocks, "begin"


def _lines(kernel: str) -> Iterator[str]:
    """Instructions and labels."""
    for raw in kernel[kernel.index("{") + 1 :].splitlines():
        line = raw.split("//")[0].strip()
        if line and not line.startswith((".", "{", "}", "//")):
            yield line
