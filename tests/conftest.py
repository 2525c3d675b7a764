"""Shared fixtures."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from support import verified
from support.artifacts import CHAT_TEMPLATE, TINY_LADDER, TinyArtifact, made_once, shared
from support.paths import ROOT

if TYPE_CHECKING:
    from llmc.runtime.binding import Artifact

# Where `bench` is found. At the end: in front, the folders of the repository would hide installed packages.
sys.path.append(str(ROOT))
# A shell lets what it starts in the background ignore Ctrl-C, and children inherit it; some tests interrupt theirs.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A deadline is a timed assertion: it fails on a busy machine.
settings.register_profile("llmc", deadline=None)
settings.load_profile("llmc")

# Several workers share the cores, and the models are too small for a second thread of torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The collector is meant for programs of few objects: here it would look through those of ten thousand tests, of torch
# and of TVM again and again, for up to half of the time of tests that make many.
gc.set_threshold(50_000, 20, 50)

# The files that take longest, the longest first: the worker that gets one last would be waited for.
LONGEST = (
    "run_process", "readme", "base_install", "server_load", "example_model", "families", "server_process",
    "page_browser", "quant_kernels", "server_fuzz", "adapter_models", "router", "affine", "levels", "kernels_attention",
    "processes", "report_pages", "compile_workers", "floats", "cuda_target", "opencl_target",
    "device_conformance", "tensor_parallel", "parity", "amx_kernels", "quantized_checkpoints", "page", "stages",
    "tuning", "kernels", "failover", "cache_keys", "generic_kernels", "background", "tensor_cores", "quant_models",
    "hub", "opencl_engine", "gguf_models", "calibration", "models_page", "kv_cache", "experts", "adding_a_format",
    "ir_helpers", "quantize_command", "loadgen", "kv_helpers",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--wheel", type=Path, help="Wheel for tests/install/test_base_install.py; default: one built of this tree."
    )
    parser.addoption("--verified", type=Path, help="Write what the collected tests verify of models there, as JSON.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish(session: pytest.Session) -> None:
    file: Path | None = session.config.getoption("--verified")
    if file is not None:
        verified.record(session.items, file)
    keep_what_there_is()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        keep_what_there_is()
    return result


def keep_what_there_is() -> None:
    """What has been imported, collected and made for the whole run is not looked through again: it stays."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test that declares what it verifies has done so."""
    verified.forget()
    result = yield
    for claim in verified.missing(item):
        pytest.fail(f"{item.nodeid} declares {claim}, which it has not checked")
    return result


@pytest.fixture(scope="session")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> TinyArtifact:
    # Imported here: most tests need neither torch nor the compiler.
    from support.compiled import compile_tiny
    from support.tiny_models import make_tiny_model

    def make(root: Path) -> None:
        model = make_tiny_model(root / "model", "llama", num_hidden_layers=2)
        compile_tiny(model, root / "artifact", root / "cache", buckets=TINY_LADDER, dtype="f32").close()

    root = made_once(tmp_path_factory, "tiny", make)
    return TinyArtifact(root / "model", root / "artifact", root / "cache")


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One kernel cache for the models of all workers: most of their kernels are the same."""
    return shared(tmp_path_factory) / "kernel-cache"


@pytest.fixture(scope="session")
def quirky_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for models of support.quirky_model.Quirky alone: a key says the architecture, and no test's classes."""
    return shared(tmp_path_factory) / "quirky-cache"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> tuple[Path, Artifact]:
    """A model with blocks of 16 tokens and several graphs of each phase."""
    from llmc.runtime.binding import Artifact

    from support.compiled import compile_tiny
    from support.engine_driver import MIXED_LADDER
    from support.tiny_models import make_tiny_model

    def make(root: Path) -> None:
        model = make_tiny_model(root / "model", "llama")
        compile_tiny(model, root / "artifact", kernel_cache, buckets=MIXED_LADDER, dtype="f32", block_size=16).close()

    root = made_once(tmp_path_factory, "llama", make)
    return root / "model", Artifact(root / "artifact")


@pytest.fixture(scope="session")
def holed(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    """A model whose blocks hold 16 tokens, with no decode graph for three sequences of more than one block. Copy before
    changing."""
    from support.compiled import compile_tiny
    from support.tiny_models import make_tiny_model

    def make(root: Path) -> None:
        model = make_tiny_model(root / "model", "llama")
        ladder = root / "ladder.json"
        ladder.write_text(json.dumps({"prefill": [[1, 64], [4, 64]], "decode": [[4, 16], [2, 64]]}))
        compile_tiny(model, root / "artifact", kernel_cache, buckets=str(ladder), dtype="f32", block_size=16).close()

    return made_once(tmp_path_factory, "holed", make) / "artifact"


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> tuple[Path, Path]:
    """A BERT with the files of sentence-transformers, mean of all tokens, and its artifact."""
    from support.compiled import compile_tiny
    from support.tiny_encoders import make_encoder, save_sentence_files

    def make(root: Path) -> None:
        model = make_encoder(root / "model", "bert")
        save_sentence_files(model, "mean_tokens", normalised=True)
        compile_tiny(model, root / "artifact", kernel_cache, buckets="prefill=[1,4]x[32,64]").close()

    root = made_once(tmp_path_factory, "embedder", make)
    return root / "model", root / "artifact"


@pytest.fixture(scope="session")
def ranker(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> tuple[Path, Path]:
    """A BERT of one label, and its artifact."""
    from support.compiled import compile_tiny
    from support.tiny_encoders import make_encoder

    def make(root: Path) -> None:
        model = make_encoder(root / "model", "bert", labels=1)
        compile_tiny(model, root / "artifact", kernel_cache, buckets="prefill=2x64").close()

    root = made_once(tmp_path_factory, "ranker", make)
    return root / "model", root / "artifact"


@pytest.fixture
def it_goes_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every attack on the fixture `server` it is there, healthy, and answers as before."""
    yield
    if "server" in request.fixturenames:
        from support.attacks import check_alive

        check_alive(request.getfixturevalue("server"))


@pytest.fixture(scope="session")
def chat_artifact(tiny_artifact: TinyArtifact, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny artifact with a tokenizer whose tokens are bytes, and a chat template. Copy before changing."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    path = tmp_path_factory.mktemp("chat") / "artifact"
    shutil.copytree(tiny_artifact.artifact, path)
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *sorted(ByteLevel.alphabet())])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def english_artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    """examples/tiny-english, compiled for 16 sequences, with a chat template. Copy before changing."""
    from support.compiled import compile_tiny

    def make(root: Path) -> None:
        model = ROOT / "examples" / "tiny-english"
        ladder = "prefill=[1,4]x[32,128,512],decode=[1,4,16]x[128,512]"
        compile_tiny(model, root / "artifact", kernel_cache, buckets=ladder, max_num_seqs=16).close()
        (root / "artifact" / "chat_template.jinja").write_text(CHAT_TEMPLATE)

    return made_once(tmp_path_factory, "english", make) / "artifact"
