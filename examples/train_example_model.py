"""Train the bundled example models: a small Llama on the novels of Jane Austen (public domain), then the same model on
the conversations in them.

Each takes some minutes on two cores. Needs ``apt-get`` and ``dpkg-deb`` (or the package file, given with ``--deb``),
torch, transformers, tokenizers, safetensors and rich:

    python examples/train_example_model.py                 # examples/tiny-english
    python examples/train_example_model.py --chat          # examples/tiny-chat, from examples/tiny-english
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path

import austen
import dialogue
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import Parameter
from transformers import LlamaForCausalLM

VOCAB = 2048
BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1

LAYERS, HIDDEN, MLP = 4, 192, 512
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32
EPS, ROPE_THETA = 1e-5, 10000.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "rope_theta": ROPE_THETA,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}

# The share of a training in which the learning rates rise; from there they fall linearly to zero.
WARMUP = 0.03


@dataclass(frozen=True)
class Recipe:
    """How one of the models is trained. tokens: an equal share in each of the stages, which are (tokens of a window,
    windows of a step): small steps and short windows learn the most a second at first. Rates are the highest ones.
    turn_tokens: what the tokenizer has beside VOCAB."""

    name: str
    tokens: int
    stages: tuple[tuple[int, int], ...]
    muon_rate: float
    adam_rate: float
    corpus_sha256: str
    turn_tokens: tuple[str, ...] = ()
    chat_template: str | None = None

    @property
    def context(self) -> int:
        return self.stages[-1][0]

    @property
    def vocab(self) -> int:
        return VOCAB + len(self.turn_tokens)


PROSE = Recipe("tiny-english", 3_600_000, ((64, 16), (128, 8), (256, 8)), 0.02, 0.012, austen.CORPUS_SHA256)
CHAT = Recipe(
    "tiny-chat",
    900_000,
    ((128, 8), (256, 8), (512, 4)),
    0.01,
    0.006,
    dialogue.DIALOGUE_SHA256,
    (dialogue.SYSTEM, dialogue.USER, dialogue.ASSISTANT),
    dialogue.TEMPLATE,
)


class Llama(torch.nn.Module):
    """CONFIG's model, its matrices stacked over the layers, [..., out, in]: fewer and larger operations than one
    parameter a projection. Residual branches start at zero."""

    def __init__(self, vocab: int = VOCAB) -> None:
        super().__init__()
        groups = (HEADS + 2 * KV_HEADS) // 2
        self.embedding = Parameter(torch.randn(vocab, HIDDEN) * 0.02)
        self.qkv = Parameter(torch.randn(LAYERS, groups, 2 * HEAD_DIM, HIDDEN) * 0.02)  # two heads a matrix
        self.attention_out = Parameter(torch.zeros(LAYERS, HIDDEN, HEADS * HEAD_DIM))
        self.gate_up = Parameter(torch.randn(LAYERS, 2, MLP, HIDDEN) * 0.02)
        self.down = Parameter(torch.zeros(LAYERS, HIDDEN, MLP))
        self.attention_norm = Parameter(torch.ones(LAYERS, HIDDEN))
        self.mlp_norm = Parameter(torch.ones(LAYERS, HIDDEN))
        self.final_norm = Parameter(torch.ones(HIDDEN))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The mean loss, in nats, of every token but the first given those before it; rows: ids, [windows, tokens]."""
        windows, context = rows.shape[0], rows.shape[1] - 1
        cos, sin = rotations(context)
        x = F.embedding(rows[:, :-1].flatten(), self.embedding)
        layers = (
            weight.unbind()
            for weight in (
                self.attention_norm,
                self.qkv.flatten(1, 2),
                self.attention_out,
                self.mlp_norm,
                self.gate_up.flatten(1, 2),
                self.down,
            )
        )
        for attention_norm, qkv, attention_out, mlp_norm, gate_up, down in zip(*layers, strict=True):
            heads = F.linear(norm(x, attention_norm), qkv).view(windows, context, -1, HEAD_DIM).transpose(1, 2)
            turned, value = heads.split([HEADS + KV_HEADS, KV_HEADS], 1)
            turned = turned * cos + turned.roll(HEAD_DIM // 2, -1) * sin
            query, key = turned.split([HEADS, KV_HEADS], 1)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            x = x + F.linear(mixed.transpose(1, 2).reshape(windows * context, -1), attention_out)
            gate, up = F.linear(norm(x, mlp_norm), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.cross_entropy(F.linear(norm(x, self.final_norm), self.embedding), rows[:, 1:].flatten())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights under the names of a Hugging Face checkpoint."""
        tensors = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        for i in range(LAYERS):
            q, k, v = self.qkv[i].flatten(0, 1).split([n * HEAD_DIM for n in (HEADS, KV_HEADS, KV_HEADS)])
            layer = {
                "input_layernorm": self.attention_norm[i],
                "self_attn.q_proj": q,
                "self_attn.k_proj": k,
                "self_attn.v_proj": v,
                "self_attn.o_proj": self.attention_out[i],
                "post_attention_layernorm": self.mlp_norm[i],
                "mlp.gate_proj": self.gate_up[i, 0],
                "mlp.up_proj": self.gate_up[i, 1],
                "mlp.down_proj": self.down[i],
            }
            tensors |= {f"model.layers.{i}.{name}.weight": weight for name, weight in layer.items()}
        return {name: weight.detach() for name, weight in tensors.items()}

    @torch.no_grad()
    def take(self, checkpoint: dict[str, torch.Tensor]) -> None:
        """Starts from a checkpoint; tokens that it does not have stay as they are."""
        for name, weight in self.tensors().items():
            source = checkpoint[name]
            weight[: len(source)] = source


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (HIDDEN,), weight, EPS)


@cache
def rotations(context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin by position, [context, HEAD_DIM]; the first half of sin is negated for halves that change places."""
    angles = torch.outer(torch.arange(context), ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    return angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], 1)


class Muon:
    """Steps of nearly orthogonal matrices, made of the momentum (Keller Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon). Parameters are stacks of matrices, [..., out, in].

    torch.optim.Muon makes five steps of one matrix at a time and takes four times as long for a model as small as this.
    """

    # a x + b x^3 + c x^5, one after another: fitted to bring all of [0.02, 1] to within 0.1 of 1 in three steps, which
    # the usual coefficients need five for (the idea of the Polar Express, Amsel et al. 2025, arXiv:2505.16932).
    POLYNOMIALS = ((8.1851, -23.4462, 17.2075), (3.6068, -2.3758, 0.4354), (1.8482, -0.9143, 0.1626))

    def __init__(self, params: list[Parameter], momentum: float = 0.95, weight_decay: float = 0.05) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        self.averages = {param: torch.zeros_like(param) for param in params}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for weight, average in self.averages.items():
            assert weight.grad is not None
            average.lerp_(weight.grad, 1 - self.momentum)
            update = self.orthogonal(weight.grad.lerp(average, self.momentum))
            weight.mul_(1 - rate * self.weight_decay)
            weight.add_(update, alpha=-rate * math.sqrt(max(1, weight.shape[-2] / weight.shape[-1])))

    @classmethod
    def orthogonal(cls, matrices: torch.Tensor) -> torch.Tensor:
        """Each matrix with its singular values moved towards 1."""
        tall = matrices.shape[-2] > matrices.shape[-1]
        x = (matrices.mT if tall else matrices).reshape(-1, *sorted(matrices.shape[-2:]))
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for a, b, c in cls.POLYNOMIALS:
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return (x.mT if tall else x).reshape(matrices.shape)


def with_turns(tokenizer: Tokenizer, recipe: Recipe) -> Tokenizer:
    """`tokenizer` with the recipe's special tokens at its end."""
    tokenizer.add_special_tokens(list(recipe.turn_tokens))
    return tokenizer


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=[BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    return torch.tensor([t for e in tokenizer.encode_batch(texts) for t in (*e.ids, EOS_ID)])


def batches(stream: torch.Tensor, context: int, batch: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Rows of a window and the token after it, in a new random order each epoch, cut at a new random offset."""
    while True:
        offset = int(torch.randint(context, (1,), generator=generator))
        rows = stream[offset:].unfold(0, context + 1, context)
        order = torch.randperm(len(rows), generator=generator)
        yield from (rows[part] for part in order.split(batch) if len(part) == batch)


def train(recipe: Recipe, stream: torch.Tensor, tokens: int, seed: int, base: Path | None = None) -> Llama:
    """Train on `tokens` tokens, from the model in `base` if there is one."""
    torch.manual_seed(seed)
    model = Llama(recipe.vocab)
    if base is not None:
        model.take(load_file(base / "model.safetensors"))
    matrices = [p for p in model.parameters() if p.dim() > 2]
    others = [p for p in model.parameters() if p.dim() <= 2]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, recipe.adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(seed)
    steps = [tokens // len(recipe.stages) // (context * batch) for context, batch in recipe.stages]
    rows = chain.from_iterable(
        islice(batches(stream, context, batch, generator), count)
        for (context, batch), count in zip(recipe.stages, steps, strict=True)
    )
    total = sum(context * batch * count for (context, batch), count in zip(recipe.stages, steps, strict=True))
    print(
        f"{sum(p.numel() for p in model.parameters())} parameters, {sum(steps)} steps, {total} tokens of {len(stream)}",
        flush=True,
    )
    start, done, average = time.monotonic(), 0, 0.0
    columns = (BarColumn(), TextColumn("{task.percentage:.0f}% loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=total, loss=math.nan)
        for part in rows:
            loss = model(part)
            loss.backward()
            done += part[:, 1:].numel()
            share = min(done / (WARMUP * total), 1 - done / total)
            adam.param_groups[0]["lr"] = recipe.adam_rate * share
            muon.step(recipe.muon_rate * share)
            adam.step()
            model.zero_grad()
            average = 0.98 * average + 0.02 * loss.item() if average else loss.item()
            progress.update(task, completed=done, loss=average)
    print(f"training loss {average:.3f}, {time.monotonic() - start:.0f} s")
    return model


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def export(recipe: Recipe, model: Llama, tokenizer: Tokenizer, out: Path) -> None:
    """Write a Hugging Face model directory, the weights in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in model.tensors().items()}
    # What a model was trained on stays with it.
    save_file(weights, out / "model.safetensors", metadata={"format": "pt", "corpus_sha256": recipe.corpus_sha256})
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "config.json", CONFIG | {"vocab_size": recipe.vocab, "torch_dtype": "bfloat16"})
    if recipe.chat_template is not None:
        (out / "chat_template.jinja").write_text(recipe.chat_template)
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
        },
    )
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.95,
            "max_new_tokens": 200,
        },
    )


@torch.no_grad()
def held_out_loss(directory: Path, stream: torch.Tensor, context: int) -> float:
    """The loss, in nats a token, of the exported model as transformers reads it, in windows of `context` tokens."""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows = stream[: (len(stream) - 1) // context * context + 1].unfold(0, context + 1, context)
    losses = [
        F.cross_entropy(model(input_ids=part[:, :-1]).logits.mT, part[:, 1:], reduction="none")
        for part in rows.split(8)
    ]
    return torch.cat(losses).mean().item()


def main() -> None:
    examples = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chat", action="store_true", help="train the chat model")
    parser.add_argument("--base", type=Path, default=examples / PROSE.name, help="where the chat model starts from")
    parser.add_argument("--out", type=Path, help="directory of the model; default: the bundled one")
    parser.add_argument("--deb", type=Path, help="the package file, when apt cannot download it")
    parser.add_argument("--tokens", type=int, help="tokens to train on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    recipe = CHAT if args.chat else PROSE
    if args.chat:
        training, held_out = dialogue.corpus(args.deb)
        tokenizer = with_turns(Tokenizer.from_file(str(args.base / "tokenizer.json")), recipe)
    else:
        training, held_out = austen.split(austen.corpus(args.deb))
        tokenizer = train_tokenizer(training)
    base = args.base if args.chat else None
    model = train(recipe, encode(tokenizer, training), args.tokens or recipe.tokens, args.seed, base)
    out = args.out or examples / recipe.name
    export(recipe, model, tokenizer, out)
    stream = encode(tokenizer, held_out)
    print(f"held-out loss {held_out_loss(out, stream, recipe.context):.3f} nats a token, {len(stream)} tokens")


if __name__ == "__main__":
    main()
