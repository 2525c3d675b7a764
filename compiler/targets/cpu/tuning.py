"""Measured search for the fastest schedule of each linear kernel on this machine.

`default_schedule` gives a target's schedule by rule. The search compiles schedules that differ from it in one number,
times each alternately with the default, and combines the faster ones. It keeps those that are faster again in a second
measurement. No schedule changes a bit of a result. Results are cached by kernel and machine, including the result that
nothing was faster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from llmc.compiler.build import build_variants
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.store import keys
from llmc.compiler.store.cache import GraphCache, key_of
from llmc.compiler.targets.base import Choice, Compare, Target
from llmc.compiler.targets.cpu.kernels.linear.schedule import Schedule, neighbours
from llmc.compiler.targets.cpu.target import Target as Cpu
from llmc.tvm_import import import_tvm

TUNED_OPS = ("linear", "linear_quant")
MOST_ROWS = 512
"""Most rows measured: more only repeat the same work."""
SECONDS = 0.3
"""Approximate duration of one comparison, in seconds."""
_GAIN = 1.03  # smaller gains are noise


_SOURCES = ("tuning.py", "kernel_timing.py", "kernels/linear/schedule.py")
_SEARCH = tuple(Path(__file__).parent / name for name in _SOURCES)


def _to_json(choice: Choice) -> bytes:
    return json.dumps({"schedule": choice.variant, "gain": choice.gain}).encode()


def _from_json(payload: bytes) -> Choice:
    raw = json.loads(payload)
    return Choice(raw["schedule"] and Schedule.parse(raw["schedule"]).text(), raw["gain"])


def tune(
    rows: Mapping[KernelSpec, int],
    target: Target,
    cpu: Cpu,
    cache: GraphCache,
    machine: Mapping[str, str],
    num_jobs: int,
    on_step: Callable[[int, int], None],
    compare: Compare | None = None,
) -> dict[KernelSpec, Choice]:
    """Finds schedules for the kernels of TUNED_OPS among `rows`, which maps each kernel to its most rows.

    target: the target whose `cpu` runs here.
    machine: properties that this machine's speed depends on, by name.
    compare: for tests; None measures.
    """
    found: dict[KernelSpec, Choice] = {}
    missing: dict[KernelSpec, tuple[str, dict[str, str]]] = {}
    measured_rows = {spec: min(MOST_ROWS, most) for spec, most in rows.items() if spec.op in TUNED_OPS}
    for spec, count in measured_rows.items():
        components = keys.tuning_components(spec, target, machine, count, _SEARCH)
        key = key_of(components)
        payload = cache.get(key)
        if payload is None:
            missing[spec] = key, components
        else:
            found[spec] = _from_json(payload)
    if missing:
        search = _Search({spec: measured_rows[spec] for spec in missing}, target, cpu, cache, num_jobs, on_step)
        for spec, choice in search.run(compare, int(machine.get("threads", "1"))):
            key, components = missing[spec]
            cache.put(key, _to_json(choice), components, {"symbol": spec.symbol()})
            found[spec] = choice
    return found


_Scheduled = tuple[KernelSpec, Schedule | None]


class _Search:
    """Searches kernels that have a choice; the others keep their default."""

    def __init__(
        self,
        rows: Mapping[KernelSpec, int],
        target: Target,
        cpu: Cpu,
        cache: GraphCache,
        num_jobs: int,
        on_step: Callable[[int, int], None],
    ) -> None:
        import_tvm()
        from llmc.compiler.targets.cpu.kernels.registry import default_schedule

        self._rows, self._target, self._cpu = rows, target, cpu
        self._cache, self._num_jobs = cache, num_jobs
        self._default: dict[KernelSpec, Schedule] = {}
        self._first: dict[KernelSpec, list[tuple[str, Schedule]]] = {}
        for spec in rows:
            schedule = default_schedule(spec, cpu)
            if schedule is None:
                continue
            tried = list(neighbours(schedule, int(spec.as_dict()["row_tile"]), cpu.row_tile))
            if tried:
                self._default[spec], self._first[spec] = schedule, tried
        self._on_step = on_step
        self._done = 0
        # Steps per kernel: compile every schedule, measure, measure again.
        self._total = sum(3 + len(tried) for tried in self._first.values())

    def run(self, compare: Compare | None, num_threads: int) -> Iterator[tuple[KernelSpec, Choice]]:
        """Yields each kernel's choice as soon as it is known."""
        for spec in self._rows.keys() - self._first.keys():
            yield spec, Choice(None)
        if not self._first:
            return
        if compare is not None:
            yield from self._run(compare)
            return
        from llmc.compiler.targets.cpu.kernel_timing import KernelTimer, linear_call

        calls = {spec: linear_call(spec, self._cpu, self._rows[spec]) for spec in self._first}
        with KernelTimer(num_threads, list(calls.values())) as timer:
            yield from self._run(lambda spec, code, rows: timer.compare(spec.symbol(), code, calls[spec], SECONDS))

    def _run(self, compare: Compare) -> Iterator[tuple[KernelSpec, Choice]]:
        code = self._build([(spec, None) for spec in self._first])
        code |= self._build([(spec, schedule) for spec, tried in self._first.items() for _, schedule in tried])
        best: dict[KernelSpec, Schedule] = {}
        for spec, tried in self._first.items():
            # Schedules that a kernel cannot follow compile to the same code; noise would choose among them.
            different = {code[spec, schedule]: (name, schedule) for name, schedule in reversed(tried)}
            different.pop(code[spec, None], None)
            gains = compare(spec, [code[spec, None], *different], self._rows[spec])[1:] if different else []
            found = [(*one, gain) for one, gain in zip(different.values(), gains, strict=True)]
            joined = self._join(self._default[spec], found)
            if joined is None:
                yield spec, Choice(None)
            else:
                best[spec] = joined
            self._step()
        # Combined changes may be slower than single ones, and the first measurement may have been lucky.
        code |= self._build([(spec, schedule) for spec, schedule in best.items() if (spec, schedule) not in code])
        for spec, schedule in best.items():
            _, gain = compare(spec, [code[spec, None], code[spec, schedule]], self._rows[spec])
            yield spec, Choice(schedule.text(), gain) if gain >= _GAIN else Choice(None)
            self._step()
        self._on_step(self._total, self._total)

    @staticmethod
    def _join(default: Schedule, tried: Sequence[tuple[str, Schedule, float]]) -> Schedule | None:
        """The default with the best value of each number that was faster; None if none was."""
        joined = default
        for name in dict.fromkeys(name for name, _, _ in tried):
            schedule, gain = max(((s, g) for n, s, g in tried if n == name), key=lambda one: one[1])
            if gain >= _GAIN:
                joined = replace(joined, **{name: getattr(schedule, name)})
        return None if joined == default else joined

    def _build(self, variants: Sequence[_Scheduled]) -> dict[_Scheduled, bytes]:
        before = self._done

        def on_kernel(done: int, total: int) -> None:
            self._done = before + done
            self._on_step(min(self._done, self._total), self._total)

        texts = [(spec, None if schedule is None else schedule.text()) for spec, schedule in variants]
        built = build_variants(texts, self._target, self._cache, self._num_jobs, on_kernel)
        return {variant: kernel.code for variant, kernel in zip(variants, built, strict=True)}

    def _step(self) -> None:
        self._done += 1
        self._on_step(min(self._done, self._total), self._total)
