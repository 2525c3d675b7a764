"""What other work takes from a measurement, from counters as Linux shows them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from llmc.runtime.warm_up.disturbance import MachineWatch, Mark


class System:
    """The files that are read, and what they say."""

    def __init__(self, path: Path) -> None:
        self.tasks, self.stat = path / "task", path / "stat"
        self.cpu(6)
        self.thread(threading.get_native_id(), "python", 0)

    def thread(self, number: int, name: str, wait_ns: int) -> None:
        folder = self.tasks / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "comm").write_text(f"{name}\n")
        (folder / "schedstat").write_text(f"123 {wait_ns} 7\n")

    def cpu(self, busy_ticks: int) -> None:
        # user nice system idle iowait irq softirq steal guest: idle, waiting for disks and guests do not count.
        self.stat.write_text(f"cpu  {busy_ticks - 6} 1 1 900 50 1 1 2 77 0\ncpu0 1 1 1\n")

    def watch(self, cpus: int = 2) -> MachineWatch:
        return MachineWatch(self.tasks, self.stat, cpus, 0.01)


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_the_longest_wait_of_an_engine_thread_counts(system: System) -> None:
    for number, name in ((7, "llmc-1"), (8, "llmc-2"), (9, "other"), (10, "llmc-engine")):
        system.thread(number, name, 1000)
    watch = system.watch()
    mark = watch.mark()
    for number, name, waited in ((7, "llmc-1", 5_000_000), (8, "llmc-2", 2_000_000), (9, "other", 10**9)):
        system.thread(number, name, 1000 + waited)
    assert watch.waited_s(mark) == pytest.approx(0.005)
    # The thread that replays works with them.
    system.thread(threading.get_native_id(), "python", 6_000_000)
    assert watch.waited_s(mark) == pytest.approx(0.006)


def test_others_are_what_the_machine_did_beyond_this_process(system: System) -> None:
    watch = system.watch()
    system.cpu(10_000)
    # In the last 100 s the two CPUs worked 50 s, this process none, and each may be a tick off.
    now, own = time.monotonic(), time.process_time()
    assert watch.mark().busy_s == pytest.approx(100)
    assert watch.taken(Mark(now - 100, {}, 50.0, own)) == pytest.approx((50 - 0.02) / 200, rel=0.1)
    # All of it was this process: nothing was taken.
    assert watch.taken(Mark(now - 100, {}, 50.0, own - 50)) == 0


def test_a_stretch_too_short_to_tell_is_not_disturbed(system: System) -> None:
    watch = system.watch()
    mark = watch.mark()
    system.cpu(8)
    assert watch.taken(mark) == 0


def test_where_the_system_does_not_tell_nothing_is_disturbed(tmp_path: Path) -> None:
    watch = MachineWatch(tmp_path / "none", tmp_path / "nowhere", 2, 0.01)
    mark = watch.mark()
    assert (watch.waited_s(mark), watch.taken(mark)) == (0, 0)


def test_this_machine_answers() -> None:
    watch = MachineWatch()
    mark = watch.mark()
    assert watch.waited_s(mark) >= 0
    assert 0 <= watch.taken(mark) <= 1
