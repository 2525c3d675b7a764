"""The prompts in which models that write text read a query and a document, and which of them a model's files show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from llmc.models.errors import ModelError
from llmc.models.files import read_file
from llmc.models.pooled import Task
from llmc.models.sources.tokenizer_files import NAMED_TEMPLATE_FILES

QWEN3_RERANKER = "qwen3-reranker"
# That of its authors; its default instruction is `vector_task.INSTRUCTION` of the runtime.
_JUDGE = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
RANK_TEMPLATES: Mapping[str, str] = {
    QWEN3_RERANKER: (
        f'<|im_start|>system\n{_JUDGE} Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
}
"""Templates by the name of the prompt."""
_SHOWN_BY: Mapping[str, str] = {QWEN3_RERANKER: _JUDGE}
MODEL_CARD = "README.md"
"""Converted rerankers often have their prompt nowhere else."""
_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json", "config_sentence_transformers.json",
          MODEL_CARD)  # fmt: skip
_MOST_BYTES = 16 << 20


def shows_prompt(folder: Path, prompt: str) -> bool:
    """Whether a chat template or the model card in `folder` has the first sentence of the prompt."""
    sentence = _SHOWN_BY[prompt].encode()
    return any(sentence in content for content in _contents(folder))


def prompt_name(task: Task) -> str:
    """The name that `--rank-prompt` has for the prompt of a task's pairs."""
    return next((name for name, template in RANK_TEMPLATES.items() if template == task.template), "none")


def _contents(folder: Path) -> Iterator[bytes]:
    """Those of the files that can be read: what a file of words lacks is no reason to refuse a model."""
    for file in (*(folder / name for name in _FILES), *sorted(folder.glob(NAMED_TEMPLATE_FILES))):
        try:
            yield read_file(file, _MOST_BYTES)
        except (OSError, ModelError):
            continue
