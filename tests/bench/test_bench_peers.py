"""bench/peers with an engine that takes no time: order, resuming, failures, and what the report makes of it."""

from __future__ import annotations

import functools
import json
import re
import shlex
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench.peers import __main__ as command
from bench.peers import environment, roofline
from bench.peers.engines import ENGINES
from bench.peers.engines.base import Variant
from bench.peers.model import kv_bytes, prefill_ops, work_of
from bench.peers.page import write_page
from bench.peers.plan import Entrant, Key, Settings, groups, measurements
from bench.peers.publish import figures_compared, publish
from bench.peers.report import Report
from bench.peers.results import Results
from bench.peers.runner import Runner, enlist
from bench.peers.store import Measurement, Store, StoreError
from llmc.buckets.cost import ModelShape
from llmc.compiler.targets.cpu.target import TARGETS

from support.fake_peer import Fake, ReadOff
from support.paths import ROOT

SETTINGS = Settings(1, prefills=(16, 32), batches=(1, 2), steps=4, streams=2, requests=4, input_len=8, output_len=4)
SHAPE = ModelShape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=1000)
MACHINE = {"cpu": "made-up", "cpus": 1, "memory_gib": 1}


class Second(Fake):
    name = "second"
    speed = 200.0


@pytest.fixture
def workspace(tmp_path: Path) -> environment.Workspace:
    return environment.Workspace(tmp_path, 1)


def new_store(folder: Path, settings: Settings = SETTINGS) -> Store:
    store = Store(folder / "results.json", settings, MACHINE)
    store.models["m"] = asdict(SHAPE)
    return store


def runner(workspace: environment.Workspace, store: Store, *engines: Fake, rounds: int = 2,
           parts: tuple[str, ...] = ("speed",)) -> tuple[Runner, list[Any], ReadOff]:  # fmt: skip
    limits = ReadOff()
    found = enlist(engines, ["m"], lambda engine, variant: True, frozenset({"f32"}), store, say=lambda text: None)
    entrants = [one.entrant() for one in found.values()]
    plan = list(measurements(SETTINGS, ["m"], lambda model: entrants, parts, rounds, 1 << 40))
    return Runner(workspace, SETTINGS, store, limits, found), plan, limits


def run_all(workspace: environment.Workspace, store: Store, *engines: Fake, **options: Any) -> ReadOff:
    one, plan, limits = runner(workspace, store, *engines, **options)
    try:
        assert one.run(plan)
    finally:
        one.close()
    return limits


def test_all_engines_take_a_figure_before_any_takes_the_next(workspace: environment.Workspace) -> None:
    store = new_store(workspace.root)
    run_all(workspace, store, Fake(workspace, SETTINGS), Second(workspace, SETTINGS))
    order = [(one.key.round, one.key.figure, one.key.engine) for one in store.measurements]
    figures = ("prefill:16", "prefill:32", "decode:1", "decode:2")
    turns = (("fake", "second"), ("second", "fake"))
    assert order == [(number, figure, name) for number in (0, 1) for figure in figures for name in turns[number]]
    assert [one.value for one in store.measurements[:2]] == [100.0, 200.0]
    assert {one.key.figure: one.value for one in store.measurements if one.key.engine == "fake"} == {
        "prefill:16": 100.0,
        "prefill:32": 100.0,
        "decode:1": 100.0,
        "decode:2": 200.0,
    }
    assert store.engines["fake"] == {"install_bytes": 5 << 20, "versions": ["1.0"],
                                     "details": {"plain": {"kind": "fake"}}}  # fmt: skip


def test_a_figure_is_warmed_up_once_for_a_process(workspace: environment.Workspace) -> None:
    fake = Fake(workspace, SETTINGS)
    run_all(workspace, new_store(workspace.root), fake, rounds=1)
    warm_and_real = [f"fake {what}" for what in ("prefill 16", "prefill 32", "decode 1", "decode 2") for _ in range(2)]
    assert fake.log.read_text().splitlines() == ["fake load", *warm_and_real]


def test_the_limit_of_a_figure_is_the_mean_of_its_own_two_probes(workspace: environment.Workspace) -> None:
    store = new_store(workspace.root)
    limits = run_all(workspace, store, Fake(workspace, SETTINGS), rounds=1)
    assert limits.asked == ["f32"] * 4 + ["read"] * 4
    assert [one.limits for one in store.measurements] == [
        {"f32": 1.5e9},
        {"f32": 3.5e9},
        {"read": 5.5e9},
        {"read": 7.5e9},
    ]


def test_a_run_goes_on_where_the_last_one_stopped(workspace: environment.Workspace) -> None:
    store = new_store(workspace.root)
    first, plan, _ = runner(workspace, store, Fake(workspace, SETTINGS), Second(workspace, SETTINGS))
    taken: list[Key] = []

    def stop_after_three(key: Key, found: Measurement | None) -> None:
        if found is not None:
            taken.append(key)
        if len(taken) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(plan, progress=stop_after_three)
    first.close()
    assert not first.run(plan, stop_at=time.monotonic() - 1)
    again = new_store(workspace.root)
    assert [one.key for one in again.measurements] == [key for _, key in plan[:3]]
    run_all(workspace, again, Fake(workspace, SETTINGS), Second(workspace, SETTINGS))
    assert [one.key for one in again.measurements] == [key for _, key in plan]
    assert len(new_store(workspace.root).done()) == len(plan)


def test_a_worker_sleeps_while_others_are_measured(workspace: environment.Workspace) -> None:
    one, plan, _ = runner(workspace, new_store(workspace.root), Fake(workspace, SETTINGS))
    try:
        one.measure(plan[0][1])
        (worker,) = one._workers.values()
        deadline = time.monotonic() + 30
        while (state := process_state(worker.process.pid)) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state == "T"
        assert one.measure(plan[0][1]).value == 100.0
    finally:
        one.close()
    assert worker.process.returncode is not None


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_what_fails_is_told_and_the_rest_goes_on(workspace: environment.Workspace) -> None:
    class Fails(Fake):
        options = {"fails": 32}  # noqa: RUF012

    class Dies(Second):
        options = {"dies": 16}  # noqa: RUF012

    store = new_store(workspace.root)
    run_all(workspace, store, Fails(workspace, SETTINGS), Dies(workspace, SETTINGS), rounds=1)
    errors = {(one.key.engine, one.key.figure): one.error for one in store.measurements if one.value is None}
    assert errors.keys() == {("fake", "prefill:32"), ("second", "prefill:16")}
    assert errors["fake", "prefill:32"] == "MemoryError: too long"
    assert "ended with 7" in str(errors["second", "prefill:16"])
    assert len(store.measurements) == 8
    report = Report(store)
    assert len(report.failures()) == 2
    assert "failed: m fake plain prefill:32: MemoryError: too long" in report.markdown()


def test_a_model_that_does_not_load_is_told_in_its_own_words(workspace: environment.Workspace) -> None:
    class Broken(Fake):
        options = {"broken": True}  # noqa: RUF012

    store = new_store(workspace.root)
    run_all(workspace, store, Broken(workspace, SETTINGS), rounds=1)
    assert {one.error for one in store.measurements} == {"ValueError: no weights here"}


def test_who_cannot_take_part_is_skipped_with_the_reason(workspace: environment.Workspace) -> None:
    class NotInstalled(Fake):
        no_install = "the package index has no such package"

    class NotConverted(Second):
        no_model = "it knows no such model"

    store, said = new_store(workspace.root), []  # type: Store, list[str]
    engines = [NotInstalled(workspace, SETTINGS), NotConverted(workspace, SETTINGS)]
    assert not enlist(engines, ["m"], lambda engine, variant: True, frozenset({"f32"}), store, said.append)
    reasons = {"fake": NotInstalled.no_install, "m/second/plain": NotConverted.no_model}
    assert store.skipped == reasons
    assert said == [f"skip {name}: {reason}" for name, reason in reasons.items()]
    assert "skipped: fake: the package index has no such package" in Report(store).markdown()
    # A later run in which it works forgets the reason.
    enlist([Fake(workspace, SETTINGS)], ["m"], lambda engine, variant: True, frozenset(), store, said.append)
    assert store.skipped.keys() == {"m/second/plain"}


def test_start_and_memory_are_of_processes_of_their_own(workspace: environment.Workspace) -> None:
    store = new_store(workspace.root)
    fake = Fake(workspace, SETTINGS)
    run_all(workspace, store, fake, parts=("start", "memory"))
    assert [(one.key.figure, one.key.round) for one in store.measurements] == [
        ("start", 0),
        ("memory", 0),
        ("start", 1),
    ]
    assert fake.log.read_text().count("load") == 3
    start, memory, _ = (one.value for one in store.measurements)
    assert start is not None
    assert start > 0
    assert memory is not None
    assert memory > 1 << 20


def test_serving_is_measured_through_the_client_and_offline_through_the_worker(
    workspace: environment.Workspace,
) -> None:
    class Serves(Fake):
        serves, offline = True, True

    store = new_store(workspace.root)
    run_all(workspace, store, Serves(workspace, SETTINGS), parts=("serve",), rounds=1)
    served, offline = store.measurements
    assert (served.key.figure, offline.key.figure) == ("serve", "offline")
    assert served.error is None
    assert served.value is not None
    assert served.value > 0
    assert served.details["tpot_ms"]["p50"] >= 0
    assert offline.value == 4 * 4 / 2.0
    assert "4 requests, 2 at once, 8 in, 4 out" in Report(store).markdown()


def test_groups_fit_into_memory() -> None:
    entrants = [Entrant(name, "v", size) for name, size in zip("abcd", (6, 5, 4, 20), strict=True)]
    found = [[one.engine for one in group] for group in groups(entrants, 10)]
    assert found == [["a", "c"], ["b"], ["d"]]


def test_workers_of_one_group_end_before_the_next_begins(workspace: environment.Workspace) -> None:
    store = new_store(workspace.root)
    one, _, _ = runner(workspace, store, Fake(workspace, SETTINGS), Second(workspace, SETTINGS))
    entrants = [contender.entrant() for contender in one.contenders.values()]
    small = measurements(SETTINGS, ["m"], lambda model: entrants, ("speed",), 1, 1)
    alive: list[int] = []
    try:
        one.run(small, progress=lambda key, found: alive.append(len(one._workers)))
    finally:
        one.close()
    assert max(alive) == 1
    assert [m.key.engine for m in store.measurements] == ["fake"] * 4 + ["second"] * 4


def test_results_with_other_settings_are_refused(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.save()
    assert new_store(tmp_path, replace(SETTINGS, steps=5)).settings.steps == 5
    store.add(Measurement(Key("m", "fake", "plain", "decode:1", 0), 1.0))
    with pytest.raises(StoreError, match="was measured with steps=4, not 5"):
        new_store(tmp_path, replace(SETTINGS, steps=5))
    with pytest.raises(StoreError, match="was measured on 'made-up'"):
        Store(tmp_path / "results.json", SETTINGS, {**MACHINE, "cpu": "another"})
    assert Store.load(tmp_path / "results.json").settings == SETTINGS
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(StoreError, match="is no results file"):
        new_store(tmp_path)


def filled(tmp_path: Path) -> Store:
    """Three rounds of llmc, of a peer that is slower in each, and of one that nothing but decode was measured of."""
    store = new_store(tmp_path)
    for engine, precision in (("llmc", "16-bit"), ("peer", "16-bit"), ("other", "int8")):
        store.prepared[f"m/{engine}/v"] = {"weight_bytes": 10**6, "precision": precision, "limit": "f32"}
    for number, speed in enumerate((100.0, 300.0, 200.0)):
        for engine, factor in (("llmc", 1.0), ("peer", 0.5 - 0.1 * number)):
            for figure, limit in (("prefill:16", "f32"), ("decode:2", "read")):
                found = Measurement(Key("m", engine, "v", figure, number), speed * factor, {limit: 1e9})
                store.measurements.append(found)
            store.measurements.append(Measurement(Key("m", engine, "v", "start", number), 1.0 / (speed * factor)))
        store.measurements.append(Measurement(Key("m", "other", "v", "decode:2", number), 4000.0, {"read": 1e9}))
    store.limits.append({"read": 1e9, "f32": 2e9, "int8": 8e9})
    return store


def test_the_report_has_medians_ranges_and_fractions(tmp_path: Path) -> None:
    report = Report(filled(tmp_path))
    prefill = report.points["m", "llmc", "v", "prefill:16"]
    assert asdict(prefill.value) == {"median": 200.0, "min": 100.0, "max": 300.0, "rounds": 3}
    assert prefill.value.text() == "200 (100–300)"
    assert prefill.fraction is not None
    assert prefill.fraction.median == pytest.approx(200 / 16 * prefill_ops(SHAPE, 16) / 1e9)
    decode = report.points["m", "llmc", "v", "decode:2"]
    assert decode.fraction is not None
    context = SETTINGS.context + SETTINGS.steps // 2
    assert decode.fraction.max == pytest.approx(300 / 2 * (10**6 + kv_bytes(SHAPE, 2 * context)) / 1e9)
    assert report.limits()["read"].rounds == 10
    json.dumps(report.as_dict())


def test_the_report_has_what_so_many_threads_read(tmp_path: Path) -> None:
    store = filled(tmp_path)
    assert "threads, before the figures" not in Report(store).markdown()
    store.reading += [{"1": 6e9, "2": 9e9, "16": 30e9}, {"1": 8e9, "2": 9e9, "16": 32e9}]
    store.save()
    report = Report(Store.load(tmp_path / "results.json"))
    assert {threads: spread.median for threads, spread in report.reading().items()} == {1: 7e9, 2: 9e9, 16: 31e9}
    assert report.as_dict()["read_per_s_by_threads"][2]["rounds"] == 2
    lines = report.markdown().splitlines()
    heads = lines.index("| threads, before the figures | 1 | 2 | 16 |")
    assert lines[heads + 2] == "| read, GB/s | 7.00 (6.00–8.00) | 9.00 (9.00–9.00) | 31.0 (30.0–32.0) |"


def test_results_of_before_threads_were_counted_are_read(tmp_path: Path) -> None:
    filled(tmp_path).save()
    path = tmp_path / "results.json"
    document = json.loads(path.read_text())
    del document["reading"]
    path.write_text(json.dumps(document))
    assert Report(Store.load(path)).reading() == {}


def test_a_point_above_its_limit_is_a_probe_error(tmp_path: Path) -> None:
    report = Report(filled(tmp_path))
    (error,) = report.probe_errors()
    assert error.startswith("m other v decode:2 reaches 213% of the read limit")
    assert f"- probe error: {error}" in report.markdown()


def test_ratios_are_of_the_same_round_and_above_one_where_llmc_is_better(tmp_path: Path) -> None:
    found = {figure: (peer, ratio) for _, figure, _, peer, ratio in Report(filled(tmp_path)).ratios("m")}
    assert found.keys() == {"prefill:16", "decode:2", "start"}
    for peer, ratio in found.values():
        assert peer == "peer v"
        assert (ratio.min, ratio.median, ratio.max) == pytest.approx((2.0, 2.5, 1 / 0.3))


def test_the_plot_has_every_point_between_its_axes(tmp_path: Path) -> None:
    report = Report(filled(tmp_path))
    path = tmp_path / "plot.svg"
    roofline.roofline(report, "m", path)
    tree = ElementTree.parse(path)
    space = "{http://www.w3.org/2000/svg}"
    circles = [c for c in tree.iter(f"{space}circle") if float(c.attrib["cx"]) < roofline.RIGHT]
    squares = [p for p in tree.iter(f"{space}polygon") if float(p.attrib["points"].split(",")[0]) < roofline.RIGHT]
    assert (len(circles), len(squares)) == (4, 1)
    for circle in circles:
        assert float(circle.attrib["cx"]) > roofline.LEFT
        assert roofline.TOP < float(circle.attrib["cy"]) < roofline.BOTTOM
    words = [text.text or "" for text in tree.iter(f"{space}text")]
    assert {"llmc v", "peer v", "other v", "f32 FMA 1", "int8 dot 8"} <= set(words)
    assert not any(word.startswith("bf16") for word in words)


def test_work_is_that_of_the_published_shape() -> None:
    shape = ModelShape(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, head_dim=64, vocab=151936)
    assert 2 * shape.layer_weights == pytest.approx(0.716e9, rel=1e-3)
    one, two = (work_of(shape, "decode", batch, 0, 10**9) for batch in (1, 2))
    assert (two.ops, two.bytes) == (2 * one.ops, one.bytes)
    assert work_of(shape, "prefill", 1, 0, 0).ops == work_of(shape, "decode", 1, 1, 0).ops


def test_the_limit_is_the_best_arithmetic_that_the_cpu_has(workspace: environment.Workspace) -> None:
    variant, engine = Variant("v", "int8", ("bf16", "int8", "f32")), ENGINES["openvino"](workspace, SETTINGS)
    assert engine.limit(variant, frozenset({"f32", "int8", "bf16"})) == "bf16"
    assert engine.limit(variant, frozenset({"f32", "int8"})) == "int8"
    assert engine.limit(variant, frozenset({"f32"})) == "f32"


def test_llmc_is_held_against_what_its_target_multiplies_with(
    workspace: environment.Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, everything = ENGINES["llmc"](workspace, SETTINGS), frozenset({"f32", "int8", "bf16"})
    limits = {}
    for name in ("cooperlake", "icelake-server", "sapphirerapids"):
        monkeypatch.setattr("bench.peers.engines.llmc.native_target", functools.partial(TARGETS.get, name))
        limits[name] = [engine.limit(v, everything) for v in engine.variants if v.name in ("bf16", "w8a16", "w8a8")]
    assert limits == {
        "cooperlake": ["bf16", "bf16", "int8"],
        "icelake-server": ["f32", "f32", "int8"],
        "sapphirerapids": ["bf16", "f32", "int8"],
    }


def test_a_failed_conversion_leaves_nothing_that_looks_done(tmp_path: Path) -> None:
    target = tmp_path / "converted"

    def fail(path: Path) -> None:
        path.mkdir()
        (path / "half").write_text("")
        environment.run(["sh", "-c", "echo Error: no room; echo bye; exit 3"], tmp_path / "log")

    with pytest.raises(environment.Skip, match="Error: no room"):
        environment.written_whole(target, fail)
    assert not target.exists()
    environment.written_whole(target, lambda path: path.mkdir())
    assert list(target.iterdir()) == []


def test_the_command_refuses_unknown_names_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["--engines", "llmc,nobody"])
    assert stopped.value.code == 2
    assert "'nobody' is unknown; choose among llmc, llama.cpp" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["report", "--publish", "../x"])
    assert "'../x': give small letters" in capsys.readouterr().err
    assert command.main(["report", "--folder", str(tmp_path)]) == 1
    assert "results.json does not exist: run the benchmark first" in capsys.readouterr().err


def test_the_report_command_writes_tables_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path).save()
    assert command.main(["report", "--folder", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert text in capsys.readouterr().out
    assert "| llmc v | 200 (100–300) |" in text
    assert (tmp_path / "roofline-m.svg").exists()
    assert json.loads((tmp_path / "report.json").read_text())["ratios"]["m"]


def test_published_figures_are_those_of_the_report(tmp_path: Path) -> None:
    store, results = filled(tmp_path), tmp_path / "results"
    store.settings = replace(SETTINGS, prefills=(16,), batches=(2,))
    store.measurements[0] = replace(store.measurements[0], at=365 * 86400.0)
    report = Report(store)
    assert publish(report, "here", results) == ["here-m"]
    document = Results.load("here-m", results).document
    assert document["date"] == "1971-01-01"
    assert document["limits"] == {"read": [1, 1, 1], "f32": [1, 1, 2], "int8": 8}
    assert document["commands"] == [
        "python -m bench.peers --models m --parts speed,start --rounds 3 --engines llmc,peer,other "
        "--variants llmc/v,peer/v,other/v"
    ]
    ours, theirs, failed = document["speed"]
    assert (ours["engine"], theirs["engine"]) == ("llmc", "peer")
    assert (failed["prefill"], failed["peak"], failed["decode"]) == ({}, {}, {"2": [4000, 4000, 4000]})
    assert (ours["prefill"], ours["decode"]) == ({"16": [200, 100, 300]}, {"2": [200, 100, 300]})
    fractions = [report.points["m", "llmc", "v", figure].fraction for figure in ("prefill:16", "decode:2")]
    shares = [round(100 * one.median) for one in fractions if one is not None]
    assert [ours["peak"]["f32"], ours["reading"]] == shares
    assert [row["python"] for row in document["start"]] == [[0.005, 0.00333, 0.01], [0.0167, 0.00833, 0.02]]
    ratio = [2.5, 2.0, 3.33]
    assert document["ratios"] == [
        {"variant": "v", "peer": ["peer", "v"], "figures": {"decode:2": ratio, "prefill:16": ratio}}
    ]
    assert figures_compared(Settings(1)) == ["decode:1", "decode:8", "prefill:512"]

    page = tmp_path / "page.md"
    page.write_text("# Figures\n")
    write_page(["here-m"], page, results)
    assert f"| llmc v | 200 | {shares[0]} % of f32 | 200 | {shares[1]} % |" in page.read_text()
    assert "| other v | – | – | 4000 | 213 % |" in page.read_text()
    assert "| llmc v ÷ peer v | 2.50 (2.00–3.33) | 2.50 (2.00–3.33) |" in page.read_text()
    path = results / "here-m.json"
    path.write_text(json.dumps({**document, "transcribed": "by hand"}))
    with pytest.raises(StoreError, match="give another name"):
        publish(report, "here", results)
    with pytest.raises(StoreError, match="no measurement to publish"):
        publish(Report(new_store(tmp_path / "none")), "here", results)


def test_a_report_is_published_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path).save()
    results, page = tmp_path / "results", tmp_path / "page.md"
    page.write_text("# Figures\n")
    monkeypatch.setattr(command, "publish", functools.partial(publish, folder=results))
    monkeypatch.setattr(command, "write_page", functools.partial(write_page, path=page, folder=results))
    assert command.main(["report", "--folder", str(tmp_path), "--publish", "here"]) == 0
    assert "docs/benchmarks.md have here-m" in capsys.readouterr().err
    published = page.read_text()
    assert "## m on made-up" in published
    assert command.main(["page"]) == 0
    assert page.read_text() == published


def test_the_commands_in_the_documents_are_understood() -> None:
    text = (ROOT / "docs/benchmarking.md").read_text() + (command.__doc__ or "")
    shown = re.findall(r"python -m bench\.peers([^\n`]*)", text)
    assert len(shown) >= 8
    for line in shown:
        command.parse(shlex.split(re.split(r"\s{3,}|: ", line)[0].replace("--help", "")))


def test_every_engine_has_a_worker_and_distinct_precisions() -> None:
    for name, engine in ENGINES.items():
        assert engine.name == name
        variants = [variant.name for variant in engine.variants]
        assert len(set(variants)) == len(variants)
    scripts = {path.name for path in (ROOT / "bench/peers/workers").glob("*_worker.py")}
    assert scripts == {f"{name.replace('.', '_')}_worker.py" for name in ENGINES}
