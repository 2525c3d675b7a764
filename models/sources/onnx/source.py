"""A model as an ONNX graph: recovers configuration and weights from what the graph computes.

docs/onnx.md explains it. TVM imports the graph with small inputs (`importer.py`). Values are tracked as combinations of
elements of each token's row (`evaluate.py`). Layers are read off the output (`structure.py`), then configuration and
weight locations off the layers (`recover.py`). Anything unexplained is refused, naming its node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmc.models.brief import brief
from llmc.models.config import ModelConfig
from llmc.models.convert import DTYPES
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.files import has_file
from llmc.models.pooled import Pooled, Task
from llmc.models.rope_fields import read_rope
from llmc.models.rotary import Rope
from llmc.models.sentence_model import MODULES, SENTENCE_FILES, SentenceModel, left_to_callers, read_sentence_model
from llmc.models.sources.base import Checkpoint, ModelFiles, ModelSource
from llmc.models.sources.onnx.file import SENTENCE, OnnxFile
from llmc.models.sources.onnx.probe import TOKENS, Probe, fixed_tokens, probe_inputs
from llmc.models.sources.tokenizer_files import NAMED_TEMPLATE_FILES, TokenizerFolderFiles
from llmc.models.standard import special_tokens
from llmc.models.tasks import labels_of, scoring_task, with_pooling, with_rank_prompt
from llmc.tvm_import import import_tvm

if TYPE_CHECKING:
    from llmc.models.sources.onnx.recover import Recovered
    from llmc.models.sources.onnx.rows import Rows

_SUBFOLDER = "onnx"
"""Subfolder of hub models, whose other files are one level up."""
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_BESIDE = (".json", ".model", ".jinja", ".txt", ".tiktoken")
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""Families' names for the longest text in tokens."""
_PROBE = Probe(batch=2, tokens=3, past=1, padded=True)
_FAR, _FAR_AT_ONCE, _MOST_AT_ONCE = 8190, 1026, 4098
"""Tokens of the second import of a graph, which reveals sliding windows: tokens in the cache, or of a text without a
cache, whose mask grows quadratically; and the most tokens of such a text."""
_OUTPUTS = ("logits", "last_hidden_state", "token_embeddings")
Kind = Literal["logits", "rows", "labels"]


@dataclass(frozen=True)
class _Known:
    kind: Kind
    labels: int
    recovered: Recovered


class OnnxSource(ModelSource):
    """path: of the .onnx file."""

    @cached_property
    def _file(self) -> OnnxFile:
        return OnnxFile(self.path)

    @cached_property
    def _folder(self) -> Path:
        """The folder of config.json and the tokenizer."""
        own = self.path.parent
        beside = any(has_file(own / name) for name in (_CONFIG, "tokenizer.json"))
        return own.parent if own.name == _SUBFOLDER and not beside else own

    @cached_property
    def _sentence_folder(self) -> Path:
        """The folder of the files of sentence-transformers. They may lie above a graph that has its own config.json."""
        folder, above = self._folder, self.path.parent.parent
        is_below = self.path.parent.name == _SUBFOLDER and not has_file(folder / MODULES)
        return above if is_below and has_file(above / MODULES) else folder

    def _fields(self, name: str) -> Fields:
        path = self._folder / name
        return Fields.read(path) if has_file(path) else Fields({}, str(path))

    @cached_property
    def _config_fields(self) -> Fields:
        return self._fields(_CONFIG)

    @cached_property
    def _known(self) -> _Known:
        try:
            return self._recognised()
        except ModelError as error:
            shape = fixed_tokens(self._file)
            if shape is None:
                raise
            raise ModelError(
                f"{self.path}: its input {TOKENS} has the fixed shape {shape}, which llmc cannot vary; export the "
                "model with dynamic axes (dynamic_axes or dynamic_shapes of torch.onnx.export)"
            ) from error

    def _recognised(self) -> _Known:
        import_tvm()
        from llmc.models.sources.onnx.evaluate import BROKEN, Evaluation
        from llmc.models.sources.onnx.fused import has_fused_attention
        from llmc.models.sources.onnx.importer import Imported, matrices_of
        from llmc.models.sources.onnx.recover import Stated, Types, Unstated, recover
        from llmc.models.sources.onnx.rows import Rows, Unrecognised
        from llmc.models.sources.onnx.structure import read_structure

        file = self._file
        probe = replace(_PROBE, padded=not has_fused_attention(file))
        inputs, matrices = probe_inputs(file, probe), matrices_of(file)
        imported = Imported(file, inputs, matrices)
        evaluation = Evaluation(file, imported)
        name = next((name for name in (*_OUTPUTS, *imported.outputs) if name in imported.outputs), None)
        value = None if name is None else evaluation.output(name)
        if not isinstance(value, Rows):
            raise ModelError(f"{self.path} has no output that is one row for each token or text; export it again")
        try:
            kind = _kind(name, value, inputs.probe)
            structure = read_structure(value.flat, inputs.probe, kind)
            max_len = self._max_len()
            table = structure.base.positions
            longest = max_len if table is None else table.weight.shape[0] - table.first
            far = None
            if longest is not None:
                far = Imported(file, probe_inputs(file, self._far(longest, cached=inputs.has_past)), matrices)
            vocab, heads = structure.base.tokens.weight.shape[0], structure.layers[0][0].attention
            eos, bos = special_tokens(self._config_fields, self._fields(_GENERATION), vocab)
            assert heads is not None
            ropes = self._ropes(heads.term.scores.head_dim, 2 * len(heads.q.angles), longest)
            stated = Stated(max_len, ropes, eos, bos)
            recovered = recover(structure, inputs.probe, far, stated, Types(*self._types(matrices)))
        except Unrecognised as error:
            raise ModelError(f"{self.path} {error}, which no model of llmc does") from None
        except Unstated as error:
            raise ModelError(f"{self.path} {error}") from None
        except BROKEN as error:
            raise ModelError(f"{self.path} is built as no model of llmc: {brief(str(error))}") from error
        return _Known(kind, value.flat.size, recovered)

    def _far(self, longest: int, *, cached: bool) -> Probe:
        """A text longer than any window."""
        window = self._window() + 2
        if cached:
            return Probe(1, 2, max(2, min(longest - 2, max(_FAR, window))), False)
        return Probe(1, max(2, min(longest, max(_FAR_AT_ONCE, window), _MOST_AT_ONCE)), 0, False)

    def _max_len(self) -> int | None:
        fields = self._config_fields
        return next((fields.integer(name) for name in _LENGTHS if fields.has(name)), None)

    def _window(self) -> int:
        """The window in config.json; 0 if none. The graph decides whether it applies."""
        fields = self._config_fields
        return fields.integer("sliding_window", minimum=0) if fields.has("sliding_window") else 0

    def _ropes(self, head_dim: int, dim: int, longest: int | None) -> tuple[Rope, ...]:
        """Candidate rotary positions from config.json."""
        if not dim or longest is None:
            return ()
        try:
            return (replace(read_rope(self._config_fields, longest, head_dim, partial=1.0), dim=dim),)
        except ModelError:
            return ()

    def _types(self, matrices: frozenset[str]) -> tuple[str, bool]:
        """(type of most elements, whether some are floats of 16 bits); quantized ones count as bf16."""
        elements: Counter[str] = Counter()
        names = {dtype: name for name, dtype in DTYPES.items()}
        for name in matrices:
            dtype = self._file.dtype(name)
            stored = "f32" if dtype is None else names.get(dtype, "f32")
            elements["bf16" if name in self._file.blocks else stored] += math.prod(self._file.shape(name))
        short = any(self._file.dtype(name) in (DTYPES["f16"], DTYPES["bf16"]) for name in matrices)
        return max(elements, key=lambda name: elements[name], default="f32"), short

    def config(self) -> ModelConfig:
        found = with_pooling(self._with_task, str(self.path), self.pooling)
        return with_rank_prompt(found, str(self.path), self.rank_prompt)

    @cached_property
    def _with_task(self) -> ModelConfig:
        """Raises ModelError for a task that the graph cannot do."""
        known, fields = self._known, self._config_fields
        config, asked = known.recovered.config, self.task
        can = {"logits": ("generate",), "rows": ("embed",), "labels": ("rank", "classify")}[known.kind]
        if asked not in ("auto", *can):
            raise ModelError(f"{self.path} was exported to {' or '.join(can)}, not to {asked}; export it for that task")
        if known.kind == "logits":
            return config
        assert config.pooled is not None
        if known.kind == "rows":
            sentence = read_sentence_model(self._sentence_folder, config.hidden_size)
            if sentence is None and self.pooling == "auto" and SENTENCE in self._file.output_names:
                raise ModelError(
                    f"{self.path} pools rows to its output {SENTENCE}, and no {MODULES} beside it says how: give "
                    "--pooling, or export the model again"
                )
            if sentence is None:
                sentence = SentenceModel("first" if config.bidirectional else "last", True)
            if sentence.dense:
                raise ModelError(
                    f"{self._sentence_folder / MODULES} has modules Dense, which llmc runs behind a checkpoint of "
                    "safetensors; compile that"
                )
            task = Task("embed", longest_text=sentence.longest)
            return replace(config, pooled=Pooled(sentence.pooling, (), sentence.normalised), task=task)
        labels = labels_of(fields)
        if len(labels) != known.labels:
            labels = tuple(f"LABEL_{i}" for i in range(known.labels))
        name = asked if asked != "auto" else "rank" if known.labels == 1 else "classify"
        return replace(
            config, task=scoring_task(fields, labels, name, self._sentence_folder), typed_inputs=config.token_types > 1
        )

    def ignored_config(self) -> tuple[str, ...]:
        return left_to_callers(self._sentence_folder) if self.config().task is not None else ()

    @property
    def is_quantized(self) -> bool:
        return bool(self._file.blocks)

    def checkpoint(self) -> Checkpoint:
        from llmc.models.sources.onnx.weights import OnnxCheckpoint

        return OnnxCheckpoint(self._file, self._known.recovered.tensors)

    def model_files(self) -> ModelFiles:
        return TokenizerFolderFiles(self._folder)

    def weight_files(self) -> Iterator[Path]:
        yield from self._file.files()

    def all_files(self) -> Iterator[Path]:
        yield from self._file.files()
        yield from (f for f in sorted(self._folder.iterdir()) if f.is_file() and f.suffix in _BESIDE)
        yield from (file for file in sorted(self._folder.glob(NAMED_TEMPLATE_FILES)) if file.is_file())
        for pattern in (MODULES, *SENTENCE_FILES):
            yield from (file for file in sorted(self._sentence_folder.glob(pattern)) if file.is_file())


def _kind(name: str | None, value: Rows, probe: Probe) -> Kind:
    from llmc.models.sources.onnx.rows import Unrecognised

    tokens = len(set(value.tok.ravel().tolist()))
    if name != _OUTPUTS[0]:
        return "rows"
    if tokens == probe.batch * probe.tokens:
        return "logits"
    if tokens == probe.batch:
        return "labels"
    raise Unrecognised("gives logits of some tokens")
