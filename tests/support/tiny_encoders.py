"""Tiny random checkpoints of models that give vectors, written by transformers, with a tokenizer of words."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from support.remote_code.registry import ENCODERS, run_encoder

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "no", "yes")
VOCAB = 203
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "roberta": {"pad_token_id": 1, "max_position_embeddings": 98, "eos_token_id": 3},
    "xlm-roberta": {"pad_token_id": 1, "max_position_embeddings": 98, "type_vocab_size": 1, "eos_token_id": 3},
    "modernbert": {
        "num_hidden_layers": 3,
        "local_attention": 14,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "norm_bias": True,
    },
}


def make_encoder(path: Path, family: str, *, labels: int = 0, seed: int = 0, **overrides: Any) -> Path:
    """Saves a random model to `path`: one that gives hidden states, or a classifier of so many labels."""
    kind = CONFIG_MAPPING[family]
    known = {*kind.__dataclass_fields__, *kind.attribute_map}
    fields = {**_SIZES, **OF_FAMILY.get(family, {})}
    fields = {name: value for name, value in fields.items() if name in known}
    config = kind(**{**fields, **overrides}, **({"num_labels": labels} if labels else {}))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (AutoModelForSequenceClassification if labels else AutoModel).from_config(config)
        _randomize(model)
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def make_remote_encoder(path: Path, architecture: str, *, seed: int = 0, **overrides: Any) -> Path:
    """As `make_encoder`, in the names of authors who publish code of their own. architecture: of `ENCODERS`."""
    make, fields = ENCODERS[architecture]
    config = {**fields, **overrides}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make(config)
        _randomize(model)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), path / "model.safetensors", {"format": "pt"})
    save_tokenizer(path)
    return path


def _randomize(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith(".weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)


def save_tokenizer(path: Path) -> None:
    """Words w0, w1, … and the special tokens; texts are [CLS] a [SEP], pairs [CLS] a [SEP] b [SEP]."""
    words = {word: i for i, word in enumerate((*SPECIAL, *(f"w{i}" for i in range(VOCAB - len(SPECIAL)))))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", words["[CLS]"]), ("[SEP]", words["[SEP]"])],
    )
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def save_sentence_files(path: Path, pooling: str, *, normalised: bool, dense: Sequence[DenseModule] = ()) -> None:
    """What sentence-transformers writes beside a model. pooling: as in pooling_mode_cls_token."""
    kinds = ["Transformer", "Pooling", *("Dense" for _ in dense), *(["Normalize"] if normalised else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    for i, module in enumerate(dense):
        module.save(path / f"{i + 2}_Dense")
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    settings = {f"pooling_mode_{mode}": mode == pooling for mode in modes}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 60, **settings}))


@dataclass(frozen=True)
class DenseModule:
    """A linear layer behind the pooling. activation: of ACTIVATIONS."""

    columns: int
    size: int
    activation: str
    bias: bool = True

    def tensors(self) -> dict[str, torch.Tensor]:
        rng = torch.Generator().manual_seed(self.size)
        weight = torch.randn(self.size, self.columns, generator=rng) * self.columns**-0.5
        bias = {"linear.bias": torch.randn(self.size, generator=rng) * 0.1} if self.bias else {}
        return {"linear.weight": weight, **bias}

    def save(self, folder: Path) -> None:
        folder.mkdir()
        config = {
            "in_features": self.columns,
            "out_features": self.size,
            "bias": self.bias,
            "activation_function": ACTIVATIONS[self.activation][0],
        }
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self.tensors(), folder / "model.safetensors")

    def applied(self, vector: np.ndarray) -> np.ndarray:
        tensors = self.tensors()
        made = torch.nn.functional.linear(
            torch.from_numpy(vector).float(), tensors["linear.weight"], tensors.get("linear.bias")
        )
        found: np.ndarray = ACTIVATIONS[self.activation][1](made).numpy()
        return found


ACTIVATIONS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "tanh": ("torch.nn.modules.activation.Tanh", torch.tanh),
    "gelu": ("torch.nn.modules.activation.GELU", torch.nn.functional.gelu),
    "identity": ("torch.nn.modules.linear.Identity", lambda x: x),
}
"""What sentence-transformers calls them, and what they are."""


def random_texts(lengths: tuple[int, ...], seed: int = 3) -> list[list[int]]:
    """Token ids that are no special tokens."""
    rng = np.random.default_rng(seed)
    return [[int(token) for token in rng.integers(len(SPECIAL), VOCAB, length)] for length in lengths]


def hidden_states(path: Path, ids: list[int]) -> np.ndarray:
    """float32 [tokens, hidden] of the last layer, by the plain code of transformers, or as the authors define it."""
    if _is_remote(path):
        with torch.no_grad():
            found: np.ndarray = run_encoder(path)(torch.tensor(ids)).numpy()
        return found
    model = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        states: torch.Tensor = model(torch.tensor([ids])).last_hidden_state
    return states[0].numpy()


def _is_remote(path: Path) -> bool:
    return "auto_map" in json.loads((path / "config.json").read_text())


def class_logits(path: Path, ids: list[int], kinds: list[int] | None = None) -> np.ndarray:
    """float32 [labels] of transformers, or as the authors define it. kinds: of the tokens."""
    if _is_remote(path):
        return hidden_states(path, ids)
    model = AutoModelForSequenceClassification.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    more = {} if kinds is None else {"token_type_ids": torch.tensor([kinds])}
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids]), **more).logits
    return logits[0].numpy()


def pooled(states: np.ndarray, pooling: str, *, normalised: bool) -> np.ndarray:
    """The vector of a text. pooling: "first", "mean" or "last"."""
    vector = {"first": states[0], "mean": states.mean(0), "last": states[-1]}[pooling].astype(np.float64)
    scaled: np.ndarray = vector / (np.linalg.norm(vector) if normalised else 1.0)
    return scaled


def check_close(found: np.ndarray, wanted: np.ndarray, what: str = "", bound: float = 1e-4) -> None:
    """Within `bound` of the largest number of a row."""
    error = np.abs(found.astype(np.float64) - wanted).max() / np.abs(wanted).max()
    assert error < bound, f"{what}: off by {error:g}"
