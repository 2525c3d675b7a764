"""Tiny random checkpoints of models that give vectors, written by transformers, with a tokenizer of words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 and name.endswith(".weight"):
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


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


def save_sentence_files(path: Path, pooling: str, *, normalised: bool) -> None:
    """What sentence-transformers writes beside a model. pooling: as in pooling_mode_cls_token."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalised else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    settings = {f"pooling_mode_{mode}": mode == pooling for mode in modes}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 60, **settings}))


def random_texts(lengths: tuple[int, ...], seed: int = 3) -> list[list[int]]:
    """Token ids that are no special tokens."""
    rng = np.random.default_rng(seed)
    return [[int(token) for token in rng.integers(len(SPECIAL), VOCAB, length)] for length in lengths]


def hidden_states(path: Path, ids: list[int]) -> np.ndarray:
    """float32 [tokens, hidden] of the last layer, by the plain code of transformers."""
    model = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        states: torch.Tensor = model(torch.tensor([ids])).last_hidden_state
    return states[0].numpy()


def class_logits(path: Path, ids: list[int], kinds: list[int] | None = None) -> np.ndarray:
    """float32 [labels] of transformers. kinds: of the tokens."""
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


def check_close(found: np.ndarray, wanted: np.ndarray, what: str = "") -> None:
    """Within 1e-4 of the largest number of a row."""
    error = np.abs(found.astype(np.float64) - wanted).max() / np.abs(wanted).max()
    assert error < 1e-4, f"{what}: off by {error:g}"
