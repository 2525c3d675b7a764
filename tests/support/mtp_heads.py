"""Layers for multi-token prediction in tiny random models, as published, and what such a layer computes.

The layer is one of the model's own code, of transformers where that has the model.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from support.remote_code.llama_like import Llama
from support.remote_code.registry import REMOTE, remote_model
from support.tiny_models import reference_model


@dataclass(frozen=True)
class Names:
    """Published names; {} is the number of the model's layers."""

    layer: str
    join: str
    token_norm: str
    state_norm: str
    norm: str
    state_first: bool = False

    def of(self, layers: int) -> Names:
        names = ("layer", "join", "token_norm", "state_norm", "norm")
        return replace(self, **{name: getattr(self, name).format(layers) for name in names})

    def parts(self) -> tuple[str, ...]:
        return self.join, self.token_norm, self.state_norm, self.norm


_QWEN = Names("mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
_DEEPSEEK = Names(
    "model.layers.{}", "model.layers.{}.eh_proj", "model.layers.{}.enorm", "model.layers.{}.hnorm",
    "model.layers.{}.shared_head.norm",
)  # fmt: skip
_MIMO = Names(
    "model.mtp_layers.0", "model.mtp_layers.0.input_proj", "model.mtp_layers.0.token_layernorm",
    "model.mtp_layers.0.hidden_layernorm", "model.mtp_layers.0.final_layernorm", state_first=True,
)  # fmt: skip
_NAMES = {
    "qwen3_next": _QWEN, "qwen3_5_text": _QWEN, "qwen3_5_moe_text": _QWEN, "qwen3_5": _QWEN, "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK, "glm4_moe_lite": _DEEPSEEK, "mimo": _MIMO,
}  # fmt: skip


class _Model:
    """The model at `path` as its own code has it, float32."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = json.loads((path / "config.json").read_text())
        kind = self.config["model_type"]
        found: Any = remote_model(path) if kind in REMOTE else reference_model(path)
        self.whole: object = found
        self.is_remote = kind in REMOTE
        self.decoder: Any = getattr(found.model, "language_model", found.model)
        layers = list(self.decoder.layers)
        self.layer: Any = copy.deepcopy(next(one for one in reversed(layers) if hasattr(one, "self_attn")))
        self.names = _NAMES[self.config["model_type"]].of(len(layers))
        self.head: Tensor = found.lm_head.weight.detach()

    def through(self, x: Tensor) -> Tensor:
        """The layer's result, float32 [T, D]."""
        if self.is_remote:
            made: Tensor = self.layer(x)
            return made
        count = len(x)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        angles = self.decoder.rotary_emb(x[None], positions)
        found = self.layer(x[None], position_embeddings=angles, attention_mask=mask, position_ids=positions)
        rows: Tensor = (found[0] if isinstance(found, tuple) else found)[0]
        return rows


def add_mtp(path: Path, *, seed: int = 0) -> Path:
    """Adds such a layer to the tiny model at `path`, in float32."""
    model, generator = _Model(path), torch.Generator().manual_seed(seed)
    hidden = model.head.shape[1]

    def random(tensor: Tensor) -> Tensor:
        shape = tensor.shape
        if len(shape) == 1:
            return torch.rand(shape, generator=generator) + 0.5
        found: Tensor = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return found

    own = {name: random(one) for name, one in _published(model.layer.state_dict()).items()}
    norms = (model.names.token_norm, model.names.state_norm, model.names.norm)
    added = {f"{model.names.layer}.{name}": one for name, one in own.items()}
    added |= {f"{name}.weight": random(torch.empty(hidden)) for name in norms}
    added[f"{model.names.join}.weight"] = random(torch.empty(hidden, 2 * hidden))
    if model.names.layer.startswith("model.layers."):  # with copies, which are not read
        added[f"{model.names.layer}.embed_tokens.weight"] = torch.zeros(4, 4)
        added[f"{model.names.layer}.shared_head.head.weight"] = torch.zeros(4, 4)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, **added}, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _published(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """A layer's tensors with those of each expert apart."""
    found: dict[str, Tensor] = {}
    for name, tensor in layer.items():
        if name.endswith("experts.gate_up_proj"):
            for number, one in enumerate(tensor):
                gate, up = one.chunk(2)
                found[f"{name[:-12]}{number}.gate_proj.weight"] = gate
                found[f"{name[:-12]}{number}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            found |= {f"{name[:-9]}{number}.down_proj.weight": one for number, one in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def _of_transformers(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `_published`."""
    experts = [re.fullmatch(r"(.*experts\.)(\d+)\.down_proj\.weight", name) for name in layer]
    known = [match for match in experts if match is not None]
    if not known:
        return layer
    prefix, count = known[0][1], len(known)
    own = {name: one for name, one in layer.items() if not re.match(rf"{re.escape(prefix)}\d", name)}

    def of(expert: int, name: str) -> Tensor:
        return layer[f"{prefix}{expert}.{name}_proj.weight"]

    own[f"{prefix}gate_up_proj"] = torch.stack([torch.cat((of(i, "gate"), of(i, "up"))) for i in range(count)])
    own[f"{prefix}down_proj"] = torch.stack([of(i, "down") for i in range(count)])
    return own


class ReferenceMtp:
    """The layer of the model at `path`, float32."""

    def __init__(self, path: Path) -> None:
        self._model = _Model(path)
        weights, names = load_file(path / "model.safetensors"), self._model.names
        prefix = f"{names.layer}."
        parts = (*names.parts(), f"{prefix}embed_tokens", f"{prefix}shared_head.head")
        own = {
            name.removeprefix(prefix): one
            for name, one in weights.items()
            if name.startswith(prefix) and name.removesuffix(".weight") not in parts
        }
        self._model.layer.load_state_dict(_of_transformers(own))

        def norm(name: str) -> nn.Module:
            found: nn.Module = copy.deepcopy(self._model.decoder.norm)
            found.load_state_dict({"weight": weights[f"{name}.weight"]})
            return found

        self._norms = tuple(map(norm, (names.token_norm, names.state_norm, names.norm)))
        self._join = weights[f"{names.join}.weight"]

    @torch.no_grad()
    def states(self, tokens: list[int], states: Tensor) -> Tensor:
        """The rows behind the norm for `tokens`, the first at position 0; states: [tokens, D], each of the token
        before. float32 [tokens, D]."""
        of_token, of_state, last = self._norms
        embedded = self._model.decoder.embed_tokens(torch.tensor(tokens))
        parts = [of_token(embedded), of_state(states)]
        if self._model.names.state_first:
            parts.reverse()
        made: Tensor = last(self._model.through(F.linear(torch.cat(parts, -1), self._join)))
        return made

    def logits(self, states: Tensor) -> Tensor:
        """float32 [..., V]."""
        return F.linear(states, self._model.head)

    @torch.no_grad()
    def of_model(self, tokens: list[int]) -> Tensor:
        """What the model has behind its last norm, float32 [tokens, D]."""
        whole = self._model.whole
        if isinstance(whole, Llama):
            return whole.hidden(whole.embedded(torch.tensor(tokens)))
        rows: Tensor = self._model.decoder(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return rows
