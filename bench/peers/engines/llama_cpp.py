"""llama.cpp: built for this CPU from the sources in llama-cpp-python's source distribution."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import ClassVar

from bench.peers.engines.base import WORKERS, Engine, Prepared, Variant
from bench.peers.environment import Environment, Skip, run, written_whole
from bench.peers.process import Command

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
TARGETS = ("llama", "llama-quantize", "llama-simple", "llama-bench", "llama-server")
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_APP=OFF",
)


class LlamaCpp(Engine):
    name = "llama.cpp"
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant("BF16", "16-bit", ("bf16", "f32")),
        Variant("Q8_0", "int8", ("int8", "f32"), {"quantize": "Q8_0"}),
        Variant("Q4_0", "int4", ("int8", "f32"), {"quantize": "Q4_0"}),
        Variant("Q4_K_M", "int4", ("int8", "f32"), {"quantize": "Q4_K_M"}),
    )
    memory_factor, memory_base = 1.1, 3 << 28

    @property
    def environment(self) -> Environment:
        return self.workspace.environment(self.name)

    @property
    def build(self) -> Path:
        return self.environment.path / "build"

    def install(self) -> None:
        environment, log = self.environment, self.environment.log
        environment.ensure(["scikit-build-core>=0.11", "cmake>=3.21", "ninja", "numpy", "gguf>=0.18"])
        stamp = environment.path / "built.txt"
        wanted = " ".join([VERSION, *TARGETS, *OPTIONS])
        if stamp.exists() and stamp.read_text() == wanted:
            return
        source = self._source()
        self.workspace.say(f"build llama.cpp of {PACKAGE} {VERSION}: minutes")
        programs = environment.python.parent
        vendored = source / "vendor" / "llama.cpp"
        ninja = f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}"
        run([programs / "cmake", "-S", vendored, "-B", self.build, "-G", "Ninja", ninja, *OPTIONS], log)
        run([programs / "cmake", "--build", self.build, "--parallel", str(self.settings.threads), "--target", *TARGETS],
            log)  # fmt: skip
        # Only the Python binding: it loads the library built above.
        environment.pip(
            "install", "--no-build-isolation", source, env={**os.environ, "CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
        )
        stamp.write_text(wanted)

    def _source(self) -> Path:
        """Folder of the unpacked source distribution."""
        folder = self.workspace.root / "source"
        source = folder / f"{PACKAGE.replace('-', '_')}-{VERSION}"
        if not source.exists():
            self.environment.pip("download", "--no-deps", "--no-build-isolation", "--no-binary", PACKAGE,
                                 "--dest", folder, f"{PACKAGE}=={VERSION}")  # fmt: skip
            archive = folder / f"{source.name}.tar.gz"
            if not archive.exists():
                raise Skip(f"the package index has no source distribution {archive.name}")
            unpacked = folder / "unpacked"
            shutil.rmtree(unpacked, ignore_errors=True)
            shutil.unpack_archive(archive, unpacked, filter="data")
            (unpacked / source.name).rename(source)
        return source

    def install_bytes(self) -> int:
        """Bytes of the built libraries and server; Python is not needed."""
        folder = self.build / "bin"
        names = [name for name in os.listdir(folder) if ".so" in name or name == "llama-server"]
        return sum(os.lstat(folder / name).st_size for name in names)

    def file(self, model: str, name: str) -> Path:
        """Path of the model's GGUF file of a variant."""
        variant = next(one for one in self.variants if one.name == name)
        if not self.build.exists():
            raise Skip(f"llama.cpp makes its {name} file: --engines llmc,llama.cpp")
        return self.prepare(model, variant).path

    def prepare(self, model: str, variant: Variant) -> Prepared:
        log = self.workspace.log(f"prepare-{self.name}-{model}-{variant.name}")
        source = self.workspace.model(model)

        def convert(path: Path) -> None:
            run([self.environment.python, WORKERS / "write_gguf.py", source, path], log)

        def quantize(path: Path) -> None:
            run([self.build / "bin" / "llama-quantize", whole, path, variant.options["quantize"]], log)

        whole = written_whole(self.workspace.converted(model, self.name, "BF16.gguf"), convert)
        path = whole
        if "quantize" in variant.options:
            path = written_whole(self.workspace.converted(model, self.name, f"{variant.name}.gguf"), quantize)
        vocabulary = (source / "tokenizer.json").stat().st_size
        return Prepared(path, path.stat().st_size - vocabulary)

    def worker(self, prepared: Prepared, variant: Variant) -> Command:
        decode_len = self.settings.context + self.settings.steps + 32
        environment = {"LLAMA_CPP_LIB_PATH": str(self.build / "bin")}
        return self.command(self.environment.python, "llama_cpp_worker.py", prepared, decode_len=decode_len,
                            environment=environment)  # fmt: skip

    def server(self, prepared: Prepared, variant: Variant, port: int) -> Command | None:
        settings = self.settings
        # All slots share the context.
        context = settings.streams * (settings.input_len + settings.output_len + 128)
        flags = ("--port", str(port), "-t", str(settings.threads), "-np", str(settings.streams), "-c", str(context))
        return Command((str(self.build / "bin" / "llama-server"), "-m", str(prepared.path), *flags, "--no-webui"))

    def native_start(self, prepared: Prepared, variant: Variant) -> Command | None:
        # In the models' made-up vocabulary each letter is one token.
        program = str(self.build / "bin" / "llama-simple")
        return Command((program, "-m", str(prepared.path), "-n", "1", "A B C D E F G H "))
