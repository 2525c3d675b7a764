"""Models of the Hugging Face hub: what is downloaded, kept, resumed and refused, against a stand-in of the hub."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub.constants import DOWNLOAD_CHUNK_SIZE

import llmc
from llmc.cli.main import main
from llmc.compiler import pipeline
from llmc.compiler.config import HubSource
from llmc.compiler.hub import HubError, Located, _sentences
from llmc.hub_id import HubId, hub_id
from llmc.model_name import model_name

from support.artifacts import TINY_LADDER, TinyArtifact
from support.fake_hub import COMMIT, NEXT_COMMIT, FakeHub, fake_hub
from support.forked import Parent, forking
from support.tiny_models import make_tiny_model

REPO = "tiny/llama-1M"
SMALL = {f"{name}__json": name.encode() for name in ("config", "tokenizer", "generation_config")}
LOCATE = """
import sys
from llmc.compiler.hub import HubError, locate
mib = []
try:
    found = locate(sys.argv[1], lambda done, total: mib.append((done, total)))
    print(found.path, found.source.repo, found.source.revision, mib[-1][1] if mib else 0)
except HubError as error:
    print("error:", error)
"""


IMPORTS = "import llmc.compiler.hub; from huggingface_hub import snapshot_download; import huggingface_hub.utils.tqdm"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parent]:
    """Forks of it read the environment as a new process does."""
    with forking(IMPORTS, "huggingface_hub", tmp_path_factory.mktemp("python"), without_hub()) as parent:
        yield parent


@pytest.fixture
def hub(python: Parent) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        hub.python = python
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty HF_HOME."""
    return tmp_path / "hf"


def without_hub() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k.lower()}


def environment(hub: FakeHub, home: Path, **more: str) -> dict[str, str]:
    """Of a process that knows no other hub and no proxy."""
    return without_hub() | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)} | more


def locate(hub: FakeHub, home: Path, model: str = REPO, **more: str) -> list[str]:
    """path, repository, commit and MiB of a download in a process of its own, or ["error: …"]."""
    assert hub.python is not None
    result = hub.python.run(LOCATE, model, folder=home.parent, environment=environment(hub, home, **more))
    assert (result.returncode, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    return [line] if line.startswith("error: ") else line.split()


def error(hub: FakeHub, home: Path, model: str = REPO, **more: str) -> str:
    (line,) = locate(hub, home, model, **more)
    return line


# ---- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Qwen/Qwen3-0.6B", HubId("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", HubId("Qwen/Qwen3-0.6B", "v1.0")),
        (f"a/b@{COMMIT}", HubId("a/b", COMMIT)),
        ("a/b@refs/pr/1", HubId("a/b", "refs/pr/1")),
        *(
            (text, None)
            for text in ("qwen", "a/b/c", "/a/b", "./a", "../a", "a/..", "a/b@", "a b/c", "a/b@x/../..", "a/b?")
        ),
    ],
)
def test_what_is_a_name_on_the_hub(text: str, found: HubId | None) -> None:
    assert hub_id(text) == hub_id(Path(text)) == found


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_what_is_here_comes_first(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    path = tmp_path / REPO
    if kind == "directory":
        path.mkdir()
    elif kind == "file":
        path.touch()
    else:
        path.symlink_to("nowhere")
    assert hub_id(REPO) is None
    assert hub_id("tiny/other") == HubId("tiny/other")


# ---- downloads ---------------------------------------------------------------------------------------------------


def test_only_what_is_read_is_downloaded_and_once(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    unread = {
        "pytorch_model__bin": b"x", "consolidated__safetensors": b"x", "LICENSE__md": b"x", "modeling_x__py": b"x",
        "model-00001-of-00002__safetensors": b"x", "model__onnx": b"x", "vocab__json": b"x", "merges__txt": b"x",
    }  # fmt: skip
    hub.add(REPO, tmp_path / "none", model__safetensors=b"w" * (3 << 20), chat_template__jinja=b"t", README__md=b"r",
            **SMALL, **unread)  # fmt: skip
    hub.repos[REPO][COMMIT]["original/model.safetensors"] = b"x"
    path, repo, commit, mib = locate(hub, home)
    wanted = {"config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja", "model.safetensors",
              "README.md"}  # fmt: skip
    assert {p.name for p in Path(path).rglob("*") if p.is_file()} == wanted
    assert (Path(path) / "model.safetensors").read_bytes() == b"w" * (3 << 20)
    assert (repo, commit, mib) == (REPO, COMMIT, "3")
    assert Path(path).is_relative_to(home)
    assert sorted(hub.fetched()) == sorted(wanted)
    assert locate(hub, home) == [path, REPO, COMMIT, "0"]
    assert sorted(hub.fetched()) == sorted(wanted), "what is cached is downloaded again"


def test_shards_are_those_of_the_index(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "odd.safetensors"}}
    hub.add(
        REPO, tmp_path / "none", **SMALL, model__safetensors__index__json=json.dumps(index).encode(),
        **{"odd__safetensors": b"2", "model-00001-of-00002__safetensors": b"1", "consolidated__safetensors": b"x"},
    )  # fmt: skip
    path, *_ = locate(hub, home)
    assert {p.name for p in Path(path).glob("*.safetensors")} == {"model-00001-of-00002.safetensors", "odd.safetensors"}


def test_files_of_torch_are_taken_where_there_are_no_safetensors(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    index = json.dumps({"weight_map": {"a": names[0], "b": names[1]}}).encode()
    shards = {name.replace(".", "__"): b"w" for name in names}
    hub.add(
        REPO, tmp_path / "none", **shards, config__json=b"{}", pytorch_model__bin__index__json=index, vocab__json=b"v",
        merges__txt=b"m", training_args__bin=b"x", optimizer__bin=b"x",
    )  # fmt: skip
    path, *_ = locate(hub, home)
    # Without a tokenizer.json, so are the files from which one is made.
    assert {"vocab.json", "merges.txt"} <= {p.name for p in Path(path).iterdir()}
    assert sorted(p.name for p in Path(path).glob("*.bin")) == names
    assert locate(hub, home, HF_HUB_OFFLINE="1")[0] == path
    (Path(path) / names[1]).unlink()
    assert "is not whole in" in error(hub, home, HF_HUB_OFFLINE="1")


@pytest.mark.parametrize("name", ["../../x.safetensors", "x.bin", "*.safetensors", 3])
def test_an_index_names_plain_files_only(hub: FakeHub, home: Path, tmp_path: Path, name: object) -> None:
    index = json.dumps({"weight_map": {"a": name}}).encode()
    hub.add(REPO, tmp_path / "none", **SMALL, model__safetensors__index__json=index)
    assert f"names {name!r}, which is not a .safetensors file" in error(hub, home)


def test_a_revision_is_pinned_and_a_branch_moves(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    hub.add(REPO, tmp_path / "none", model__safetensors=b"old", **SMALL)
    hub.add(REPO, tmp_path / "none", NEXT_COMMIT, model__safetensors=b"new", **SMALL)
    hub.branches[REPO, "v1"] = COMMIT
    for model, commit, data in (
        (REPO, NEXT_COMMIT, b"new"), (f"{REPO}@v1", COMMIT, b"old"), (f"{REPO}@{COMMIT}", COMMIT, b"old"),
    ):  # fmt: skip
        path, _, found, _ = locate(hub, home, model)
        assert (found, (Path(path) / "model.safetensors").read_bytes()) == (commit, data)
    assert hub.fetched().count("config.json") == 1, "files of equal ETag are one blob"


def test_a_cut_connection_goes_on_where_it_was(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    data = os.urandom(DOWNLOAD_CHUNK_SIZE + (2 << 20))  # what is less than a chunk is not kept
    hub.add(REPO, tmp_path / "none", model__safetensors=data, **SMALL)
    hub.cut["model.safetensors"] = DOWNLOAD_CHUNK_SIZE + (1 << 20)
    path, *_ = locate(hub, home)
    assert (Path(path) / "model.safetensors").read_bytes() == data
    asked = [r for method, name, r in hub.requests if method == "GET" and name.endswith("/model.safetensors")]
    assert asked == [None, f"bytes={DOWNLOAD_CHUNK_SIZE}-"]


def test_a_download_that_failed_keeps_the_files_that_are_whole(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    hub.add(REPO, tmp_path / "none", model__safetensors=b"w" * 100, **SMALL)
    hub.cut["model.safetensors"], hub.down_after_cut = 50, True
    assert error(hub, home).startswith(f"error: {hub.url} answered HTTP 503 for {REPO}: try again later")
    hub.broken, before = False, len(hub.fetched())
    path, *_ = locate(hub, home)
    assert (Path(path) / "model.safetensors").read_bytes() == b"w" * 100
    assert hub.fetched()[before:] == ["model.safetensors"]


# ---- refusals ----------------------------------------------------------------------------------------------------


def test_a_name_that_nobody_has(hub: FakeHub, home: Path) -> None:
    assert error(hub, home) == (
        f"error: {REPO} does not exist, neither here nor at {hub.url}: check the name, or, if it is private, log in "
        "with `hf auth login` or set HF_TOKEN"
    )


def test_a_revision_that_is_not_there(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    hub.add(REPO, tmp_path / "none", model__safetensors=b"w", **SMALL)
    assert error(hub, home, f"{REPO}@v9") == f"error: {REPO} has no revision v9 at {hub.url}: leave it out for main"
    assert f"has no revision {NEXT_COMMIT}" in error(hub, home, f"{REPO}@{NEXT_COMMIT}")


def test_a_gated_model_needs_a_token_that_may_read_it(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    hub.add(REPO, tmp_path / "none", model__safetensors=b"w", **SMALL)
    hub.gated.add(REPO)
    sentence = (
        f"error: {REPO} is gated: ask for access at {hub.url}/{REPO}, then log in with `hf auth login` or set HF_TOKEN"
    )
    assert error(hub, home) == sentence
    assert error(hub, home, HF_TOKEN="hf_bad") == sentence
    assert locate(hub, home, HF_TOKEN=hub.token)[2] == COMMIT


def test_offline_needs_the_cache_and_the_cache_is_enough(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    hub.add(REPO, tmp_path / "none", model__safetensors=b"w", **SMALL)
    refused = error(hub, home, HF_HUB_OFFLINE="1")
    assert refused == (
        f"error: {REPO} is not whole in {home / 'hub'}, and HF_HUB_OFFLINE forbids downloading it: unset "
        "HF_HUB_OFFLINE once"
    )
    assert hub.requests == []
    path, *_ = locate(hub, home)
    asked = len(hub.requests)
    assert locate(hub, home, HF_HUB_OFFLINE="1")[0] == path
    assert len(hub.requests) == asked
    (Path(path) / "model.safetensors").unlink()
    assert "is not whole in" in error(hub, home, HF_HUB_OFFLINE="1")


def test_without_a_network_the_cache_is_enough(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    hub.add(REPO, tmp_path / "none", model__safetensors=b"w", **SMALL)
    nowhere = "http://127.0.0.1:9"  # nobody listens there
    assert error(hub, home, HF_ENDPOINT=nowhere) == (
        f"error: {REPO} is neither here nor whole in {home / 'hub'}, and {nowhere} cannot be reached: check the name "
        "and the network"
    )
    path, *_ = locate(hub, home)
    assert locate(hub, home, HF_ENDPOINT=nowhere)[0] == path


def test_a_hub_that_is_down(hub: FakeHub, home: Path) -> None:
    hub.broken = True
    assert error(hub, home) == f"error: {hub.url} answered HTTP 503 for {REPO}: try again later"


def test_a_model_without_weights_that_llmc_reads(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    hub.add(REPO, tmp_path / "none", tf_model__h5=b"w", model__pt=b"w", **SMALL)
    assert f"{REPO} has no pytorch_model.bin: choose another repository" in error(hub, home)


def test_what_is_no_model(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    hub.add(REPO, tmp_path / "none", model__gguf=b"w")
    assert "has no config.json at its root" in error(hub, home)


def test_a_cache_that_cannot_be_written(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    hub.add(REPO, tmp_path / "none", model__safetensors=b"w", **SMALL)
    home.mkdir()
    (home / "hub").write_text("a file")
    assert error(hub, home).startswith(f"error: {REPO} cannot be kept in {home / 'hub'}: ")


def test_a_full_disk() -> None:
    sentence = r"tiny/x cannot be kept in .*: the disk is full: free space, or set HF_HOME"
    with pytest.raises(HubError, match=sentence), _sentences(HubId("tiny/x")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---- commands ----------------------------------------------------------------------------------------------------


def command(hub: FakeHub, home: Path, *arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-P", "-m", "llmc.cli.main", *map(str, arguments)]
    return subprocess.run(words, cwd=home.parent, env=environment(hub, home, **more), capture_output=True, text=True)


@pytest.mark.slow
def test_an_artifact_records_the_commit_and_is_the_same_wherever_it_was_downloaded(
    hub: FakeHub, tmp_path: Path, tiny_artifact: TinyArtifact
) -> None:
    hub.add(REPO, tiny_artifact.model)
    artifacts, cache = [], str(tiny_artifact.cache)
    for place, model in (("a", REPO), ("b", f"{REPO}@{COMMIT}")):
        out = tmp_path / place / "out"
        out.parent.mkdir()
        options = ["--buckets", TINY_LADDER, "--dtype", "f32", "--no-tokenizer", "--json"]
        result = command(hub, tmp_path / place / "hf", "compile", model, "-o", out, *options, LLMC_CACHE_DIR=cache)
        assert (result.returncode, result.stderr) == (0, "")
        assert json.loads(result.stdout)["phase_seconds"]["download"] > 0
        artifacts.append(out)
    one, other = ({p.name: p.read_bytes() for p in out.iterdir()} for out in artifacts)
    assert one == other
    assert json.loads(one["manifest.json"])["source"] == {"repo": REPO, "revision": COMMIT}
    assert str(tmp_path).encode() not in one["manifest.json"]
    assert "source" not in json.loads((tiny_artifact.artifact / "manifest.json").read_text())


@pytest.mark.slow
def test_run_downloads_and_compiles_once(
    hub: FakeHub, home: Path, tmp_path: Path, chat_artifact: Path, kernel_cache: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1, max_position_embeddings=32)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(chat_artifact / name, model / name)
    hub.add(REPO, model)
    arguments = ["run", REPO, "--prompt", "Hi", "--max-tokens", "4", "--temperature", "0", "--quiet"]
    result = command(hub, home, *arguments, LLMC_CACHE_DIR=str(kernel_cache))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("Hi")
    again = command(hub, home, *arguments, LLMC_CACHE_DIR=str(kernel_cache), HF_HUB_OFFLINE="1")
    assert (again.stdout, again.stderr) == (result.stdout, "")


def test_an_error_of_the_hub_is_one_sentence_of_the_command(hub: FakeHub, home: Path) -> None:
    for arguments in (["compile", REPO, "-o", "out"], ["quantize", REPO], ["run", REPO, "--prompt", "x"]):
        result = command(hub, home, *arguments)
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.startswith(f"llmc: error: {REPO} does not exist, neither here nor at {hub.url}")
        assert result.stderr.count("\n") == 1
    assert not (home.parent / "out").exists()


@pytest.mark.parametrize("arguments", [["serve", REPO, "--port", "0"], ["chat", REPO]])
def test_a_server_says_what_its_child_could_not_download(hub: FakeHub, home: Path, arguments: list[str]) -> None:
    result = command(hub, home, *arguments)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"llmc: error: {REPO} does not exist, neither here nor at {hub.url}")
    assert result.stderr.count("\n") == 1


def test_the_python_api_hands_the_commit_to_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = HubSource(REPO, COMMIT)
    told: list[object] = []
    monkeypatch.setattr("llmc.compiler.hub.locate", lambda model, on_mib: on_mib(1, 2) or Located(tmp_path, source))

    def compiled(path: Path, progress: object, source: HubSource) -> Path:
        told.append((path, source))
        return path

    monkeypatch.setattr(pipeline, "compile_cached", compiled)
    assert llmc.artifact_path(REPO, lambda *step: told.append(step)) == tmp_path
    assert told == [("download", 1, 2), (tmp_path, source)]


def test_a_server_calls_the_model_by_its_name_on_the_hub(tmp_path: Path) -> None:
    assert model_name(Path(f"{REPO}@v1")) == REPO
    assert model_name(tmp_path) == tmp_path.name
    link = tmp_path / "stable"
    link.symlink_to(tmp_path)
    assert model_name(link) == model_name(link / "." / "x" / "..") == "stable"


def test_what_compiles_nothing_takes_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", REPO, "--prompt", "x", "--miss-policy", "error"]) == 2
    assert f"{REPO} is not an artifact: compile it first, llmc compile {REPO} -o OUT" in capsys.readouterr().err


def test_what_serves_imports_nothing_of_the_hub() -> None:
    code = (
        "import sys, llmc.cli.serve, llmc.runtime.llm, llmc.runtime.server.app, llmc.runtime.server.run\n"
        "print(sorted({'huggingface_hub', 'llmc.compiler'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")
