"""Medians, ranges and fractions of a results file, as JSON and as Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from bench.peers.machine_limits import UNITS
from bench.peers.model import Work, work_of
from bench.peers.plan import Key
from bench.peers.store import Measurement, Store
from llmc.buckets.cost import ModelShape

PRECISIONS = ("16-bit", "int8", "int4", "32-bit")
OWN = "llmc"


@dataclass(frozen=True)
class Spread:
    """Median and range over the rounds."""

    median: float
    min: float
    max: float
    rounds: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, scale: float = 1.0, digits: int = 3) -> str:
        """Text such as "1097 (1050–1120)"; for one round without the range."""
        middle = significant(self.median / scale, digits)
        if self.rounds == 1:
            return middle
        return f"{middle} ({significant(self.min / scale, digits)}–{significant(self.max / scale, digits)})"


@dataclass(frozen=True)
class Point:
    """One figure of one engine at one precision on one model.

    limit: name of the limit that binds it. fraction: each value over the limit by its own two probes. work: of one
    step. rate: median operations per second. All are None if no limit binds.
    """

    model: str
    engine: str
    variant: str
    precision: str
    figure: str
    value: Spread
    limit: str | None = None
    fraction: Spread | None = None
    work: Work | None = None
    rate: float | None = None


class Report:
    """Evaluation of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.points: dict[tuple[str, str, str, str], Point] = {}
        """Points by (model, engine, variant, figure), in the order of the measurements."""
        values: dict[tuple[str, str, str, str], list[Measurement]] = {}
        for one in store.measurements:
            if one.value is not None:
                values.setdefault((one.key.model, one.key.engine, one.key.variant, one.key.figure), []).append(one)
        for name, found in values.items():
            self.points[name] = self._point(found)

    def _point(self, found: list[Measurement]) -> Point:
        key, store = found[0].key, self.store
        prepared = store.prepared[f"{key.model}/{key.engine}/{key.variant}"]
        spread = Spread.of([one.value for one in found if one.value is not None])
        plain = Point(key.model, key.engine, key.variant, prepared["precision"], key.figure, spread)
        if key.kind not in ("prefill", "decode"):
            return plain
        context = store.settings.context + store.settings.steps // 2
        work = work_of(ModelShape(**store.models[key.model]), key.kind, key.size, context, prepared["weight_bytes"])
        limit = prepared["limit"] if key.kind == "prefill" else "read"
        amount = work.ops if limit != "read" else work.bytes
        fractions = [one.value / key.size * amount / one.limits[limit] for one in found if one.value is not None]
        return Point(
            **{**plain.__dict__, "limit": limit, "fraction": Spread.of(fractions), "work": work,
               "rate": spread.median / key.size * work.ops}
        )  # fmt: skip

    def limits(self) -> dict[str, Spread]:
        """Each limit over all its probes of the run, in bytes or operations per second."""
        values: dict[str, list[float]] = {}
        for probes in [*self.store.limits, *(one.limits for one in self.store.measurements)]:
            for name, value in probes.items():
                values.setdefault(name, []).append(value)
        return {name: Spread.of(values[name]) for name in UNITS if name in values}

    def reading(self) -> dict[int, Spread]:
        """Bytes read per second by number of threads, over the sessions."""
        values: dict[int, list[float]] = {}
        for probes in self.store.reading:
            for threads, value in probes.items():
                values.setdefault(int(threads), []).append(value)
        return {threads: Spread.of(values[threads]) for threads in sorted(values)}

    def probe_errors(self) -> list[str]:
        """A sentence for each point above its limit: the probe is wrong, or the arithmetic is not as declared."""
        found = []
        for point in self.points.values():
            if point.fraction is not None and point.fraction.median > 1:
                found.append(
                    f"{point.model} {point.engine} {point.variant} {point.figure} reaches {point.fraction.median:.0%} "
                    f"of the {point.limit} limit measured around it: the probe measures too little, or the engine "
                    "moves or computes less than is counted"
                )
        return found

    def failures(self) -> list[str]:
        """A sentence for each measurement that failed, equal ones once."""
        found: dict[str, None] = {}
        for one in self.store.measurements:
            if one.error is not None:
                key = one.key
                found[f"{key.model} {key.engine} {key.variant} {key.figure}: {one.error}"] = None
        return list(found)

    def models(self) -> list[str]:
        return list(dict.fromkeys(point.model for point in self.points.values()))

    def contenders(self, model: str) -> list[tuple[str, str, str]]:
        """(engine, variant, precision) of all that have a figure of the model, sorted by precision."""
        found = dict.fromkeys((p.engine, p.variant, p.precision) for p in self.points.values() if p.model == model)
        return sorted(found, key=lambda one: PRECISIONS.index(one[2]))

    def ratios(self, model: str) -> list[tuple[str, str, str, str, Spread]]:
        """(precision, figure, own variant, peer and variant, ratio): each variant of llmc over the best peer.

        The best peer has the best median (the least time or memory) at that precision. Ratios are within a round, and
        above 1 if llmc is better.
        """
        found = []
        peers = [point for point in self.points.values() if point.model == model and point.engine != OWN]
        for point in self.points.values():
            rivals = [p for p in peers if p.precision == point.precision and rival_figure(p.figure) == point.figure]
            if point.model != model or point.engine != OWN or not rivals:
                continue
            less = point.figure in ("start", "start-native", "memory")
            best = (min if less else max)(rivals, key=lambda p: p.value.median)
            pairs = self.rounds(point, best)
            if pairs:
                ratios = [theirs / ours if less else ours / theirs for ours, theirs in pairs]
                name = f"{best.engine} {best.variant}" + (" offline" if best.figure == "offline" else "")
                found.append((point.precision, point.figure, point.variant, name, Spread.of(ratios)))
        return found

    def rounds(self, *points: Point) -> list[tuple[float, ...]]:
        """Values of the points, [round][point], for rounds that all points have."""
        columns: list[dict[int, float]] = []
        for point in points:
            name = (point.model, point.engine, point.variant, point.figure)
            columns.append(
                {
                    one.key.round: one.value
                    for one in self.store.measurements
                    if _name(one.key) == name and one.value is not None
                }
            )
        common = sorted(set.intersection(*(set(column) for column in columns)))
        return [tuple(column[number] for column in columns) for number in common]

    def as_dict(self) -> dict[str, Any]:
        return {
            "machine": self.store.machine,
            "settings": asdict(self.store.settings),
            "engines": self.store.engines,
            "skipped": self.store.skipped,
            "limits_per_s": {name: asdict(spread) for name, spread in self.limits().items()},
            "read_per_s_by_threads": {threads: asdict(spread) for threads, spread in self.reading().items()},
            "probe_errors": self.probe_errors(),
            "failures": self.failures(),
            "points": [asdict(point) for point in self.points.values()],
            "ratios": {
                model: [
                    {"precision": p, "figure": f, "llmc": own, "best_peer": peer, "ratio": asdict(ratio)}
                    for p, f, own, peer, ratio in self.ratios(model)
                ]
                for model in self.models()
            },
        }

    def markdown(self) -> str:
        """All tables as Markdown."""
        store, parts = self.store, []
        machine = store.machine
        parts.append(
            f"{machine['cpu']}, {store.settings.threads} threads of {machine['cpus']} CPUs, "
            f"{machine['memory_gib']} GiB. Medians (least–most) of the rounds."
        )
        # An engine that ran only as a server has reported no version.
        told = {name: known["versions"] for name, known in store.engines.items() if known.get("versions")}
        if told:
            stated = (f"{name} {' and '.join(versions)}" for name, versions in told.items())
            parts.append(f"Versions: {', '.join(stated)}.")
        rows = [[name, f"{spread.text(1e9)} {UNITS[name]}"] for name, spread in self.limits().items()]
        parts.append(table(["limit, measured between the figures", ""], rows))
        if reading := self.reading():
            cells = [spread.text(1e9) for spread in reading.values()]
            parts.append(table(["threads, before the figures", *map(str, reading)], [["read, GB/s", *cells]]))
        for model in self.models():
            parts += [f"## {model}", self._speed_table(model), self._start_table(model)]
            if any(p.model == model and p.figure in ("serve", "offline") for p in self.points.values()):
                parts.append(self._serve_table(model))
            rows = [[p, figure, own, peer, ratio.text()] for p, figure, own, peer, ratio in self.ratios(model)]
            if rows:
                parts.append(table(["weights", "figure", OWN, "best peer", "times as good"], rows))
        notes = [f"skipped: {name}: {reason}" for name, reason in store.skipped.items()]
        notes += [f"failed: {text}" for text in self.failures()]
        notes += [f"probe error: {text}" for text in self.probe_errors()]
        if notes:
            parts.append("\n".join(f"- {note}" for note in notes))
        return "\n\n".join(parts) + "\n"

    def _cell(self, model: str, engine: str, variant: str, figure: str, scale: float = 1.0) -> str:
        point = self.points.get((model, engine, variant, figure))
        return point.value.text(scale) if point else "–"

    def _fraction(self, model: str, engine: str, variant: str, figure: str) -> str:
        point = self.points.get((model, engine, variant, figure))
        return f"{point.fraction.median:.0%} {point.limit}" if point and point.fraction else "–"

    def _speed_table(self, model: str) -> str:
        settings = self.store.settings
        prefills, batches = settings.prefills, settings.batches
        middle = 512 if 512 in prefills else max(prefills)
        heads = ["engine", *(f"prefill {n}" for n in prefills), f"of its peak at {middle}"]
        heads += [*(f"decode b{n}" for n in batches), f"of reading, b{min(batches)}"]
        rows = []
        for engine, variant, _ in self.contenders(model):
            one = (model, engine, variant)
            row = [f"{engine} {variant}", *(self._cell(*one, f"prefill:{n}") for n in prefills)]
            row += [self._fraction(*one, f"prefill:{middle}"), *(self._cell(*one, f"decode:{n}") for n in batches)]
            rows.append([*row, self._fraction(*one, f"decode:{min(batches)}")])
        return "tok/s, decode of all sequences together:\n\n" + table(heads, rows)

    def _start_table(self, model: str) -> str:
        heads = ["engine", "first token, s", "without Python, s", "peak memory, GiB", "weights, MiB", "install, MiB"]
        rows = []
        for engine, variant, _ in self.contenders(model):
            one = (model, engine, variant)
            weights = self.store.prepared["/".join(one)]["weight_bytes"] / (1 << 20)
            install = self.store.engines.get(engine, {}).get("install_bytes", 0) / (1 << 20)
            row = [f"{engine} {variant}", self._cell(*one, "start"), self._cell(*one, "start-native")]
            rows.append([*row, self._cell(*one, "memory", 1 << 30), f"{weights:.0f}", f"{install:.0f}"])
        return "Fresh process, page cache warm:\n\n" + table(heads, rows)

    def _serve_table(self, model: str) -> str:
        settings, rows = self.store.settings, []
        heads = ["engine", "served, output tok/s", "TTFT p50, s", "TPOT p50, ms", "offline, output tok/s"]
        for engine, variant, _ in self.contenders(model):
            one = (model, engine, variant)
            served = [m for m in self.store.measurements if _name(m.key) == (*one, "serve") and m.value is not None]
            if not served and (*one, "offline") not in self.points:
                continue
            latencies = [
                Spread.of([m.details[name]["p50"] for m in served]).text(scale) if served else "–"
                for name, scale in (("ttft_ms", 1e3), ("tpot_ms", 1.0))
            ]
            row = [f"{engine} {variant}", self._cell(*one, "serve"), *latencies]
            rows.append([*row, self._cell(*one, "offline")])
        load = f"{settings.requests} requests, {settings.streams} at once, {settings.input_len} in"
        return f"{load}, {settings.output_len} out:\n\n" + table(heads, rows)


def rival_figure(figure: str) -> str:
    """The figure of llmc that a peer's figure is compared with: a peer's offline throughput with llmc's server."""
    return "serve" if figure == "offline" else figure


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _name(key: Key) -> tuple[str, str, str, str]:
    return key.model, key.engine, key.variant, key.figure


def significant(value: float, digits: int) -> str:
    """The value with `digits` significant digits, never with an exponent."""
    if value >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:#.{digits}g}".rstrip(".")
