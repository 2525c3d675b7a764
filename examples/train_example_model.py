"""Train the bundled example model: a small Llama on the novels of Jane Austen (public domain).

The text comes from the Debian package ``r-cran-janeaustenr``; it is read without R. Needs ``apt-get`` and
``dpkg-deb`` (or the package file, given with ``--deb``), torch, transformers, tokenizers and safetensors:

    python examples/train_example_model.py --out examples/tiny-english
"""

import argparse
import hashlib
import json
import math
import re
import struct
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

PACKAGE = "r-cran-janeaustenr"
VERSION = "1.0.0-1"
DATABASE = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
CORPUS_SHA256 = "d8036a4b1f33871556368e388bd5350d8924f5e0a8f6d46e8804f822fb294387"

VOCAB = 2048
BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
CONTEXT = 256
# A passage takes consecutive paragraphs until it has this many characters.
PASSAGE_CHARS = 240
# One block of passages in every HELD_OUT_EVERY is kept for evaluation.
BLOCK, HELD_OUT_EVERY = 20, 32

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}


def fetch_package(directory: Path) -> Path:
    """Download the pinned package with apt."""
    subprocess.run(["apt-get", "download", f"{PACKAGE}={VERSION}"], cwd=directory, check=True)
    return next(directory.glob(f"{PACKAGE}_*.deb"))


def read_database(deb: Path, directory: Path) -> bytes:
    subprocess.run(["dpkg-deb", "-x", str(deb), str(directory)], check=True)
    return (directory / DATABASE).read_bytes()


def r_strings(data: bytes) -> list[str]:
    """Read one serialized R character vector (XDR format, version 2 or 3)."""
    if data[:2] != b"X\n":
        raise ValueError("not an XDR serialization")
    pos = 14
    if struct.unpack_from(">i", data, 2)[0] == 3:  # version 3 names the native encoding
        pos += 4 + struct.unpack_from(">i", data, pos)[0]
    flags, count = struct.unpack_from(">ii", data, pos)
    if flags & 0xFF != 16:
        raise ValueError(f"not a character vector: type {flags & 0xFF}")
    pos += 8
    lines = []
    for _ in range(count):
        size = struct.unpack_from(">i", data, pos + 4)[0]
        pos += 8
        raw = data[pos : pos + max(size, 0)]
        pos += max(size, 0)
        lines.append(raw.decode("utf-8"))
    return lines


def books(database: bytes) -> Iterator[list[str]]:
    """The lines of each novel: entries are a big-endian length and a zlib stream."""
    pos = 0
    while pos < len(database):
        stream = zlib.decompressobj()
        data = stream.decompress(database[pos + 4 :])
        if len(data) != struct.unpack_from(">I", database, pos)[0]:
            raise ValueError("unexpected length of a database entry")
        pos = len(database) - len(stream.unused_data)
        yield r_strings(data)


def clean(lines: list[str]) -> list[str]:
    """Unwrap paragraphs; drop headings, contents and other lines that are not prose."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        text = " ".join(block.split()).replace("_", "")
        text = text.translate(str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'"}))
        text = re.sub(r"\s*(--+|\u2014)\s*", "--", text)
        if re.match(r"(chapter|volume|vol\.|letter)\b.{0,12}$|finis|the end\b|by jane austen", text, re.I):
            continue
        if len(text) < 12 or text.upper() == text or not re.search(r"[.!?,;:\"'-]$", text):
            continue
        paragraphs.append(text)
    return paragraphs


def passages(paragraphs: list[str]) -> list[str]:
    result: list[str] = []
    current: list[str] = []
    for paragraph in paragraphs:
        current.append(paragraph)
        if sum(map(len, current)) >= PASSAGE_CHARS:
            result.append("\n".join(current))
            current = []
    return result + (["\n".join(current)] if current else [])


def corpus(deb: Path | None) -> list[str]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        database = read_database(deb or fetch_package(directory), directory)
    texts = [passage for lines in books(database) for passage in passages(clean(lines))]
    digest = hashlib.sha256("\n\n".join(texts).encode()).hexdigest()
    print(f"corpus: {len(texts)} passages, {sum(map(len, texts))} characters, sha256 {digest}")
    if digest != CORPUS_SHA256:
        raise ValueError("the corpus differs from the recorded one")
    return texts


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    parts: tuple[list[str], list[str]] = ([], [])
    for i, text in enumerate(texts):
        parts[i // BLOCK % HELD_OUT_EVERY == HELD_OUT_EVERY // 2].append(text)
    return parts


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


def loss_of(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, stream: torch.Tensor, windows: int | None = None) -> float:
    model.eval()
    rows = stream[: (len(stream) - 1) // CONTEXT * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)[:windows]
    total = sum(loss_of(model, part).item() * len(part) for part in rows.split(8))
    model.train()
    return total / len(rows)


def batches(stream: torch.Tensor, batch: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Windows in a new random order each epoch, cut at a new random offset."""
    while True:
        offset = int(torch.randint(CONTEXT, (1,), generator=generator))
        rows = stream[offset:].unfold(0, CONTEXT + 1, CONTEXT)
        order = torch.randperm(len(rows), generator=generator)
        yield from (rows[part] for part in order.split(batch) if len(part) == batch)


def train(stream: torch.Tensor, held: torch.Tensor, args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).float().train()
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(stream)} training tokens", flush=True)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.97),
        fused=True,
    )
    warmup = max(1, args.steps // 25)
    source = batches(stream, args.batch, torch.Generator().manual_seed(args.seed))
    start, smooth = time.monotonic(), 0.0
    for step in range(args.steps):
        cosine = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, args.steps - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min((step + 1) / warmup, 0.02 + 0.98 * cosine)
        loss = loss_of(model, next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            line = f"step {step + 1} loss {smooth:.3f} {time.monotonic() - start:.0f}s"
            if (step + 1) % 500 == 0:
                line += f" held-out {held_out_loss(model, held, 32):.3f}"
            print(line, flush=True)
    return model


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "config.json", CONFIG | {"torch_dtype": "bfloat16"})
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
            "temperature": 0.7,
            "top_p": 0.95,
            "max_new_tokens": 200,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny-english")
    parser.add_argument("--deb", type=Path, help="the package file, when apt cannot download it")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=4, help="windows of 256 tokens in a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    training, held = split(corpus(args.deb))
    tokenizer = train_tokenizer(training)
    held_stream = encode(tokenizer, held)
    model = train(encode(tokenizer, training), held_stream, args)
    export(model, tokenizer, args.out)
    model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    print(f"held-out loss {held_out_loss(model, held_stream):.3f} nats per token, {len(held_stream)} tokens")


if __name__ == "__main__":
    main()
