"""Downloads models from the Hugging Face hub into its cache, which other tools share.

huggingface_hub does the work and reads its environment: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT.
Only files that the compiler and runtime read are fetched: torch's own files of weights only if there are no
safetensors.
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.compiler.config import HubSource
from llmc.compiler.store.output import COPIED_FILES
from llmc.distribution import NAME
from llmc.hub_id import HubId, hub_id
from llmc.models.rank_prompts import MODEL_CARD
from llmc.models.sentence_model import MODULES, SENTENCE_FILES
from llmc.models.sources.byte_pair_files import BYTE_PAIR_FILES
from llmc.models.sources.folder import QUANT_FILES
from llmc.models.sources.folder_checkpoint import SAFETENSORS, TORCH, WeightFormat, is_shard_name
from llmc.models.sources.tokenizer_files import NAMED_TEMPLATE_FILES, TOKENIZER_SOURCES
from llmc.version import __version__

_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_SMALL_FILES = (
    _CONFIG, *QUANT_FILES, *COPIED_FILES, *TOKENIZER_SOURCES, NAMED_TEMPLATE_FILES, MODULES, *SENTENCE_FILES,
    MODEL_CARD, SAFETENSORS.index, TORCH.index,
)  # fmt: skip
"""Names and patterns of files that are fetched before the weights."""
_OF_SENTENCES = (f"*_Dense/{TORCH.single}",)
_MIB = 1 << 20
OnMib = Callable[[int, int], None]
"""Called with MiB on disk and MiB known to be needed; both grow as files are found."""


def _silent(done: int, total: int) -> None:
    """An OnMib that shows nothing."""


class HubError(Exception):
    """A hub model cannot be obtained; the message is one sentence."""


@dataclass(frozen=True)
class Located:
    """A model directory. source: the hub commit that it holds; None for the user's own directory."""

    path: Path
    source: HubSource | None = None


def locate(model: str | Path, on_mib: OnMib = _silent) -> Located:
    """The directory of `model`: itself, or the hub model of that name, downloaded unless cached.

    Broken connections resume; complete files are kept if a download fails. Raises HubError.
    """
    wanted = hub_id(model)
    return Located(Path(model)) if wanted is None else download(wanted, on_mib)


def download(model: HubId, on_mib: OnMib = _silent) -> Located:
    """The complete snapshot of one commit in the hub's cache. Raises HubError."""
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.utils import logging
        from huggingface_hub.utils.tqdm import tqdm
    except ImportError:
        from llmc.distribution import install_compiler

        raise HubError(
            f"{model} is not on this machine, and downloading it needs huggingface_hub, which is not installed: "
            f"{install_compiler()}"
        ) from None
    # Any failure is reported once, in one sentence.
    if "HF_HUB_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()

    def fetch(revision: str | None, names: Iterable[str]) -> Path:
        with _sentences(model):
            return Path(
                snapshot_download(
                    model.repo,
                    revision=revision,
                    allow_patterns=sorted(names),
                    library_name=NAME,
                    library_version=__version__,
                    tqdm_class=_bars(tqdm, on_mib),
                )
            )

    # The small files determine the commit; the weights come from the same one.
    folder = fetch(model.revision, _SMALL_FILES)
    commit = folder.name
    if not (folder / _CONFIG).is_file():
        raise HubError(
            f"{model} has no {_CONFIG} at its root, so transformers cannot read it: choose another repository"
        )
    more = () if (folder / _TOKENIZER).is_file() else BYTE_PAIR_FILES
    # Where there are safetensors, the same weights in torch's files are left alone.
    formats = (SAFETENSORS,) if (folder / SAFETENSORS.index).is_file() else (SAFETENSORS, TORCH)
    missing: list[str] = []
    for one in formats:
        weights = _weight_files(folder, model, one)
        folder = fetch(
            commit, (*_SMALL_FILES, *more, *weights, *(_OF_SENTENCES if one is TORCH or _lacks_dense(folder) else ()))
        )
        missing = [name for name in weights if not (folder / name).is_file()]
        if not missing:
            return Located(folder, HubSource(model.repo, commit))
    # Offline, some client versions take the cached part of a commit for all of it.
    if constants.HF_HUB_OFFLINE:
        raise _not_cached(model, None)
    raise HubError(f"{model} has no {missing[0]}: choose another repository")


def _lacks_dense(folder: Path) -> bool:
    """Whether a layer of a sentence model has no safetensors."""
    return any(not (layer / SAFETENSORS.single).is_file() for layer in folder.glob("*_Dense"))


def _weight_files(folder: Path, model: HubId, of: WeightFormat) -> tuple[str, ...]:
    """Names of the files with tensors; the index is untrusted. Raises HubError."""
    try:
        table = json.loads((folder / of.index).read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(table.values()))
    except FileNotFoundError:
        return (of.single,)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise HubError(f"{of.index} of {model} is not an index of tensors: choose another revision") from None
    for name in names:
        if not is_shard_name(name, of) or set(name) & set("*?["):
            raise HubError(
                f"{of.index} of {model} names {name!r}, which is not a {of.suffix} file: choose another repository"
            )
    return tuple(names)


@contextmanager
def _sentences(model: HubId) -> Iterator[None]:
    """Turns exceptions of the hub's client into HubError."""
    from huggingface_hub import constants, errors

    endpoint, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{model.repo} is gated: ask for access at {endpoint}/{model.repo}, then log in with `hf auth login` or "
            "set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{model.repo} has no revision {model.revision} at {endpoint}: leave it out for main") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{model.repo} does not exist, neither here nor at {endpoint}: check the name, or, if it is private, log "
            "in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise _not_cached(model, error.__cause__) from error
    except errors.HfHubHTTPError as error:
        raise _refused(model, error) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = "the disk is full: free space, or set HF_HOME to a directory with more"
        elif error.errno is not None:
            why = f"{error.strerror}: set HF_HOME to a directory that you may write"
        else:
            raise _broke_off(model, error) from error
        raise HubError(f"{model} cannot be kept in {cache}: {why}") from error
    except Exception as error:  # the client's HTTP library raises its own, which differ by version
        raise _broke_off(model, error) from error


def _not_cached(model: HubId, cause: BaseException | None) -> HubError:
    from huggingface_hub import constants, errors

    endpoint, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    if constants.HF_HUB_OFFLINE or isinstance(cause, errors.OfflineModeIsEnabled):
        return HubError(
            f"{model} is not whole in {cache}, and HF_HUB_OFFLINE forbids downloading it: unset HF_HUB_OFFLINE once"
        )
    if isinstance(cause, errors.HfHubHTTPError):
        return _refused(model, cause)
    return HubError(
        f"{model} is neither here nor whole in {cache}, and {endpoint} cannot be reached: check the name and the "
        "network"
    )


def _refused(model: HubId, error: Any) -> HubError:
    from huggingface_hub import constants

    endpoint, status = constants.ENDPOINT, error.response.status_code
    if status in (401, 403):
        return HubError(
            f"{endpoint} refuses {model} (HTTP {status}): log in with `hf auth login` or set HF_TOKEN to a token that "
            "may read it"
        )
    return HubError(f"{endpoint} answered HTTP {status} for {model}: try again later")


def _broke_off(model: HubId, error: Exception) -> HubError:
    text = " ".join(str(error).split()) or type(error).__name__
    return HubError(
        f"the download of {model} broke off ({text[:200]}): run the same command again, files that are whole are kept"
    )


def _bars(base: type, on_mib: OnMib) -> type:
    """A replacement for the client's progress bars: calls `on_mib` and draws nothing."""
    most = 0

    class Bars(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": False, "file": io.StringIO()})

        def display(self, *args: Any, **options: Any) -> None:
            pass

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.n > most:
                most = int(self.n)
                total = max(int(self.total or 0), most)
                on_mib(most // _MIB, max(1, total // _MIB))
            return shown

    return Bars
