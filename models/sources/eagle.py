"""The directory of an EAGLE-1 or EAGLE-2 head, opened together with the model that it drafts for."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.eagle import EAGLE, OF_MODEL
from llmc.models.fields import Fields
from llmc.models.known_keys import check_known
from llmc.models.loader import check_checkpoint
from llmc.models.registry import get_family
from llmc.models.sources.base import Checkpoint
from llmc.models.sources.folder_checkpoint import FolderCheckpoint
from llmc.models.sources.head import HeadSource
from llmc.models.sources.joined import JoinedCheckpoint

_MATRICES = ("embed.weight", "lm_head.weight")


class _HeadCheckpoint(JoinedCheckpoint):
    """The tensors of a head, with the matrices that it shares with its model. shared: their names in the model."""

    def __init__(self, head: Checkpoint, model: Checkpoint, shared: dict[str, str]) -> None:
        super().__init__(head, {OF_MODEL: model})
        self._shared = shared

    def _at(self, name: str) -> tuple[Checkpoint, str]:
        checkpoint, own = super()._at(name)
        return (checkpoint, self._shared[own]) if checkpoint is not self._whole else (checkpoint, own)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted((*self._whole.names(), *(f"{OF_MODEL}.{name}" for name in self._shared))))


class EagleSource(HeadSource):
    """model: the model that the head at `path` drafts for, as it is compiled."""

    def config(self) -> ModelConfig:
        return self._read_config[0]

    def ignored_config(self) -> tuple[str, ...]:
        return self._read_config[1]

    @cached_property
    def _read_config(self) -> tuple[ModelConfig, tuple[str, ...]]:
        """(configuration: its own, completed by the model's; ignored fields)."""
        fields, model = Fields.read(self.path / "config.json"), self._model.config()
        family = get_family(fields.text("model_type"))
        own = family.read_config(fields, Fields({}, fields.origin))
        if model.pooled is not None or model.head_bias or model.normed_head or model.typed_inputs:
            raise ModelError(
                f"{self._model.path} is not a model that an EAGLE head guesses for: such a model writes text, and its "
                "logits are a product with one matrix; leave out --eagle"
            )
        for name in ("hidden_size", "vocab_size"):
            found, wanted = getattr(own, name), getattr(model, name)
            if found != wanted:
                raise ModelError(
                    f"{fields.origin}: {name} is {found}, but that of {self._model.path} is {wanted}; give the model "
                    "that the head was made for"
                )
        config = replace(
            own,
            model_type=EAGLE.model_type,
            states="taken",
            fc_bias=fields.flag("bias", True),
            first_norm=False,
            tie_word_embeddings=model.tie_word_embeddings,
            logit_multiplier=model.logit_multiplier,
            logit_cap=model.logit_cap,
            eos_token_ids=model.eos_token_ids,
            bos_token_id=model.bos_token_id,
            dtype=model.dtype,
        )
        allowed = self.allow_unknown_config
        return config, check_known(fields.origin, fields.unread(), family, allow_unknown=allowed)

    def checkpoint(self) -> Checkpoint:
        head, model = FolderCheckpoint(self.path), self._model.checkpoint()
        shared = {}
        for target in check_checkpoint(self._model.config(), model).targets:
            if target.name in _MATRICES:
                if len(target.sources) != 1 or target.sources[0].stored is not None or target.rows is not None:
                    raise ModelError(
                        f"{self._model.path} has {target.name} in pieces or in another order, which a head cannot "
                        "share yet; leave out --eagle"
                    )
                shared[target.name] = target.sources[0].name
        return _HeadCheckpoint(head, model, shared)
