"""llmc itself, as installed in the environment that runs the benchmark."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import ClassVar

from bench.peers.engines.base import Engine, Prepared, Variant
from bench.peers.engines.llama_cpp import LlamaCpp
from bench.peers.environment import Skip, run, written_whole
from bench.peers.process import Command
from llmc.compiler.targets.cpu.target import native_target
from llmc.distribution import NAME

ROOT = Path(__file__).resolve().parents[3]
LLMC = (sys.executable, "-P", "-c", "import sys; from llmc.cli.main import main; sys.exit(main())")


def _quantized(name: str, precision: str) -> Variant:
    int8 = name.endswith("a8")
    return Variant(name, precision, ("int8" if int8 else "bf16", "f32"), {"quant": name})


class Llmc(Engine):
    name = "llmc"
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant("bf16", "16-bit", ("bf16", "f32")),
        _quantized("w8a16", "int8"),
        _quantized("w8a8", "int8"),
        _quantized("w4a16", "int4"),
        _quantized("w4a8", "int4"),
        # Runs the same file as llama.cpp.
        Variant("gguf-Q8_0", "int8", ("bf16", "f32"), {"gguf": "Q8_0"}),
        Variant("gguf-Q4_K_M", "int4", ("bf16", "f32"), {"gguf": "Q4_K_M"}),
    )
    memory_factor, memory_base = 1.05, 3 << 28
    offline = True

    def install(self) -> None:
        try:
            metadata.version(NAME)
        except metadata.PackageNotFoundError as error:
            raise Skip("llmc is not installed in the environment that runs the benchmark: make test") from error

    def install_bytes(self) -> int:
        """Bytes of the package and the requirements of a base install, which runs and serves."""
        total = sum(_files_bytes(name) for name in _requirements(NAME))
        sources = [path for name in ("llmc", "runtime", "cli", "buckets") for path in (ROOT / name).rglob("*.py")]
        from llmc.runtime.binding.library import library_candidates

        library = next((path for path in library_candidates() if path.is_file()), None)
        return total + sum(path.stat().st_size for path in [*sources, *([library] if library else [])])

    def prepare(self, model: str, variant: Variant) -> Prepared:
        log = self.workspace.log(f"prepare-llmc-{model}-{variant.name}")
        options = ["--quant", variant.options["quant"]] if "quant" in variant.options else ["--dtype", "bf16"]
        source = self.workspace.model(model)
        if "gguf" in variant.options:
            source = LlamaCpp(self.workspace, self.settings).file(model, variant.options["gguf"])
        limits = ["--max-num-seqs", self.settings.max_batch, "--max-model-len", self.settings.max_len]

        def compile_to(path: Path) -> None:
            self._check_flags(options)
            self.workspace.say(f"compile {model} for llmc {variant.name}")
            run([*LLMC, "compile", source, "-o", path, *options, *map(str, limits)], log)

        target = self.workspace.converted(model, self.name, f"{variant.name}-{compiler_hash()}")
        for other in target.parent.glob(f"{self.name}-{variant.name}-*"):
            if other != target:
                shutil.rmtree(other)
        path = written_whole(target, compile_to)
        return Prepared(path, (path / "weights.safetensors").stat().st_size)

    def _check_flags(self, options: list[str]) -> None:
        shown = subprocess.run([*LLMC, "compile", "--help"], capture_output=True, text=True, check=False).stdout
        missing = [flag for flag in options if flag.startswith("--") and not re.search(rf"{flag}\b", shown)]
        if missing:
            raise Skip(f"this llmc compile has no {missing[0]}")

    def limit(self, variant: Variant, supported: frozenset[str]) -> str:
        target = native_target()
        # With tile registers, quantized weights are not multiplied as bf16.
        fast = target.bf16_dot or (target.bf16_tiles and not variant.options)
        if variant.arithmetic[0] == "bf16" and not fast:
            return "f32"
        return super().limit(variant, supported)

    def worker(self, prepared: Prepared, variant: Variant) -> Command:
        return self.command(Path(sys.executable), "llmc_worker.py", prepared, compiler=compiler_hash())

    def server(self, prepared: Prepared, variant: Variant, port: int) -> Command | None:
        flags = ("--port", str(port), "--threads", str(self.settings.threads), "--no-access-log")
        return Command((*LLMC, "serve", str(prepared.path), *flags), ready_path="/ready")

    def native_start(self, prepared: Prepared, variant: Variant) -> Command | None:
        from llmc.runtime.binding.library import library_candidates

        library = next((path for path in library_candidates() if path.is_file()), None)
        if library is None:
            return None
        program = self.workspace.root / "env" / "llmc-embed"
        header, source = ROOT / "runtime/native/include", ROOT / "examples/embed.c"
        program.parent.mkdir(parents=True, exist_ok=True)
        try:
            run(["cc", "-O2", "-I", header, source, library, f"-Wl,-rpath,{library.parent}", "-o", program],
                self.workspace.log("embed"))  # fmt: skip
        except Skip:
            return None
        return Command((str(program), str(prepared.path), "1", *map(str, range(300, 316))))


@cache
def compiler_hash() -> str:
    """Hash of the sources that an artifact depends on: those of another compiler must not be measured as this one's."""
    digest = hashlib.sha256()
    for folder in ("compiler", "models", "quantize", "buckets"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def _requirements(name: str) -> set[str]:
    """Installed distributions that `name` requires without extras, directly or indirectly."""
    found: set[str] = set()
    todo = [name]
    while todo:
        try:
            lines = metadata.requires(todo.pop()) or []
        except metadata.PackageNotFoundError:
            continue
        for line in lines:
            match = re.match(r"[A-Za-z0-9._-]+", line)
            if match and "extra ==" not in line and match.group() not in found:
                found.add(match.group())
                todo.append(match.group())
    return found


def _files_bytes(name: str) -> int:
    try:
        files = metadata.distribution(name).files or []
    except metadata.PackageNotFoundError:
        return 0
    paths = [Path(str(file.locate())) for file in files]
    return sum(path.stat().st_size for path in paths if path.is_file())
