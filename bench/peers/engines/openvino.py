"""OpenVINO GenAI; its models are exported by optimum-intel and compressed by nncf in another environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from bench.peers.engines.base import Engine, Prepared, Variant
from bench.peers.environment import run, written_whole
from bench.peers.model import kv_bytes, read_shape
from bench.peers.process import Command

EXPORT = ("torch==2.13.*", "optimum-intel[openvino]==2.2.*", "nncf==3.4.*")


class OpenVino(Engine):
    name = "openvino"
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant("fp16", "16-bit", ("bf16", "f32"), {"export": ("fp16",)}),
        # OpenVINO rounds activations to int8 on some CPUs and multiplies bf16 on others.
        Variant("int8", "int8", ("int8", "bf16", "f32"), {"export": ("int8",)}),
        Variant("int4", "int4", ("int8", "bf16", "f32"), {"export": ("int4", "--group-size", "64", "--ratio", "1.0")}),
    )
    memory_factor, memory_base = 1.6, 1 << 30
    offline = True

    def install(self) -> None:
        self.workspace.environment(self.name).ensure(["openvino-genai==2026.4.*"])
        self.workspace.environment("openvino-export").ensure(EXPORT, unless_broken=("torchvision",))

    def install_bytes(self) -> int:
        return self.workspace.environment(self.name).bytes()

    def prepare(self, model: str, variant: Variant) -> Prepared:
        def export(path: Path) -> None:
            self.workspace.say(f"export {model} for OpenVINO {variant.name}")
            program = self.workspace.environment("openvino-export").path / "bin" / "optimum-cli"
            options = ("--task", "text-generation-with-past", "--weight-format", *variant.options["export"])
            run([program, "export", "openvino", "--model", self.workspace.model(model), *options, path],
                self.workspace.log(f"prepare-{self.name}-{model}-{variant.name}"),
                env={**os.environ, "HF_HUB_OFFLINE": "1"})  # fmt: skip

        path = written_whole(self.workspace.converted(model, self.name, variant.name), export)
        return Prepared(path, (path / "openvino_model.bin").stat().st_size)

    def worker(self, prepared: Prepared, variant: Variant) -> Command:
        from bench.peers.machine_limits import supported

        cache = kv_bytes(read_shape(prepared.path), self.settings.max_batch * self.settings.max_len, 4)
        return self.command(
            self.workspace.environment(self.name).python,
            "openvino_worker.py",
            prepared,
            precision="bf16" if "bf16" in supported(self.settings.threads) else "f32",
            kv_gib=-(-cache // (1 << 30)),
        )
