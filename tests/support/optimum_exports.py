"""Exports a tiny random model by Optimum, in an environment that has it: python optimum_exports.py FAMILY FOLDER.

`python optimum_exports.py --stored FOLDER` writes the graphs of tests/models/optimum anew.

It imports nothing of llmc's tests: Optimum wants another transformers than they do.
"""

from __future__ import annotations

import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 96, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
GPT: dict[str, Any] = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 96}
DECODERS: dict[str, dict[str, Any]] = {
    "arcee": {},
    "codegen": {**GPT, "rotary_dim": 4},
    "cohere": {},
    "falcon": {"multi_query": True, "alibi": False, "num_hidden_layers": 1},
    "gemma": {},
    "gemma2": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16, "num_hidden_layers": 7},
    "glm": {},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    "gpt_neox": {},
    "gptj": {**GPT, "rotary_dim": 4},
    "granite": {},
    "helium": {},
    "llama": {},
    "mistral": {"sliding_window": None},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "opt": {"word_embed_proj_dim": 48, "ffn_dim": 80},
    "phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {"num_hidden_layers": 4},
    "stablelm": {"partial_rotary_factor": 0.5},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "camembert": {"max_position_embeddings": 98},
    "distilbert": {"dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 48},
    "modernbert": {"num_hidden_layers": 3, "local_attention": 14, "cls_token_id": 2, "sep_token_id": 3},
    "roberta": {"max_position_embeddings": 98},
    "xlm-roberta": {"max_position_embeddings": 98},
}
STORED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert_optimised": ("bert", {"optimize": "O2"}),
    "distilbert_labels": ("distilbert", {"task": "text-classification"}),
    "falcon": ("falcon", {}),
    "gemma_f16": ("gemma", {"dtype": "fp16"}),
    "gpt2_optimised": ("gpt2", {"optimize": "O2"}),
    "modernbert_labels": ("modernbert", {"task": "text-classification"}),
}
"""Graphs of tests/models/optimum: family and options of Optimum."""
SMALL: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "max_position_embeddings": 48, "n_embd": 16, "n_head": 2, "n_positions": 48,
    "dim": 16, "hidden_dim": 24, "n_heads": 2,
}  # fmt: skip


def export(family: str, folder: Path, sizes: Mapping[str, Any] | None = None, **options: Any) -> None:
    """sizes: in place of the usual ones. options: of Optimum."""
    import torch
    from optimum.exporters.onnx import main_export
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    writes = family in DECODERS
    kind = CONFIG_MAPPING[family]
    known = set(inspect.signature(kind.__init__).parameters)
    fields = {**SIZES, **(DECODERS | ENCODERS)[family], **(sizes or {})}
    torch.manual_seed(0)
    config = kind(**{name: value for name, value in fields.items() if name in known})
    task = options.pop("task", "text-generation-with-past" if writes else "feature-extraction")
    scores = task == "text-classification"
    kind_of_model = AutoModelForCausalLM if writes else AutoModelForSequenceClassification if scores else AutoModel
    model = kind_of_model.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith(".weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    if options.get("dtype") == "fp16":
        model = model.half()
    source = folder / "source"
    model.save_pretrained(source)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(fields["vocab_size"])}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w3", "pad_token": "w0"})
    )
    main_export(str(source), str(folder / "exported"), task=task, do_validation=False, **options)


def store(folder: Path) -> None:
    """Replaces folder/NAME/model.onnx, without its statements on intermediate values, and config.json."""
    import onnx

    for name, (family, options) in STORED.items():
        with tempfile.TemporaryDirectory() as made:
            export(family, Path(made), SMALL, **options)
            exported, kept = Path(made, "exported"), folder / name
            kept.mkdir(exist_ok=True)
            model = onnx.load(exported / "model.onnx")
            del model.graph.value_info[:]
            onnx.save(model, kept / "model.onnx")
            shutil.copy(exported / "config.json", kept)


if __name__ == "__main__":
    if sys.argv[1] == "--stored":
        store(Path(sys.argv[2]))
    else:
        export(sys.argv[1], Path(sys.argv[2]))
