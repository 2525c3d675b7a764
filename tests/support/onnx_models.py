"""Models in ONNX, exported by torch under the names of Optimum's exporter, and what onnxruntime makes of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache

OPSET = 17


class _WithPast(nn.Module):
    """A decoder as Optimum exports it for text-generation-with-past: caches are inputs and outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        kept = [tensor for layer in out.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return (out.logits, *kept)


class _Encoder(nn.Module):
    def __init__(self, model: nn.Module, *, typed: bool) -> None:
        super().__init__()
        self.model, self.typed = model, typed

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *types: torch.Tensor) -> torch.Tensor:
        more = {"token_type_ids": types[0]} if self.typed else {}
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, **more)
        result: torch.Tensor = out.logits if hasattr(out, "logits") else out.last_hidden_state
        return result


def export_decoder(
    checkpoint: Path, path: Path, *, code: str = "eager", external: bool = False, dtype: torch.dtype = torch.float32
) -> Path:
    """path: of the .onnx file; the checkpoint's other files are copied beside it. external: weights lie in a file of
    their own."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation=code, dtype=dtype).eval()
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    batch, tokens, past = 2, 3, 5
    names = [f"{layer}.{part}" for layer in range(config.num_hidden_layers) for part in ("key", "value")]
    inputs = (
        torch.randint(3, config.vocab_size, (batch, tokens)),
        torch.ones(batch, past + tokens, dtype=torch.int64),
        torch.arange(past, past + tokens).repeat(batch, 1),
        *(torch.randn(batch, heads, past, dim, dtype=dtype) for _ in names),
    )
    given = ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{name}" for name in names)]
    made = ["logits", *(f"present.{name}" for name in names)]
    axes: dict[str, dict[int, str]] = {
        "input_ids": {0: "batch_size", 1: "sequence_length"},
        "attention_mask": {0: "batch_size", 1: "past_sequence_length + sequence_length"},
        "position_ids": {0: "batch_size", 1: "sequence_length"},
        "logits": {0: "batch_size", 1: "sequence_length"},
    }
    for name in names:
        axes[f"past_key_values.{name}"] = {0: "batch_size", 2: "past_sequence_length"}
        axes[f"present.{name}"] = {0: "batch_size", 2: "past_sequence_length + sequence_length"}
    _export(_WithPast(model), inputs, path, given, made, axes)
    _finish(checkpoint, path, external=external)
    return path


def export_encoder(checkpoint: Path, path: Path, *, labels: bool = False, typed: bool = True) -> Path:
    """Without the pooler, as Optimum exports feature extraction; labels: for sequence classification."""
    kind = AutoModelForSequenceClassification if labels else AutoModel
    model = kind.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32).eval()
    shape = (2, 5)
    inputs = [torch.randint(6, 200, shape), torch.ones(shape, dtype=torch.int64)]
    given = ["input_ids", "attention_mask"]
    if typed:
        inputs.append(torch.zeros(shape, dtype=torch.int64))
        given.append("token_type_ids")
    axes = {name: {0: "batch_size", 1: "sequence_length"} for name in given}
    made = "logits" if labels else "last_hidden_state"
    axes[made] = {0: "batch_size"} if labels else {0: "batch_size", 1: "sequence_length"}
    _export(_Encoder(model, typed=typed), tuple(inputs), path, given, [made], axes)
    _finish(checkpoint, path, external=False)
    return path


def _export(
    module: nn.Module, inputs: tuple[torch.Tensor, ...], path: Path, given: list[str], made: list[str],
    axes: dict[str, dict[int, str]],
) -> None:  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, inputs, str(path), input_names=given, output_names=made, dynamic_axes=axes, opset_version=OPSET,
            dynamo=False, do_constant_folding=True,
        )  # fmt: skip


def _finish(checkpoint: Path, path: Path, *, external: bool) -> None:
    """The files beside a model; external data as Optimum writes them."""
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            (path.parent / file.name).write_bytes(file.read_bytes())
    if external:
        save(onnx.load(path), path, external=True)


def store_weights_in(path: Path, dtype: Any) -> None:
    """Matrices of a float32 model lie in another type and are cast where they are read."""
    model = onnx.load(path)
    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) == 2:
            name = tensor.name
            values = onnx.numpy_helper.to_array(tensor).astype(dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, f"{name}.stored"))
            casts.append(onnx.helper.make_node("Cast", [tensor.name], [name], to=onnx.TensorProto.FLOAT))
    for node in reversed(casts):
        model.graph.node.insert(0, node)
    save(model, path)


def save(model: onnx.ModelProto, path: Path, *, external: bool = False) -> None:
    """external: all of the weights go to model.onnx_data."""
    data = path.with_name(f"{path.name}_data")
    data.unlink(missing_ok=True)
    more: dict[str, Any] = {"save_as_external_data": True, "location": data.name, "size_threshold": 1024}
    onnx.save(model, path, **(more if external else {}))


class Runtime:
    """onnxruntime with a decoder's caches."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._given = {value.name: value for value in self.session.get_inputs()}
        self._made = [value.name for value in self.session.get_outputs()]

    def step(self, ids: list[int], past: dict[str, np.ndarray] | None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """float32 [tokens, vocabulary] of one text, and the caches behind it."""
        before = 0
        feeds: dict[str, np.ndarray] = {}
        for name, value in self._given.items():
            if name.startswith("past_key_values."):
                dtype = np.float16 if value.type == "tensor(float16)" else np.float32
                empty = np.zeros((1, value.shape[1], 0, value.shape[3]), dtype)
                feeds[name] = empty if past is None else past[name]
                before = feeds[name].shape[2]
        whole = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, before + len(ids)), np.int64),
            "position_ids": np.arange(before, before + len(ids), dtype=np.int64)[None],
            "token_type_ids": np.zeros((1, len(ids)), np.int64),
        }
        feeds.update({name: array for name, array in whole.items() if name in self._given})
        results = dict(zip(self._made, self.session.run(None, feeds), strict=True))
        kept = {
            name.replace("present.", "past_key_values."): array
            for name, array in results.items()
            if name.startswith("present.")
        }
        return results[self._made[0]][0].astype(np.float32), kept

    def logits(self, ids: list[int]) -> np.ndarray:
        """float32 [tokens, vocabulary]."""
        return self.step(ids, None)[0]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        ids, (rows, past) = [], self.step(prompt, None)
        for _ in range(count):
            ids.append(int(rows[-1].argmax()))
            rows, past = self.step(ids[-1:], past)
        return ids

    def run(self, ids: list[int], types: list[int] | None = None) -> np.ndarray:
        """An encoder's output for one text: float32 [tokens, elements], or [labels]."""
        whole = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, len(ids)), np.int64),
            "position_ids": np.arange(len(ids), dtype=np.int64)[None],
            "token_type_ids": np.array([types or [0] * len(ids)], np.int64),
        }
        feeds = {name: array for name, array in whole.items() if name in self._given}
        found: np.ndarray = self.session.run(None, feeds)[0][0]
        return found
