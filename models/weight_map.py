"""From a checkpoint's tensors to a model's parameters: total, so nothing is missing, left over or of another shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from llmc.models.brief import brief_name
from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A tensor that the checkpoint must have, with its shape."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Target:
    """A parameter and where it comes from: one tensor, or several one below the other.

    dtype: "act" for weights in the activation dtype, "f32" for norms and biases. makes: of a gated layer whose result
    one linear layer reads and nothing else, the name of that one's weight: row i of gate and of up is its column i.
    """

    name: str
    sources: tuple[Source, ...]
    dtype: Literal["act", "f32"]
    makes: str | None = None

    @property
    def how(self) -> Literal["copy", "concat_rows"]:
        return "copy" if len(self.sources) == 1 else "concat_rows"

    @property
    def shape(self) -> Shape:
        return (sum(s.shape[0] for s in self.sources), *self.sources[0].shape[1:])


@dataclass(frozen=True)
class WeightMap:
    """targets: every parameter of the model, tied ones once. unused: tensors that a checkpoint may have in vain."""

    targets: tuple[Target, ...]
    unused: frozenset[str]

    def check(
        self,
        shapes: Mapping[str, Shape],
        origin: str,
        config_name: str = "config.json",
        called: Callable[[str], str] = str,
    ) -> None:
        """Raises ModelError if the checkpoint `origin` lacks a tensor, has one of another shape, or one unknown.

        config_name: what implies the shapes. called: from our name of a tensor to that of the checkpoint's files.
        """
        again = f"mend {config_name} or download the checkpoint again"
        sources = {source.name: source for target in self.targets for source in target.sources}
        for source in sources.values():
            found = shapes.get(source.name)
            if found is None:
                raise ModelError(
                    f"{origin} lacks the tensor {called(source.name)} of shape {list(source.shape)}; {again}"
                )
            if found != source.shape:
                raise ModelError(
                    f"{origin}: tensor {called(source.name)} has shape {list(found)} where {config_name} "
                    f"implies {list(source.shape)}; {again}"
                )
        unknown = sorted(name for name in shapes if name not in sources and name not in self.unused)
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise ModelError(
                f"{origin} has the tensor {brief_name(called(unknown[0]))} of shape {list(shapes[unknown[0]])}{more}, "
                f"which this architecture does not use; {again}"
            )


def _projection(
    target: str, prefix: str, rows: tuple[tuple[str, int], ...], columns: int, bias: bool, makes: str | None = None
) -> Iterator[Target]:
    """Weight and bias of a linear that fuses the projections `rows` (name, rows) below `prefix`."""
    yield Target(f"{target}.weight", tuple(Source(f"{prefix}.{n}.weight", (r, columns)) for n, r in rows), "act", makes)
    if bias:
        yield Target(f"{target}.bias", tuple(Source(f"{prefix}.{n}.bias", (r,)) for n, r in rows), "f32", makes)


def _norm(target: str, source: str, size: int) -> Target:
    return Target(f"{target}.weight", (Source(f"{source}.weight", (size,)),), "f32")


def _layer(config: ModelConfig, layer: int) -> Iterator[Target]:
    name, prefix = f"layers.{layer}", f"model.layers.{layer}"
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield _norm(f"{name}.attention_norm", f"{prefix}.input_layernorm", hidden)
    heads = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    yield from _projection(f"{name}.attention.qkv", f"{prefix}.self_attn", heads, hidden, config.attention_bias)
    if config.qk_norm:
        yield _norm(f"{name}.attention.q_norm", f"{prefix}.self_attn.q_norm", config.head_dim)
        yield _norm(f"{name}.attention.k_norm", f"{prefix}.self_attn.k_norm", config.head_dim)
    yield from _projection(f"{name}.attention.out", f"{prefix}.self_attn", (("o_proj", hidden),), q, config.o_bias)
    yield _norm(f"{name}.mlp_norm", f"{prefix}.post_attention_layernorm", hidden)
    gates = (("gate_proj", inner), ("up_proj", inner))
    down = f"{name}.mlp.down"
    yield from _projection(
        f"{name}.mlp.gate_up", f"{prefix}.mlp", gates, hidden, config.mlp_bias, makes=f"{down}.weight"
    )
    yield from _projection(down, f"{prefix}.mlp", (("down_proj", hidden),), inner, config.mlp_bias)


def decoder_weight_map(config: ModelConfig) -> WeightMap:
    """The map of `blocks.decoder.Decoder` for checkpoints with Llama's names, in the order of the parameters."""
    vocabulary = (config.vocab_size, config.hidden_size)
    targets = [Target("embed.weight", (Source("model.embed_tokens.weight", vocabulary),), "act")]
    for layer in range(config.num_layers):
        targets.extend(_layer(config, layer))
    targets.append(_norm("norm", "model.norm", config.hidden_size))
    unused = {"model.rotary_emb.inv_freq"}
    unused |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)}
    if config.tie_word_embeddings:
        unused.add("lm_head.weight")
    else:
        targets.append(Target("lm_head.weight", (Source("lm_head.weight", vocabulary),), "act"))
    return WeightMap(tuple(targets), frozenset(unused))
