"""Who may import whom, read from the sources."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.models.registry import FAMILIES

from support.hardware_words import OF_A_CPU
from support.paths import ROOT

FOLDERS = ("cli", "compiler", "runtime", "buckets", "quantize", "models")
ALLOWED = {
    "cli": {"compiler", "runtime", "buckets", "quantize"},
    "compiler": {"models", "quantize", "buckets"},
    "runtime": {"buckets"},
    "models": {"quantize"},
    "quantize": set(),
    "buckets": set(),
}
FORBIDDEN_ROOTS = {
    "runtime": {"torch", "tvm", "transformers", "onnx"},
    "buckets": {"torch", "tvm", "transformers"},
}


# What one op or one format brings is in the words of each target's kernels.
TEMPLATE_WORDS = tuple(f"llmc.compiler.targets.{target}.kernels" for target in ("cpu", "reference"))
BRING_TEMPLATES = (("compiler", "ops"), ("quantize", "formats"))


@functools.cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported_modules(path: Path, package: str) -> set[str]:
    """Absolute names of all modules that a file of `package` imports, wherever in the file."""
    modules: set[str] = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        else:
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            modules.add(base)
            modules.update(f"{base}.{alias.name}" for alias in node.names)
    return modules


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "build" not in path.parts)


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_imports_only_what_it_may(folder: str) -> None:
    files = sources(folder)
    assert files
    wrong = []
    for path in files:
        package = ".".join(["llmc", *path.relative_to(ROOT).parent.parts])
        for module in imported_modules(path, package):
            root, _, rest = module.partition(".")
            sibling = rest.partition(".")[0]
            crosses = root == "llmc" and sibling in FOLDERS and sibling != folder
            if path.relative_to(ROOT).parts[:2] in BRING_TEMPLATES and module.startswith(TEMPLATE_WORDS):
                continue
            if crosses and sibling not in ALLOWED[folder]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
            if root in FORBIDDEN_ROOTS.get(folder, ()):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_relative_imports_are_resolved(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("from ..compiler import cache\nfrom . import y\nimport torch.nn\n")
    assert {"llmc.compiler.cache", "llmc.runtime.y", "torch.nn"} <= imported_modules(file, "llmc.runtime")


@pytest.mark.parametrize("statement", ["import llmc", "from llmc import SamplingParams; SamplingParams()"])
def test_package_is_lazy(statement: str) -> None:
    heavy = "torch tvm numpy tokenizers typer rich jinja2 transformers"
    code = f"{statement}; import sys; print(sorted(set('{heavy}'.split()) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["run", "/nowhere", "--prompt", "x"]])
def test_command_line_imports_no_compiler_stack(argv: list[str]) -> None:
    code = (
        "import sys; from llmc.cli.main import main; main(sys.argv[1:]);"
        "print('LOADED', sorted({'torch', 'tvm', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code, *argv], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("LOADED []")


OTHER_MEANINGS = {
    "avx512": ("llmc/cpu_levels.py",),  # in a target's name
    "lane": ("runtime/server/",),  # a thread for requests of some size
    "lanes": ("runtime/server/",),
    # A part of a page or drawing.
    "panel": ("cli/render/", "runtime/profile/roofline.py", "runtime/report/", "runtime/simulation/drawings.py"),
}
"""Words that also name something else, and the modules where they do."""


def test_only_targets_know_hardware() -> None:
    wrong, kept = [], set()
    for path in (path for folder in ("llmc", *FOLDERS) for path in sources(folder)):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("compiler/targets/") and name.count("/") > 2:
            continue
        # Functions of the C ABI have the names that they have.
        text = re.sub(r"\bllmc_\w+", "", path.read_text(encoding="utf-8"))
        for word in map(str.lower, OF_A_CPU.findall(text)):
            if name.startswith(OTHER_MEANINGS.get(word, "-")):
                kept.add(word)
            else:
                wrong.append(f"{name} says {word!r}")
    assert not wrong
    assert kept == OTHER_MEANINGS.keys()


@pytest.mark.parametrize(
    "text", ["lanes: int", "panel_columns = 48", '{"avx512vnni"}', "isa_level()", "instruction_sets", "-mcpu=", "LLVM"]
)
def test_words_of_hardware_are_noticed(text: str) -> None:
    assert OF_A_CPU.search(text)


NAMES_LIKE_FAMILIES = {
    # What a GGUF file calls kinds of tokenizers.
    "compiler/calibration/gguf/tokenizer.py": {"gpt2", "llama"},
    # Values of --tool-call-parser and --reasoning-parser, after the models that wrote their format first.
    "runtime/server/reasoning.py": {"gemma4", "qwen3"},
    "runtime/server/tools/gemma4.py": {"gemma4"},
    "runtime/server/tools/mistral.py": {"mistral"},
    "runtime/server/tools/pythonic.py": {"lfm2"},
    "runtime/server/tools/registry.py": {"gemma4", "lfm2", "mistral", "qwen"},
}
"""Texts that are a family's model_type, and also name something else."""


def strings(tree: ast.AST) -> set[str]:
    """Texts of a module's code, without those that only document."""
    notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in notes)
    return {node.value for node in nodes if isinstance(node.value, str)}


def test_compiler_and_runtime_know_no_family() -> None:
    """What differs by family stands in models/, or in what the artifact brings, such as the chat template."""
    found = {}
    for path in (*sources("compiler"), *sources("runtime")):
        names = strings(ast.parse(path.read_text(encoding="utf-8"))) & FAMILIES.keys()
        if names:
            found[path.relative_to(ROOT).as_posix()] = names
    assert found == NAMES_LIKE_FAMILIES


def test_documentation_is_no_string_of_the_code() -> None:
    assert strings(ast.parse('"""qwen2"""\nx = {"qwen3": 1}\n"""llama"""\ny == "opt"')) == {"qwen3", "opt"}


def test_the_compiler_reaches_hardware_through_the_seam() -> None:
    inside = tuple(f"llmc.compiler.targets.{part}" for part in ("cpu", "reference", "gpu", "elf"))
    wrong = []
    for folder in ("compiler", "cli"):
        for path in sources(folder):
            parts = path.relative_to(ROOT).parts
            own = parts[:2] == ("compiler", "targets") and len(parts) > 3
            package = ".".join(["llmc", *parts[:-1]])
            found = {module for module in imported_modules(path, package) if module.startswith(inside)}
            if parts[:2] in BRING_TEMPLATES:
                found = {module for module in found if not module.startswith(TEMPLATE_WORDS)}
            if found and not own:
                wrong.append(f"{path.relative_to(ROOT)} imports {', '.join(sorted(found))}")
    assert not wrong


def import_graph() -> dict[str, set[str]]:
    """Every module of the project, and those that it imports anywhere in its file; a package's face stands for none."""
    files = {}
    for folder in ("llmc", *FOLDERS):
        for path in sources(folder):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if parts[0] == "llmc" else ("llmc", *parts))
            files[name.removesuffix(".__init__")] = path
    graph = {}
    for module, path in files.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found = set()
        for name in imported_modules(path, package):
            while name and name not in files:
                name = name.rpartition(".")[0]
            found.add(name)
        faces = {name for name in found if any(other.startswith(f"{name}.") for other in found) or name == "llmc"}
        graph[module] = found - faces - {module, ""}
    return graph


def test_no_module_imports_itself_through_others() -> None:
    graph = import_graph()
    assert len(graph) > 300
    done: set[str] = set()

    def circle(module: str, path: tuple[str, ...]) -> tuple[str, ...]:
        if module in path:
            return (*path[path.index(module) :], module)
        if module in done:
            return ()
        found = next((way for other in sorted(graph[module]) if (way := circle(other, (*path, module)))), ())
        done.add(module)
        return found

    assert not [" -> ".join(way) for module in sorted(graph) if (way := circle(module, ()))]


def test_only_its_own_tests_look_into_the_command_line() -> None:
    """What bench, docs and other tests need of it is a line that anybody can type, or stands where it belongs."""
    folders = ("bench", "docs", "examples", "tests", *(folder for folder in FOLDERS if folder != "cli"))
    files = [path for folder in folders for path in sources(folder) if "tests/cli/" not in path.as_posix()]
    wrong = []
    for path in files:
        modules = imported_modules(path, ".".join(path.relative_to(ROOT).parent.parts))
        # Some programs are a text that another process runs.
        told = re.findall(r"(?:from|import) (llmc\.cli(?:\.\w+)*)(?: import (\w+))?", path.read_text(encoding="utf-8"))
        modules |= {f"{module}.{name}" if name else module for module, name in told}
        inside = {m for m in modules if m.startswith("llmc.cli.") and not f"{m}.".startswith("llmc.cli.main.")}
        wrong += [f"{path.relative_to(ROOT)} imports {module}" for module in sorted(inside)]
    assert not wrong


def test_the_package_s_face_is_for_users() -> None:
    """It imports the Python API and, for a model, the compiler: whoever of those imported it would import itself."""
    known = {path.stem for path in (ROOT / "llmc").glob("*.py")} | {"images"} | set(FOLDERS)
    wrong = []
    for folder in sorted({*FOLDERS} - {"cli"}):
        for path in sources(folder):
            package = ".".join(["llmc", *path.relative_to(ROOT).parent.parts])
            names = {module.split(".")[1] for module in imported_modules(path, package) if module.startswith("llmc.")}
            wrong += [f"{path.relative_to(ROOT)} imports llmc.{name}" for name in sorted(names - known)]
    assert not wrong


@pytest.mark.parametrize("name", ["guided", "guides", "limits", "pipeline", "stream", "streaming", "verify", "warmup"])
def test_a_general_name_stands_once(name: str) -> None:
    """Words that several modules could be called: a second one says what it is of."""
    named = [path for folder in (*FOLDERS, "bench") for path in sources(folder) if path.stem == name]
    assert len(named) <= 1, named


def test_tests_mirror_the_source() -> None:
    """What is tested from a folder of tests stands in the folder of that name."""
    others = {"support", "install"}  # helpers of tests, and packages that are built and installed
    folders = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")]
    wrong = {path.parent for path in folders if path.parts[0] not in others and not (ROOT / path.parent).is_dir()}
    assert not wrong


@pytest.mark.parametrize(
    ("folder", "source", "of_the_tree"), [("runtime", "runtime", ()), ("", "llmc", ("layering", "fuzz_files"))]
)
def test_tests_beside_folders_are_of_modules_beside_folders(
    folder: str, source: str, of_the_tree: tuple[str, ...]
) -> None:
    """Such a test is named after its module. Those of llmc/ are at the top: a folder llmc would hide the package.

    of_the_tree: what is tested of the whole tree.
    """
    modules = (*(path.stem for path in (ROOT / source).glob("*.py")), *of_the_tree)
    tests = [path.stem.removeprefix("test_") for path in (ROOT / "tests" / folder).glob("test_*.py")]
    assert tests
    assert [name for name in tests if not any(f"{name}_".startswith(f"{module}_") for module in modules)] == []


def tracked_files() -> list[str]:
    """Paths that git tracks; without git, as in an unpacked archive, the test that asks is skipped."""
    try:
        listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the tree is not a clone: {error}")
    return [path for path in listed.stdout.split("\0") if path]


def test_a_plain_checkout_is_importable(tmp_path: Path) -> None:
    """llmc's links are all that type checkers, editors and a script with PYTHONPATH need: no install, no build."""
    for name in tracked_files():
        source, copy = ROOT / name, tmp_path / name
        if not source.is_symlink() and (source.suffix != ".py" or not source.is_file()):
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.symlink_to(os.readlink(source))
        else:
            copy.write_bytes(source.read_bytes())
    code = (
        "import sys; root, *packages = sys.argv[1:]; sys.path[:0] = [root]; sys.path += packages;"
        "import llmc.compiler.pipeline, llmc.runtime.llm, llmc.cli.main;"
        "files = [module.__file__ for name, module in sys.modules.items() if name.partition('.')[0] == 'llmc'];"
        "print(*{file or 'none' for file in files}, sep='\\n')"
    )
    # Without site no .pth file runs, so the finder of an editable install is not there.
    packages = [path for path in sys.path if path.endswith("-packages")]
    command = [sys.executable, "-I", "-S", "-c", code, str(tmp_path), *packages]
    files = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.splitlines()
    assert len(files) > 50
    assert [file for file in files if not file.startswith(f"{tmp_path}/llmc/")] == []


COMPILER_BASE = {"adapters", "config", "dtypes", "kernel_spec", "partition", "stages", "weight_request"}
"""Of the compiler, what all of it may import; they import only each other."""
_PARTS = {"graph", "ops", "store", "targets"}
_PHASES = {"phases", "state", *_PARTS}
COMPILER_ALLOWED: dict[str, set[str]] = {
    **{name: set() for name in COMPILER_BASE},
    "ops": {"graph", "targets"},
    "targets": {"graph", "ops", "store", "build"},
    "graph": {"ops", "store", "targets", "resolved"},
    "store": {"graph", "ops", "targets", "resolved"},
    "recipes": set(),
    "kv_layers": {"targets"},
    "resolve_ladder": set(),
    "resolved": {"kv_layers", *_PARTS},
    "resolve": {"kv_layers", "recipes", "resolve_ladder", "resolved", *_PARTS},
    "notes": {"resolved", "store"},
    "workers": {"targets"},
    "build": {"store", "targets", "workers"},
    "hub": {"store"},
    "phases": set(),
    "state": {"phases", "build", "resolved", *_PARTS},
    "dump": {"graph", "state"},
    "verify": {"state"},
    "pipeline": {"dump", "verify", "build", "hub", "notes", "resolve", "resources", *_PHASES},
    # The drivers, which nothing of the compiler imports.
    "extend": {"pipeline", *_PHASES},
    "beside": {"resolve", "store"},
    "drafting_heads": {"beside", "draft_vocab", "hub", "pipeline", "store"},
    "images": {"beside", "hub", "pipeline", "resolve", "resolved"},
    "draft_vocab": {"model_tokenizer"},
    "model_tokenizer": set(),
    "bundle_apply": {"pipeline", *_PHASES},
    "wanted": {"resolve", *_PARTS},
    "dry_run": {"compile_times", "resolve", "resolved", *_PARTS},
    "calibration": {"model_tokenizer", "store"},
    "rounding": {"resolve"},
    "compile_times": set(),
    "resources": set(),
}
"""Folders and files of the compiler: nothing below the list of phases knows that there is one."""


def test_inside_the_compiler_nothing_imports_what_is_above_it() -> None:
    wrong: list[str] = []
    found: set[str] = set()
    for path in sources("compiler"):
        part = path.relative_to(ROOT / "compiler").with_suffix("").parts[0]
        if part == "__init__":
            continue
        found.add(part)
        package = ".".join(["llmc", *path.relative_to(ROOT).parent.parts])
        for module in imported_modules(path, package):
            _, _, other = module.partition("llmc.compiler.")
            other = other.partition(".")[0]
            if other in COMPILER_ALLOWED and other not in {part, *COMPILER_BASE, *COMPILER_ALLOWED[part]}:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong
    assert found == COMPILER_ALLOWED.keys()


NATIVE = ROOT / "runtime" / "native"
NATIVE_FOLDERS = ("core", "artifact", "sampling", "collective", "device", "engine", "capi")
"""Each includes itself and those before it. The simulation runs an engine on a device of its own, so it may see it."""


def test_native_folders_include_those_before_them() -> None:
    wrong = []
    for i, folder in enumerate(NATIVE_FOLDERS):
        allowed = {"llmc", *NATIVE_FOLDERS[: i + 1]}
        files = sorted(path for path in (NATIVE / folder).rglob("*") if path.suffix in (".cc", ".h"))
        assert files
        for path in files:
            name = path.relative_to(NATIVE).as_posix()
            seen = allowed | ({"engine"} if name.startswith("device/simulated/simulation.") else set())
            for included in re.findall(r'#include "(\w+)/', path.read_text(encoding="utf-8")):
                if included not in seen:
                    wrong.append(f"{name} includes {included}/")
    assert not wrong
