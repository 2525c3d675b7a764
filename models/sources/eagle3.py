"""The directory of an EAGLE-3 head: the head, and its model as graphs that leave what the head reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from llmc.models.brief import brief
from llmc.models.config import ModelConfig
from llmc.models.convert import Array
from llmc.models.draft_vocab import places_of
from llmc.models.errors import ModelError
from llmc.models.families.eagle import OF_MODEL
from llmc.models.families.eagle3 import ARCHITECTURES, EAGLE_3
from llmc.models.families.llama import LLAMA
from llmc.models.fields import Fields
from llmc.models.known_keys import check_known
from llmc.models.layout import STATES_FC
from llmc.models.loader import check_checkpoint
from llmc.models.sources.base import Checkpoint, ModelFiles, ModelSource
from llmc.models.sources.folder_checkpoint import FolderCheckpoint, weight_files
from llmc.models.sources.head import HeadSource
from llmc.models.sources.joined import JoinedCheckpoint
from llmc.models.sources.placed import PlacedCheckpoint
from llmc.models.weight_map import WeightMap

_NESTED = "transformer_layer_config"
_IDS = "eagle_aux_hidden_state_layer_ids"
_EMBEDDING = "embed_tokens.weight"


def is_eagle_3(fields: Fields) -> bool:
    """Whether a config.json is that of an EAGLE-3 head."""
    named = fields.raw("architectures", [])
    known = isinstance(named, list) and any(isinstance(name, str) and name in ARCHITECTURES for name in named)
    return known or any(fields.has(name) for name in ("draft_vocab_size", "eagle_config", "target_hidden_size"))


@dataclass(frozen=True)
class Eagle3Head:
    """A head's configuration, checked against its model's.

    own: of the head. layers: see `ModelConfig.states_layers`. ignored: sentences on unknown fields.
    """

    own: ModelConfig
    layers: tuple[int, ...]
    ignored: tuple[str, ...]

    @classmethod
    def read(cls, path: Path, model: ModelSource) -> Eagle3Head:
        """Reads the config.json of a head for `model`. Raises ModelError for one that does not fit."""
        fields, of_model = Fields.read(path / "config.json"), model.config()
        if of_model.pooled is not None or of_model.typed_inputs or of_model.streams is not None:
            raise ModelError(
                f"{model.path} is not a model that a head of EAGLE-3 guesses for: such a model writes text, and its "
                "layers pass on one hidden vector per token; leave out --eagle"
            )
        layer = fields
        if fields.has(_NESTED):
            table = fields.raw(_NESTED)
            layer = Fields(table if isinstance(table, dict) else {}, f"{fields.origin}: {_NESTED}")
        model_type = layer.text("model_type")
        if model_type != LLAMA.model_type:
            raise ModelError(
                f"{layer.origin} has a layer of {brief(model_type)}, but llmc has heads of EAGLE-3 with a layer of "
                "llama only; give another head, or a smaller model as --draft"
            )
        own = LLAMA.read_config(layer, Fields({}, layer.origin))
        if own.num_layers != 1:
            raise ModelError(
                f"{layer.origin}: the head has {own.num_layers} layers, but llmc has heads of EAGLE-3 with one only; "
                "give another head, or a smaller model as --draft"
            )
        _check_fits(fields, own, of_model, model.path)
        tokens = fields.integer("draft_vocab_size", own.vocab_size)
        if tokens > own.vocab_size:
            raise ModelError(
                f"{fields.origin}: draft_vocab_size is {tokens}, more than the {own.vocab_size} tokens of the model; "
                "download it again"
            )
        config = replace(
            own,
            model_type=EAGLE_3.model_type,
            states="taken",
            first_norm=False,
            tie_word_embeddings=False,
            draft_vocab_size=tokens if tokens < own.vocab_size else 0,
            normed_states=fields.flag("norm_before_residual", False),
            eos_token_ids=of_model.eos_token_ids,
            bos_token_id=of_model.bos_token_id,
            dtype=of_model.dtype,
        )
        layers = _layers(fields, of_model.num_layers, model.path)
        unread = [*fields.unread(), *(layer.unread() if layer is not fields else ())]
        ignored = check_known(fields.origin, unread, EAGLE_3, allow_unknown=model.allow_unknown_config)
        return cls(config, layers, ignored)


def _check_fits(fields: Fields, own: ModelConfig, model: ModelConfig, path: Path) -> None:
    width = fields.integer("target_hidden_size", own.hidden_size)
    named = "target_hidden_size" if fields.has("target_hidden_size") else "hidden_size"
    for name, found, wanted in (
        (named, width, model.hidden_size),
        ("vocab_size", own.vocab_size, model.vocab_size),
    ):
        if found != wanted:
            of = "hidden_size" if name == named else name
            raise ModelError(
                f"{fields.origin}: {name} is {found}, but {of} of {path} is {wanted}; give the model that the head was "
                "made for"
            )


def _layers(fields: Fields, count: int, path: Path) -> tuple[int, ...]:
    """The layers of a model of `count` layers whose inputs the head reads.

    At the top of config.json, layers are named by their inputs; in eagle_config, by their outputs.
    """
    table = fields.table("eagle_config")
    if fields.has(_IDS):
        named = fields.integers(_IDS)
    elif table is not None and table.has(_IDS):
        named = tuple(number + 1 for number in table.integers(_IDS))
    else:
        named = ()
    layers = named or tuple(sorted((2, count // 2, count - 3)))
    # `fc` has columns for them in this order.
    if list(layers) != sorted(set(layers)) or layers[-1] > count or layers[0] < 0:
        listed = ", ".join(map(str, layers))
        raise ModelError(
            f"{path} has {count} layers, but the head at {fields.origin} reads what is left behind {listed} of them; "
            "give the model that the head was made for"
        )
    return layers


class Eagle3Source(HeadSource):
    """The head at `path`. model: the one that it drafts for, as it is compiled."""

    @cached_property
    def _head(self) -> Eagle3Head:
        return Eagle3Head.read(self.path, self._model)

    def config(self) -> ModelConfig:
        return self._head.own

    def ignored_config(self) -> tuple[str, ...]:
        return self._head.ignored

    def checkpoint(self) -> Checkpoint:
        return _HeadCheckpoint(FolderCheckpoint(self.path), self.config(), self._model)


class _HeadCheckpoint(PlacedCheckpoint):
    """The tensors of a head, with the places of tokens, and the model's embedding if the head has none."""

    def __init__(self, head: FolderCheckpoint, config: ModelConfig, model: ModelSource) -> None:
        self._embedding: str | None = None
        parts: dict[str, Checkpoint] = {}
        if _EMBEDDING not in head.names():
            of_model = model.checkpoint()
            parts[OF_MODEL], self._embedding = of_model, _embedding_of(model, of_model)
        super().__init__(head, parts, _places(head, config) if config.draft_vocab_size else None)

    def _at(self, name: str) -> tuple[Checkpoint, str]:
        checkpoint, own = super()._at(name)
        return (checkpoint, self._embedding or own) if checkpoint is not self._whole else (checkpoint, own)

    def names(self) -> tuple[str, ...]:
        others = (name for name in super().names() if not name.startswith(f"{OF_MODEL}."))
        shared = (f"{OF_MODEL}.embed.weight",) if self._embedding is not None else ()
        return tuple(sorted((*others, *shared)))


def _embedding_of(model: ModelSource, checkpoint: Checkpoint) -> str:
    """The name of the model's embedding. Raises ModelError unless it is one tensor as the head reads it."""
    for target in check_checkpoint(model.config(), checkpoint).targets:
        if target.name == "embed.weight" and len(target.sources) == 1 and target.sources[0].stored is None:
            return target.sources[0].name
    raise ModelError(
        f"{model.path} has embed.weight in pieces or in another order, which a head cannot share yet; give a head with "
        "an embedding of its own"
    )


def _places(head: FolderCheckpoint, config: ModelConfig) -> Array:
    """For each token of the model its place in the head's vocabulary, or −1: float32 [vocab_size]."""
    again = "download the checkpoint again"
    found = head.stored_tensors().get("d2t")
    count, vocab = config.draft_vocab_size, config.vocab_size
    if found is None or found.dtype not in ("I64", "I32") or found.shape != (count,):
        raise ModelError(f"{head.path} lacks the tensor d2t of {count} integers, which names its tokens; {again}")
    tokens = found.load().astype(np.int64) + np.arange(count)
    if tokens.min() < 0 or tokens.max() >= vocab or len(np.unique(tokens)) < count:
        raise ModelError(
            f"{head.path}: d2t does not name {count} different tokens below {vocab}, the model's number; {again}"
        )
    return places_of(tokens, vocab)


class LeavingSource(ModelSource):
    """A model whose graphs leave the states that the head at `head` reads."""

    def __init__(self, model: ModelSource, head: Path) -> None:
        super().__init__(
            model.path,
            allow_unknown_config=model.allow_unknown_config,
            task=model.task,
            pooling=model.pooling,
            rank_prompt=model.rank_prompt,
        )
        self._model, self._head = model, head

    @cached_property
    def _config(self) -> ModelConfig:
        head = Eagle3Head.read(self._head, self._model)
        found = self._model.config()
        return replace(found, states="left", states_layers=head.layers, states_size=head.own.hidden_size)

    def config(self) -> ModelConfig:
        return self._config

    def ignored_config(self) -> tuple[str, ...]:
        return self._model.ignored_config()

    @property
    def is_quantized(self) -> bool:
        return self._model.is_quantized

    def check_adapters(self) -> None:
        self._model.check_adapters()

    def checkpoint(self) -> Checkpoint:
        return _LeavingCheckpoint(self._model.checkpoint(), FolderCheckpoint(self._head))

    def model_files(self) -> ModelFiles:
        return self._model.model_files()

    def weight_files(self) -> Iterator[Path]:
        yield from self._model.weight_files()
        yield from weight_files(self._head)

    def all_files(self) -> Iterator[Path]:
        yield from self._model.all_files()
        yield from (file for file in sorted(self._head.iterdir()) if file.is_file())


class _LeavingCheckpoint(JoinedCheckpoint):
    """The tensors of a model, with the head's matrix that its graphs read."""

    def __init__(self, model: Checkpoint, head: Checkpoint) -> None:
        super().__init__(model, {STATES_FC.partition(".")[0]: head})

    def weight_map(self, config: ModelConfig) -> WeightMap | None:
        return self._whole.weight_map(config)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted((*self._whole.names(), STATES_FC)))
