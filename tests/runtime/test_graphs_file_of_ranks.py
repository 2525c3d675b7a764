"""graphs.bin of several ranks: collectives and weights of ranks come back, anything else is a FormatError."""

from __future__ import annotations

import dataclasses
import random
import struct
import zlib
from typing import Any

import pytest

from llmc import graphs_format as f
from llmc.compiler.store import graphs_writer as w
from llmc.graphs_records import (
    CodeRecord,
    CollectiveRecord,
    KernelRecord,
    ModelRecord,
    OperandRecord,
    TargetRecord,
    WeightRecord,
)
from llmc.runtime import graphs_file as r
from llmc.runtime.graphs_checks import FormatError

TARGET = TargetRecord("cpu", "znver4", 4, "tiles")
MODEL = dataclasses.replace(
    ModelRecord(2, 1, 8, 16, 1, 100, 64, 4, 1, 0, (2, 3), 1, 256, 512), num_ranks=2, num_shared_weights=2
)
KERNELS = (KernelRecord("linear_0", 3, 2),)


def piece(rank: int, shape: tuple[int, ...] = (16,)) -> WeightRecord:
    return WeightRecord(f"rank{rank}.out.weight", 0, shape, 192 + 64 * rank, 4 * shape[0], rank, "rows")


WEIGHTS = (
    WeightRecord("embed", 0, (4,), 64, 16, 7, "rows"),
    WeightRecord("out.bias", 0, (8,), 128, 32, 9, "rows"),
    piece(0),
    piece(1),
)
FILES = w.FileSums((CodeRecord("kernels.so", 4096, 0xC0DE),), 320, 0xABC)
COLLECTIVES = (CollectiveRecord(0, 0, 8, f.ADDS_BIAS | f.ADDS_RESIDUAL), CollectiveRecord(1, 1, 100))


def arena(offset: int, size: int) -> OperandRecord:
    return OperandRecord(0, 0, offset, size)


BIAS, PIECE = OperandRecord(1, 1, 0, 32), OperandRecord(1, 2, 0, 64)
COMMANDS = (
    w.CommandRecord(0, (arena(0, 128), PIECE, arena(128, 128)), True, 0, 2),
    w.CommandRecord(f.COLLECTIVE, (arena(128, 128), BIAS, arena(0, 128), arena(256, 128)), True, -1, 7),
    w.CommandRecord(f.COLLECTIVE + 1, (arena(256, 200), OperandRecord(5, 0, 0, 400)), True, -1, 7),
)
GRAPH = w.GraphRecord(0, 1, 16, 4, 1, 1, 4, 4, 512, COMMANDS)


def written(
    model: ModelRecord = MODEL,
    commands: tuple[w.CommandRecord, ...] = COMMANDS,
    collectives: tuple[CollectiveRecord, ...] = COLLECTIVES,
    weights: tuple[WeightRecord, ...] = WEIGHTS,
) -> bytes:
    graph = dataclasses.replace(GRAPH, commands=commands)
    return w.write_graphs(TARGET, model, KERNELS, weights, (graph,), FILES, collectives=collectives)


def test_ranks_come_back() -> None:
    tables = r.parse_graphs(written())
    assert (tables.header.version, tables.collectives) == (f.VERSION_OF_RANKS, COLLECTIVES)
    assert [tables.name_of(c) for c in tables.commands] == ["linear_0", "all_reduce_0", "all_gather_1"]
    assert [c.collective for c in tables.commands] == [None, 0, 1]
    assert tables.num_rank_weights == 1
    assert [weight.name for weight in tables.weights_of(1)] == ["embed", "out.bias", "rank1.out.weight"]


def test_an_artifact_of_one_rank_has_all_weights() -> None:
    alone = dataclasses.replace(MODEL, num_ranks=0, num_shared_weights=0)
    tables = r.parse_graphs(written(alone, COMMANDS[:1], ()))
    assert (tables.header.version, tables.weights_of(0)) == (f.VERSION_WITHOUT_ADAPTERS, WEIGHTS)


def command(number: int, **changes: Any) -> tuple[w.CommandRecord, ...]:
    changed = COMMANDS[number]._replace(**changes)
    return (*COMMANDS[:number], changed, *COMMANDS[number + 1 :])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (written(dataclasses.replace(MODEL, num_ranks=1)), "1 ranks, which are 2 to 256"),
        (written(dataclasses.replace(MODEL, num_ranks=3)), "2 weights are not as many for each of 3"),
        (written(dataclasses.replace(MODEL, num_shared_weights=5)), "5 shared weights of 4"),
        (written(weights=(*WEIGHTS[:3], piece(1, (15,)))), "weight 'rank1.out.weight' of rank 1 is not like"),
        (written(collectives=(CollectiveRecord(2, 0, 8, 3), COLLECTIVES[1])), "collective 0 has the unknown op 2"),
        (written(collectives=(CollectiveRecord(0, 2, 8, 3), COLLECTIVES[1])), "collective 0 has the unknown rows 2"),
        (written(collectives=(COLLECTIVES[0], CollectiveRecord(1, 1, 99))), "gathers rows of 99 from 2 ranks"),
        (written(collectives=(COLLECTIVES[0], CollectiveRecord(1, 1, 100, 1))), "adds 1, which all_gather cannot"),
        (written(collectives=(CollectiveRecord(0, 0, 8), COLLECTIVES[1])), "4 operands, all_reduce_0 takes 2"),
        (
            written(collectives=(CollectiveRecord(0, 0, 9, 3), COLLECTIVES[1])),
            "an operand of 128 bytes, 144 are needed",
        ),
        (written(commands=command(1, barrier=False)), "has no barrier behind it"),
        (written(commands=command(1, operands=(PIECE, BIAS, *COMMANDS[1].operands[2:]))), "touches weight where it"),
        (written(commands=command(0, operands=(PIECE, OperandRecord(1, 3, 0, 64), arena(0, 64)))), "weight 3 of 3"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        r.parse_graphs(data)
    assert "\n" not in str(caught.value)


def test_the_writer_refuses_a_collective_that_is_not_there() -> None:
    with pytest.raises(w.GraphsWriteError, match="collective 2, there are 2"):
        written(commands=command(1, kernel=f.COLLECTIVE + 2))


def test_changed_words_with_a_right_checksum_raise_nothing_else() -> None:
    rng, data, refused = random.Random(5), written(), 0
    for _ in range(1500):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 4))):
            value = rng.choice((0, 1, 2, 3, f.COLLECTIVE, f.COLLECTIVE + 2, 0xFFFFFFFF, rng.getrandbits(32)))
            struct.pack_into("<I", changed, rng.randrange(6, len(data) // 4) * 4, value)
        crc = zlib.crc32(changed[32:], zlib.crc32(changed[:28]))
        struct.pack_into("<I", changed, 28, crc)
        try:
            r.parse_graphs(bytes(changed))
        except FormatError:
            refused += 1
    assert 0 < refused < 1500
