"""Devices through the binding and the command line."""

from __future__ import annotations

import json
import re

import pytest

from llmc.cli import main as cli
from llmc.runtime.binding import Artifact, Device, Engine, LlmcError, device_kinds

from support.artifacts import TinyArtifact
from support.cpu_level import machine_level
from support.paths import ROOT


def test_the_cpu_is_a_device() -> None:
    (cpu,) = [kind for kind in device_kinds() if kind.name == "cpu"]
    assert cpu.summary
    with Device("cpu", {"threads": 2, "pin": False}) as device:
        assert (device.facts["threads"], device.facts["level"]) == ("2", str(machine_level()))
    with pytest.raises(ValueError, match="closed"):
        device.facts  # noqa: B018


def test_options_are_checked() -> None:
    with pytest.raises(LlmcError, match="no option 'speed'; it knows threads, pin, idle_spin_us, weights"):
        Device("cpu", {"speed": 1})
    with pytest.raises(LlmcError, match="no kind of device called 'abacus'; this library has cpu") as caught:
        Device("abacus")
    assert caught.value.name == "not_found"


def test_engines_share_an_open_device(tiny_artifact: TinyArtifact) -> None:
    with Artifact(tiny_artifact.artifact) as artifact:
        device = Device(artifact.info.target_kind, {"threads": 1})
        with pytest.raises(TypeError, match="open already and takes no options: open it with threads"):
            Engine(artifact, device=device, num_threads=2)
        with Engine(artifact, device=device, num_blocks=8) as first, Engine(artifact, device=device) as second:
            device.close()
            outputs = []
            for engine in (first, second):
                assert engine.stats.device["threads"] == 1
                engine.submit([5, 6, 7], temperature=0.0, max_tokens=4)
                while engine.step():
                    pass
                outputs.append([event.token_id for event in engine.poll()])
        assert outputs[0] == outputs[1]


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["devices", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    (cpu,) = [one for one in listed if one["kind"] == "cpu"]
    assert cpu["facts"]["level"] == str(machine_level())
    assert cpu["error"] is None
    assert cli.main(["devices"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("cpu: ", "instructions", cpu["facts"]["instructions"]))


def test_the_page_about_devices_names_what_there_is() -> None:
    root = ROOT
    page = (root / "docs" / "adding-a-device.md").read_text()
    contract = (root / "runtime" / "native" / "device" / "device.h").read_text()
    for name in ("Enqueue", "Wait", "CopyBlock", "BeforeStep", "Reserve", "Visit", "Recall", "ForEach", "GetStats",
                 "overlap", "profile", "num_blocks", "model"):  # fmt: skip
        assert f"{name}(" in contract
        assert f"`{name}" in page
    without_default = re.findall(r"virtual [^;]*?(\w+)\([^;]*\)[^;]*= 0;", contract[contract.index("class Device {") :])
    assert sorted(without_default) == ["CopyBlock", "Enqueue", "Wait", "model", "num_blocks"]
