"""The description of a model family."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmc.models.config import ModelConfig
from llmc.models.fields import Fields
from llmc.models.layout import LLAMA_LAYOUT
from llmc.models.mtp_layout import MtpLayout
from llmc.models.pooled import Pooled, Pooling
from llmc.models.weight_map import Shape, WeightMap

if TYPE_CHECKING:
    from llmc.models.blocks.decoder import Decoder


def build_decoder(config: ModelConfig, act_dtype: str, max_len: int) -> Decoder:
    """`Family.build` of families that consist of one `Decoder`."""
    # Imported here: reading configs and weights needs no torch.
    from llmc.models.blocks.decoder import Decoder

    return Decoder(config, act_dtype, max_len)


@dataclass(frozen=True)
class Vectors:
    """How a family's models return vectors.

    pooling: for embeddings, if the checkpoint does not say.
    classifier: the architecture in config.json of a checkpoint that scores texts. head: its layers after the decoder,
    given the number of labels.
    typed_pairs: the second text of a pair has another token type, if the model has several.
    rank_tokens: of a model that ranks by the likelier of two tokens, the better last. rank_prompt: its prompt, which
    classifiers made of such a model have, too; see `models/rank_prompts.py`.
    """

    pooling: Pooling
    classifier: str = ""
    head: Callable[[ModelConfig, Fields, int], Pooled] | None = None
    typed_pairs: bool = True
    rank_tokens: tuple[str, ...] = ()
    rank_prompt: str = ""


@dataclass(frozen=True)
class Family:
    """model_type: exactly as in config.json.
    read_config: from config.json and generation_config.json.
    build: (config, act_dtype, max_len) → a module on the default device, without values.
    harmless, neutral: keys of config.json that read_config may ignore, always or at the given value (`known_keys.py`
    has those of all families).
    other_maps: of checkpoints that store the same parameters in other tensors.
    mtp: names of its layer for multi-token prediction; None if llmc knows none.
    tower: reads, from config.json and the text model's configuration, that of the model that makes rows of its images;
    None if llmc sees no images with it. placed: the text model's configuration
    where such rows are in its texts; None if it is the same.
    generates: its models return logits unless a task asks for vectors. vectors: None if they cannot return vectors.
    """

    model_type: str
    read_config: Callable[[Fields, Fields], ModelConfig]
    weight_map: Callable[[ModelConfig], WeightMap] = LLAMA_LAYOUT.weight_map
    build: Callable[[ModelConfig, str, int], Decoder] = build_decoder
    harmless: frozenset[str] = frozenset()
    neutral: Mapping[str, Any] = field(default_factory=dict)
    other_maps: tuple[Callable[[ModelConfig], WeightMap], ...] = ()
    mtp: MtpLayout | None = None
    tower: Callable[[Fields, ModelConfig], ModelConfig] | None = None
    placed: Callable[[Fields, ModelConfig], ModelConfig] | None = None
    generates: bool = True
    vectors: Vectors | None = None

    def weight_maps(self, config: ModelConfig) -> list[WeightMap]:
        """The maps of all ways to store the parameters; `weight_map` is the last."""
        return [*(other(config) for other in self.other_maps), self.weight_map(config)]

    def unread_modules(self, config: ModelConfig) -> tuple[str, ...]:
        """Prefixes of the parts of a model that llmc does not run, in the names of all maps, sorted."""
        return tuple(sorted({module for found in self.weight_maps(config) for module in found.other_modules}))

    def weight_map_of(
        self, config: ModelConfig, shapes: Mapping[str, Shape], of_rows: Collection[str] = ()
    ) -> WeightMap:
        """The weight map of a checkpoint with tensors of these shapes. of_rows: names of matrices that are stored as
        [rows, columns], whatever the family's maps say.

        Of the maps whose names the checkpoint has, it is the first with the same shapes, else the first. Without such
        maps it is `weight_map`.
        """
        maps = [found.with_rows(of_rows) for found in self.weight_maps(config)]
        named = [found for found in maps if all(source.name in shapes for source in found.sources())]
        exact = (
            found for found in named if all(shapes[source.name] == source.stored_shape for source in found.sources())
        )
        return next(exact, named[0] if named else maps[-1])
