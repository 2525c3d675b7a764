"""Shared fixtures."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from llmc.runtime.binding import Artifact

# Where `bench` is found. At the end: in front, the folders of the repository would hide installed packages.
sys.path.append(str(Path(__file__).resolve().parent.parent))
# A shell lets what it starts in the background ignore Ctrl-C, and children inherit it; some tests interrupt theirs.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A deadline is a timed assertion: it fails on a busy machine.
settings.register_profile("llmc", deadline=None)
settings.load_profile("llmc")

TINY_LADDER = "prefill=[1,2]x[16,32],decode=[1,2]x[64]"


@dataclass(frozen=True)
class TinyArtifact:
    """A compiled tiny model, the checkpoint it came from and the cache that has its kernels. Copy before changing."""

    model: Path
    artifact: Path
    cache: Path


@pytest.fixture(scope="session")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> TinyArtifact:
    # Imported here: most tests need neither torch nor the compiler.
    from compiled import compile_tiny
    from tiny_models import make_tiny_model

    root = tmp_path_factory.mktemp("tiny")
    model = make_tiny_model(root / "model", "llama", num_hidden_layers=2)
    compile_tiny(model, root / "artifact", root / "cache", buckets=TINY_LADDER, dtype="f32").close()
    return TinyArtifact(model, root / "artifact", root / "cache")


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One kernel cache for the engine's models: most of their kernels are the same."""
    return tmp_path_factory.mktemp("kernel-cache")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> tuple[Path, Artifact]:
    """A model with blocks of 16 tokens and several graphs of each phase."""
    from compiled import compile_tiny
    from engine_driver import MIXED_LADDER
    from tiny_models import make_tiny_model

    root = tmp_path_factory.mktemp("llama")
    model = make_tiny_model(root / "model", "llama")
    return model, compile_tiny(model, root / "artifact", kernel_cache, buckets=MIXED_LADDER, dtype="f32", block_size=16)


@pytest.fixture(scope="session")
def holed(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    """A model whose blocks hold 16 tokens, with no decode graph for three sequences of more than one block. Copy before
    changing."""
    from compiled import compile_tiny
    from tiny_models import make_tiny_model

    root = tmp_path_factory.mktemp("holed")
    model = make_tiny_model(root / "model", "llama")
    ladder = root / "ladder.json"
    ladder.write_text(json.dumps({"prefill": [[1, 64], [4, 64]], "decode": [[4, 16], [2, 64]]}))
    compile_tiny(model, root / "artifact", kernel_cache, buckets=str(ladder), dtype="f32", block_size=16).close()
    return root / "artifact"


@pytest.fixture
def it_goes_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every attack on the fixture `server` it is there, healthy, and answers as before."""
    yield
    if "server" in request.fixturenames:
        from attacks import check_alive

        check_alive(request.getfixturevalue("server"))


CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools | length }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


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
    from compiled import compile_tiny

    root = tmp_path_factory.mktemp("english")
    model = Path(__file__).resolve().parent.parent / "examples" / "tiny-english"
    ladder = "prefill=[1,4]x[32,128,512],decode=[1,4,16]x[128,512]"
    compile_tiny(model, root / "artifact", kernel_cache, buckets=ladder, max_num_seqs=16).close()
    (root / "artifact" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return root / "artifact"
