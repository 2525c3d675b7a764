"""Images in prompts: what encoding costs, and what it costs others.

    python -m bench.bench_images model SHAPE DIR            # a checkpoint of random weights that sees images
    llmc compile DIR --images -o MODEL.llmc
    python -m bench.bench_images encode DIR TOWER.llmc [--sizes 448x448,1024x768] [--rounds 5] [--threads N] [--json]
    python -m bench.bench_images beside MODEL.llmc TOWER.llmc [--size 1024x768] [--threads N] [--json]

`encode` times the tower on pictures of noise, in turns with transformers and the same weights in bf16 where the
machine multiplies those. A round's ratio is transformers over llmc; medians and ranges over rounds are printed, and
operations per second as a fraction of what the machine multiplies in that round. `beside` decodes one sequence and
times its steps while images are encoded on other threads, and while none is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.images.form import ImageForm
from llmc.images.kinds.registry import kind_of
from llmc.manifest import read_manifest
from llmc.runtime.binding import Artifact, Engine, SamplingParams
from llmc.runtime.binding.encoder import Encoder
from llmc.runtime.binding.machine_limits import Probe
from llmc.runtime.images.patches import Patches, patches_of

_QWEN_EYES = {
    "depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12, "patch_size": 16,
    "out_hidden_size": 1024, "num_position_embeddings": 2304, "deepstack_visual_indexes": [],
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5",
        "vision_config": _QWEN_EYES,
        "text_config": {
            "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "tie_word_embeddings": True,
            "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        },
    },
    "smolvlm-500m": {
        "model_type": "smolvlm",
        "scale_factor": 4,
        "vision_config": {
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
            "image_size": 512, "patch_size": 16,
        },
        "text_config": {
            "model_type": "llama", "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
            "num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 49280,
        },
    },
}  # fmt: skip
_PREPROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"size": {"shortest_edge": 65536, "longest_edge": 1 << 22}, "patch_size": 16},
    "smolvlm": {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
}
_PLACEHOLDER = 9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    model = parts.add_parser("model")
    model.add_argument("shape", choices=SHAPES)
    model.add_argument("folder", type=Path)
    encode = parts.add_parser("encode")
    encode.add_argument("folder", type=Path)
    encode.add_argument("tower", type=Path)
    encode.add_argument("--sizes", default="448x448,1024x768")
    encode.add_argument("--rounds", type=int, default=5)
    beside = parts.add_parser("beside")
    beside.add_argument("model", type=Path)
    beside.add_argument("tower", type=Path)
    beside.add_argument("--size", default="1024x768")
    for part in (encode, beside):
        part.add_argument("--threads", type=int, default=2)
        part.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.what == "model":
        write_model(given.shape, given.folder)
        return 0
    found = measure_encoding(given) if given.what == "encode" else measure_beside(given)
    print(json.dumps(found, indent=1) if given.json else "\n".join(lines_of(found)))
    return 0


def lines_of(found: dict[str, dict[str, Any]]) -> list[str]:
    return [f"{name:<14}" + "  ".join(f"{key} {value}" for key, value in row.items()) for name, row in found.items()]


def write_model(shape: str, folder: Path) -> None:
    """Saves a random model of this shape, by transformers."""
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = dict(SHAPES[shape])
    kind = fields.pop("model_type")
    config = CONFIG_MAPPING[kind](**fields, image_token_id=_PLACEHOLDER)
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSORS[kind]))


def form_of(tower: Path) -> ImageForm:
    return ImageForm.from_json(read_manifest(tower)["images"])


def tiles_of_noise(form: ImageForm, size: str) -> list[Patches]:
    """What the tower reads of a picture of noise."""
    width, height = map(int, size.split("x"))
    random, tiling = np.random.default_rng(0), kind_of(form).tiling(width, height)
    found = []
    for tile in tiling.tiles:
        pixels = random.standard_normal((form.channels, tile.size[1], tile.size[0]), np.float32)
        found.append(patches_of(pixels, tile, form))
    return found


def operations(config: dict[str, Any], tiles: list[Patches]) -> float:
    """Multiplications and additions of the layers for these tiles."""
    size, inner = config["hidden_size"], config["intermediate_size"]
    layers = config.get("depth") or config["num_hidden_layers"]
    total = 0.0
    for tile in tiles:
        count = len(tile.places)
        total += layers * 2.0 * count * (4 * size * size + 2 * size * inner + 2 * count * size)
    return total


def measure_encoding(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By size of the picture."""
    import torch

    torch.set_num_threads(given.threads)
    form, reference = form_of(given.tower), ReferenceTower(given.folder)
    found: dict[str, dict[str, Any]] = {}
    with Artifact(given.tower) as artifact:
        encoder = Encoder(artifact, num_threads=given.threads, idle_spin_us=0)
    for size in given.sizes.split(","):
        tiles = tiles_of_noise(form, size)
        work, ours, theirs, shares = operations(reference.vision, tiles), [], [], []
        for round_ in range(given.rounds + 1):
            begin = time.perf_counter()
            for tile in tiles:
                encoder.encode(tile.values, tile.places, tile.first)
            middle = time.perf_counter()
            reference.encode(tiles, form)
            end = time.perf_counter()
            if not round_:
                continue  # warms up
            ours.append(middle - begin)
            theirs.append(end - middle)
            with Probe(given.threads) as probe:
                rate = probe.measure("bf16", 0.3) or probe.measure("f32", 0.3)
            shares.append(work / ours[-1] / rate if rate else 0.0)
        ratios = [other / own for own, other in zip(ours, theirs, strict=True)]
        found[size] = {
            "patches": sum(len(tile.places) for tile in tiles),
            "rows": sum(len(tile.first) for tile in tiles),
            "llmc_ms": round(1e3 * statistics.median(ours), 1),
            "transformers_ms": round(1e3 * statistics.median(theirs), 1),
            "ratio": round(statistics.median(ratios), 2),
            "of": [round(min(ratios), 2), round(max(ratios), 2)],
            "of_limit": round(statistics.median(shares), 2),
        }
    encoder.close()
    return found


class ReferenceTower:
    """transformers' tower with the checkpoint's weights."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForImageTextToText

        model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
        self._whole = model.model
        self.vision: dict[str, Any] = json.loads((folder / "config.json").read_text())["vision_config"]
        self._torch = torch

    def encode(self, tiles: list[Patches], form: ImageForm) -> None:
        torch = self._torch
        with torch.inference_mode():
            for tile in tiles:
                values: NDArray[np.float32] = tile.values[:, : form.patch_width]
                if form.frames > 1:
                    side = int(len(tile.places) ** 0.5)  # its proportions change no time
                    while len(tile.places) % side or side % form.merge or len(tile.places) // side % form.merge:
                        side -= 1
                    grid = torch.tensor([[1, side, len(tile.places) // side]])
                    self._whole.get_image_features(torch.from_numpy(values).to(torch.bfloat16), grid)
                else:
                    side = int(len(tile.places) ** 0.5) * form.patch_size
                    pixels = torch.from_numpy(values.reshape(1, 1, form.channels, side, side)).to(torch.bfloat16)
                    self._whole.get_image_features(pixels)


def measure_beside(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Milliseconds of the steps of a sequence that decodes: alone, and while images are encoded."""
    form = form_of(given.tower)
    tiles, stop, encoded = tiles_of_noise(form, given.size), threading.Event(), []
    with Artifact(given.tower) as artifact:
        encoder = Encoder(artifact, num_threads=given.threads, pin_threads=False, idle_spin_us=0)
    with Artifact(given.model) as artifact:
        engine = Engine(artifact, num_threads=given.threads, max_num_seqs=1)
        prompt = np.random.default_rng(0).integers(10, artifact.info.vocab_size, 64)
    engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True))

    def steps(count: int) -> list[float]:
        found = []
        for _ in range(count):
            begin = time.perf_counter()
            engine.step()
            engine.poll()
            found.append(1e3 * (time.perf_counter() - begin))
        return found

    def encode() -> None:
        while not stop.is_set():
            begin = time.perf_counter()
            for tile in tiles:
                encoder.encode(tile.values, tile.places, tile.first)
            encoded.append(1e3 * (time.perf_counter() - begin))

    steps(20)
    alone = steps(100)
    thread = threading.Thread(target=encode)
    thread.start()
    beside = steps(200)
    stop.set()
    thread.join()
    engine.close()
    encoder.close()

    def row(times: list[float]) -> dict[str, Any]:
        return {
            "median_ms": round(statistics.median(times), 2),
            "p99_ms": round(sorted(times)[int(0.99 * (len(times) - 1))], 2),
            "most_ms": round(max(times), 2),
        }

    return {"steps alone": row(alone), "beside images": row(beside), "an image": row(encoded)}


if __name__ == "__main__":
    raise SystemExit(main())
