"""What artifacts are compared with: transformers with its static cache, compiled by torch; without it, plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.gpu.torch_model import TorchModel, read_weights

_MODE = "reduce-overhead"  # of torch.compile: CUDA graphs
Step = Callable[[], object]


class Baseline(Protocol):
    """name: what it is, for people."""

    name: str

    def step(self, batch: int, new: int, context: int) -> Step:
        """A step of `batch` sequences with `new` tokens each and a cache for `context`, up to logits on the host."""


def baseline(shape: dict[str, Any], folder: Path, device: str, *, compiled: bool) -> Baseline:
    """The best there is on this machine, in bf16."""
    try:
        import transformers
    except ImportError:
        return _StaticModel(shape, read_weights(shape, folder, device, torch.bfloat16), compiled=compiled)
    return _Transformers(transformers, folder, device, compiled=compiled)


class _Transformers:
    def __init__(self, library: Any, folder: Path, device: str, *, compiled: bool) -> None:
        self.name = f"transformers {library.__version__}, static cache{', compiled' if compiled else ''}"
        self._library, self._device = library, device
        model = library.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
        self._model = model.to(device, torch.bfloat16).eval()
        forward = self._model.forward
        self._forward = torch.compile(forward, mode=_MODE, fullgraph=True) if compiled else forward

    def _new_cache(self, batch: int, context: int) -> Any:
        given = {"config": self._model.config, "max_cache_len": context}
        try:
            return self._library.StaticCache(**given)
        except TypeError:  # of older versions
            more = {"max_batch_size": batch, "device": self._device, "dtype": torch.bfloat16}
            return self._library.StaticCache(**given, **more)

    def step(self, batch: int, new: int, context: int) -> Step:
        cache = self._new_cache(batch, context)
        tokens = torch.full((batch, new), 7, device=self._device)
        used = context

        @torch.inference_mode()
        def run() -> object:
            nonlocal used
            if used + new > context:  # its shapes are those of the whole cache, however much of it is used
                cache.reset()
                used = 0
            used += new
            found = self._forward(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return found.logits.float().cpu()

        run()  # makes the cache, in inference mode
        return run


class _StaticModel(TorchModel):
    def __init__(self, shape: dict[str, Any], weights: dict[str, Tensor], *, compiled: bool) -> None:
        super().__init__(shape, weights)
        self.name = f"plain torch {torch.__version__}, static cache{', compiled' if compiled else ''}"
        self._run = torch.compile(self._forward, mode=_MODE, fullgraph=True) if compiled else self._forward

    def step(self, batch: int, new: int, context: int) -> Step:
        device = self._weights["model.embed_tokens.weight"].device
        size = (2, batch, self._kv_heads, context, self._head_dim)
        count = int(self._shape["num_hidden_layers"])
        caches = [torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(count)]
        tokens = torch.full((batch, new), 7, device=device)
        positions = torch.arange(context - new, context, device=device)

        @torch.inference_mode()
        def run() -> object:
            return self._run(tokens, positions, caches).cpu()

        return run

    def _forward(self, tokens: Tensor, positions: Tensor, caches: list[Tensor]) -> Tensor:
        """tokens: [batch, new]. caches: of each layer, keys and values [2, batch, KV heads, context, head_dim]."""
        x = self._weights["model.embed_tokens.weight"][tokens]
        seen = torch.arange(caches[0].shape[3], device=x.device)[None, :] <= positions[:, None]
        for layer, cache in enumerate(caches):
            name = f"model.layers.{layer}"
            y = self._norm(x, f"{name}.input_layernorm")
            q, k, v = (
                self._linear(y, f"{name}.self_attn.{part}_proj").unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
                for part in "qkv"
            )
            cache[0].index_copy_(2, positions, self._rotated(k, positions))
            cache[1].index_copy_(2, positions, v)
            q = self._rotated(q, positions)
            y = F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=seen, enable_gqa=True)
            x = x + self._linear(y.transpose(1, 2).flatten(-2), f"{name}.self_attn.o_proj")
            x = x + self._mlp(self._norm(x, f"{name}.post_attention_layernorm"), name)
        return self._head(x[:, -1]).float()
