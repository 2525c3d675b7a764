"""LoRA adapters as PEFT writes them, of random numbers, and the models that they are merged into by the formula."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from llmc.models.loader import load_parameters
from llmc.models.sources.registry import open_source

from support.expert_adapters import add_products, is_of_parameter
from support.tiny_models import reference_model

PREFIX = "base_model.model."
EMBEDDINGS = ("embed_tokens", "embed_in", "wte")


def make_adapter(
    path: Path,
    model: Path,
    modules: Sequence[str],
    *,
    rank: int = 4,
    seed: int = 0,
    size: float = 1.0,
    ranks: Mapping[str, int] | None = None,
    **config: Any,
) -> Path:
    """Saves an adapter of the modules of `model` whose names end in one of `modules`. ranks: by such an end, where they
    differ; size: of its products, of a weight's about."""
    rng, tensors = np.random.default_rng(seed), dict[str, NDArray[np.float32]]()
    for name, (rows, columns) in linears_of(model).items():
        end = next((end for end in modules if name.endswith(end)), None)
        if end is None:
            continue
        r = (ranks or {}).get(end, rank)
        a, b = rng.standard_normal((r, columns)), rng.standard_normal((rows, r))
        is_embedding = name.endswith(EMBEDDINGS)
        names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight")
        small = 1.0 if is_embedding else columns**-0.5
        tensors[f"{PREFIX}{name}.{names[0]}"] = (a * small).astype(np.float32)
        tensors[f"{PREFIX}{name}.{names[1]}"] = (b * size * r**-0.5).astype(np.float32)
        if name.endswith((*EMBEDDINGS, "lm_head")):
            # PEFT saves it, too; nothing reads it.
            tensors[f"{PREFIX}{name}.base_layer.weight"] = np.zeros((1, 1), np.float32)
    assert tensors
    path.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "rank_pattern": dict(ranks or {}), **config}
    if ranks:
        settings["alpha_pattern"] = dict(ranks)
    (path / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def linears_of(model: Path) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each linear layer of transformers' model and of the embedding, and of each expert's of the
    checkpoint."""
    found = {}
    for name, module in reference_model(model).named_modules():
        if name.endswith(EMBEDDINGS):
            found[name] = (module.embedding_dim, module.num_embeddings)
        if isinstance(module, torch.nn.Linear):
            found[name] = (module.out_features, module.in_features)
        elif type(module).__name__ == "Conv1D":
            found[name] = (module.weight.shape[1], module.weight.shape[0])
    for name, tensor in load_file(model / "model.safetensors").items():
        if ".experts." in name and name.endswith(".weight"):
            found[name.removesuffix(".weight")] = tensor.shape
    return found


def merged_model(model: Path, adapter: Path | None, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model with an adapter's products added to its weights, in float64. A head that is tied to the
    embedding is untied, as an adapter of one leaves the other alone."""
    if adapter is None:
        return reference_model(model, dtype)
    products = products_of(adapter)
    experts = {name: products.pop(name) for name in list(products) if ".experts." in name}
    found = _with_experts(model, experts, dtype) if experts else reference_model(model, dtype)
    modules = dict(found.named_modules())
    for name, change in products.items():
        changed, product = modules[name], torch.from_numpy(change)
        if changed is found.get_output_embeddings() or name.endswith(EMBEDDINGS):
            changed.weight = torch.nn.Parameter(changed.weight.detach().clone())
        weight = changed.weight
        with torch.no_grad():
            turned = product.T if tuple(weight.shape) != tuple(product.shape) else product
            # A square matrix of Conv1D lies turned, too.
            if type(changed).__name__ == "Conv1D" or name.endswith(EMBEDDINGS):
                turned = product.T
            weight.copy_((weight.double() + turned).to(weight.dtype))
    add_products(found, adapter)
    return found


def merged_values(model: Path, *adapters: Path) -> dict[str, NDArray[np.float32]]:
    """What llmc makes of a model with adapters merged: its parameters, by llmc's names."""
    source = open_source(model, adapters)
    return {p.name: p.value() for p in load_parameters(source.config(), source.checkpoint(), "f32")}


def products_of(adapter: Path) -> dict[str, NDArray[np.float64]]:
    """scale · B A of each module."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors, found = load_file(adapter / "adapter_model.safetensors"), {}
    for name in tensors:
        module, kind, end = name.partition(".lora_A" if ".lora_A" in name else ".lora_embedding_A")
        if not kind or is_of_parameter(module.removeprefix(PREFIX), config.get("target_parameters", ())):
            continue
        other = f"{module}{kind[:-1]}B{end}"
        a, b = tensors[name].astype(np.float64), tensors[other].astype(np.float64)
        of_module = next((v for end, v in config.get("alpha_pattern", {}).items() if module.endswith(end)), None)
        rank = len(a) ** (0.5 if config.get("use_rslora") else 1.0)
        scale = (config["lora_alpha"] if of_module is None else of_module) / rank
        found[module.removeprefix(PREFIX)] = scale * (b @ a)
    return found


def _with_experts(model: Path, products: Mapping[str, NDArray[np.float64]], dtype: torch.dtype) -> Any:
    """transformers' model of the checkpoint with products added to its experts, which its class holds as one tensor."""
    with TemporaryDirectory() as folder:
        return reference_model(merged_checkpoint(Path(folder) / "model", model, products), dtype)


def merged_checkpoint(path: Path, model: Path, products: Mapping[str, NDArray[np.float64]]) -> Path:
    """Saves the checkpoint at `model` with products added to its linear layers of these names and its embedding."""
    shutil.copytree(model, path)
    tensors = load_file(model / "model.safetensors")
    for name, product in products.items():
        weight = tensors[f"{name}.weight"]
        product = product.T if name.endswith(EMBEDDINGS) else product
        tensors[f"{name}.weight"] = (weight.astype(np.float64) + product).astype(weight.dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def logprobs_of(model: Any, tokens: list[int]) -> NDArray[np.float64]:
    """Log-probabilities [T, V] after each token."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double()
    found: NDArray[np.float64] = torch.log_softmax(logits, -1).numpy()
    return found
