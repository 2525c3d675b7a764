"""Directories in Hugging Face format: config.json, files of weights and of the tokenizer."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.towers import VISION
from llmc.models.fields import Fields
from llmc.models.files import has_file
from llmc.models.known_keys import check_known
from llmc.models.mtp_layout import MtpLayout
from llmc.models.registry import family_of, get_family, with_model_type
from llmc.models.sentence_model import SENTENCE_FILES, left_to_callers
from llmc.models.sources.base import Checkpoint, ModelFiles, ModelSource
from llmc.models.sources.folder_checkpoint import FolderCheckpoint, format_of, weight_files
from llmc.models.sources.joined import JoinedCheckpoint
from llmc.models.sources.quantized import open_quantized
from llmc.models.sources.tied import head_of_its_own
from llmc.models.sources.tokenizer_files import NAMED_TEMPLATE_FILES, TokenizerFolderFiles
from llmc.models.tasks import with_task
from llmc.quantize.checkpoints import quantization_settings
from llmc.quantize.formats.base import QuantizeError

_OF_MODEL_OPTIMIZER, _OF_AUTO_GPTQ = "hf_quant_config.json", "quantize_config.json"
QUANT_FILES = (_OF_MODEL_OPTIMIZER, _OF_AUTO_GPTQ)
"""Files in which some tools state quantization; others state it in config.json."""
_SETTINGS = "quantization_config"


class _Known(Container[str]):
    """The names of a model's tensors, and all names with the prefixes of what llmc leaves out."""

    def __init__(self, names: Container[str], left_out: tuple[str, ...]) -> None:
        self._names, self._left_out = names, left_out

    def __contains__(self, name: object) -> bool:
        return name in self._names or (isinstance(name, str) and name.startswith(self._left_out))


class FolderSource(ModelSource):
    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @cached_property
    def _fields(self) -> Fields:
        return Fields.read(self.config_file)

    def _optional(self, name: str) -> Fields | None:
        """An optional JSON file."""
        return Fields.read(self.path / name) if has_file(self.path / name) else None

    @cached_property
    def _quant_config(self) -> Mapping[str, Any] | None:
        """Model Optimizer's settings beside config.json."""
        found = self._optional(_OF_MODEL_OPTIMIZER)
        return None if found is None else found.values

    @cached_property
    def _values(self) -> Mapping[str, Any]:
        """config.json, with settings from AutoGPTQ's file inserted."""
        found = None if self._fields.has(_SETTINGS) else self._optional(_OF_AUTO_GPTQ)
        if found is None:
            return self._fields.values
        return {**self._fields.values, _SETTINGS: {"quant_method": "gptq", **found.values}}

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The quantization settings in config files."""
        try:
            return quantization_settings(self._values, self._quant_config)
        except QuantizeError as error:
            raise ModelError(f"{self.path}: {error}") from None

    @property
    def is_quantized(self) -> bool:
        return self.quantization is not None

    def config(self) -> ModelConfig:
        """Reads config.json and, if present, generation_config.json."""
        return self._read_config[0]

    def ignored_config(self) -> tuple[str, ...]:
        return self._read_config[1]

    @cached_property
    def _read_config(self) -> tuple[ModelConfig, tuple[str, ...]]:
        """(configuration, sentences on what is ignored)."""
        fields = with_model_type(self._fields)
        family = family_of(fields)
        empty = Fields({}, str(self.path / "generation_config.json"))
        config = family.read_config(fields, self._optional("generation_config.json") or empty)
        config = with_task(config, fields, family, self.config_file.parent, self.task, self.pooling, self.rank_prompt)
        unread = self._fields.unread()
        ignored = check_known(self._fields.origin, unread, family, allow_unknown=self.allow_unknown_config)
        if config.task is not None and config.task.template is None:
            ignored = (*ignored, *left_to_callers(self.config_file.parent))
        if config.tie_word_embeddings and (own := self._head_of_its_own(config)) is not None:
            head, embedding = own
            untied = (
                f"{self._fields.origin}: tie_word_embeddings is true, but {head} is another matrix than {embedding}: "
                "llmc takes each as it is, as transformers does"
            )
            return replace(config, tie_word_embeddings=False), (*ignored, untied)
        return config, ignored

    def _head_of_its_own(self, config: ModelConfig) -> tuple[str, str] | None:
        """(output projection, embedding) that config.json ties and the checkpoint does not."""
        try:
            return None if format_of(self.path) is None else head_of_its_own(config, FolderCheckpoint(self.path))
        except ModelError:
            # Who reads the weights says what is wrong with them.
            return None

    @property
    def _dense_folders(self) -> tuple[str, ...]:
        """Directories with one linear layer each over the pooled row."""
        pooled = self.config().pooled
        sources = () if pooled is None else tuple(dense.source for dense in pooled.dense if dense.source)
        return tuple(source.removesuffix(".linear") for source in sources)

    def mtp_layout(self) -> MtpLayout | None:
        return get_family(self.config().model_type).mtp

    def tower_config(self) -> ModelConfig | None:
        read = get_family(self.config().model_type).tower
        if read is None:
            return None
        fields = Fields.read(self.config_file)
        config = read(fields, self.config())
        of_tower = [(name, value) for name, value in fields.unread() if name.startswith(f"{VISION}.")]
        check_known(fields.origin, of_tower, get_family(config.model_type), allow_unknown=self.allow_unknown_config)
        return config

    def placed_config(self) -> ModelConfig:
        config, placed = super().placed_config(), get_family(self.config().model_type).placed
        return config if placed is None else placed(Fields.read(self.config_file), config)

    def tower_checkpoint(self) -> Checkpoint:
        """As it is stored: tools that quantize leave towers alone."""
        return FolderCheckpoint(self.path)

    def checkpoint(self) -> Checkpoint:
        whole = self._transformer()
        behind = {name: FolderCheckpoint(self.path / name) for name in self._dense_folders}
        return JoinedCheckpoint(whole, behind) if behind else whole

    def _transformer(self) -> Checkpoint:
        if not self.is_quantized:
            return FolderCheckpoint(self.path)
        maps = get_family(self.config().model_type).weight_maps(self.config())
        targets = [target for found in maps for target in found.targets]
        sources = {source.name for target in targets for source in target.sources}
        # Most tools leave routers unquantized, and some settings do not say so.
        layers = (target for target in targets if target.is_linear)
        linears = dict.fromkeys(source.name.removesuffix(".weight") for t in layers for source in t.sources)
        left_out = {module for found in maps for module in found.other_modules}
        return open_quantized(self.path, self._values, self._quant_config, linears, _Known(sources, tuple(left_out)))

    def model_files(self) -> ModelFiles:
        return TokenizerFolderFiles(self.path)

    def weight_files(self) -> Iterator[Path]:
        """Includes config files, which define the meaning of quantized numbers."""
        for folder in (self.path, *(self.path / name for name in self._dense_folders)):
            yield from weight_files(folder)
        if self.is_quantized:
            files = (self.path / name for name in ("config.json", *QUANT_FILES))
            yield from (file for file in files if file.is_file())

    def all_files(self) -> Iterator[Path]:
        yield from (file for file in sorted(self.path.iterdir()) if file.is_file())
        for pattern in (*SENTENCE_FILES, NAMED_TEMPLATE_FILES):
            yield from (file for file in sorted(self.path.glob(pattern)) if file.is_file())
