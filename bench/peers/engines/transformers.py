"""transformers with default settings, eager."""

from __future__ import annotations

from typing import ClassVar

from bench.peers.engines.base import Engine, Prepared, Variant
from bench.peers.environment import Environment
from bench.peers.process import Command


class Transformers(Engine):
    name = "transformers"
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant("bf16", "16-bit", ("bf16", "f32"), {"dtype": "bfloat16", "widened": 1}),
        Variant("f32", "32-bit", ("f32",), {"dtype": "float32", "widened": 2}),
    )
    memory_factor, memory_base = 1.3, 1 << 30

    @property
    def environment(self) -> Environment:
        return self.workspace.environment(self.name)

    def install(self) -> None:
        self.environment.ensure(["torch==2.13.*", "transformers==5.*"])

    def install_bytes(self) -> int:
        return self.environment.bytes()

    def prepare(self, model: str, variant: Variant) -> Prepared:
        path = self.workspace.model(model)
        return Prepared(path, (path / "model.safetensors").stat().st_size * variant.options["widened"])

    def worker(self, prepared: Prepared, variant: Variant) -> Command:
        variables = {"OMP_NUM_THREADS": str(self.settings.threads), "HF_HUB_OFFLINE": "1"}
        return self.command(self.environment.python, "transformers_worker.py", prepared, dtype=variant.options["dtype"],
                            environment=variables)  # fmt: skip
