"""Tiny random models that see images, with all that a chat needs: tokenizer, chat template, files of processors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from llmc.compiler.config import CompileConfig
from llmc.compiler.images import compile_with_images

from support.towers import PLACEHOLDER, make_seeing

PLACEHOLDERS = {"smolvlm": "<image>", "mistral3": "[IMG]", "qwen3_vl": "<|image_pad|>"}
_SPECIAL = {
    "smolvlm": (
        *("<pad>", "<s>", "</s>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<user>"),
        *("<image>", *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))),
    ),
    "mistral3": ("<pad>", "<s>", "</s>", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]", "[IMG]"),
    "qwen3_vl": (
        *("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    ),
}
_TEMPLATES = {
    "smolvlm": (
        "{% for message in messages %}{{ message['role'] | capitalize }}"
        "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
    "mistral3": (
        "<s>{% for message in messages %}{% if message['role'] == 'assistant' %}{{ message['content'] }}</s>"
        "{% else %}[INST]{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for block in message['content'] %}{% if block['type'] == 'text' %}{{ block['text'] }}"
        "{% elif block['type'] in ['image', 'image_url'] %}[IMG]{% endif %}{% endfor %}{% endif %}[/INST]{% endif %}"
        "{% endfor %}"
    ),
    "qwen3_vl": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for content in message.content %}"
        "{% if content.type == 'image' or 'image' in content or 'image_url' in content %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content.text }}{% endif %}"
        "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
}
"""As those of the published models."""


@dataclass(frozen=True)
class Seeing:
    """A model of a family, and its two artifacts."""

    family: str
    model: Path
    text: Path
    tower: Path

    @property
    def placeholder(self) -> str:
        return PLACEHOLDERS[self.family]


def compile_seeing_chat(folder: Path, family: str, cache: Path) -> Seeing:
    """Makes such a model in `folder`, and compiles it."""
    model = make_seeing_chat(folder / "model", family)
    config = CompileConfig(
        model, folder / "m.llmc", buckets="prefill=[1,2]x[64,256],decode=[1,4]x[512],mixed=[4]x[64]", dtype="f32",
        max_model_len=512, cache_dir=cache, jobs=1,
    )  # fmt: skip
    text, tower = (report.artifact for report in compile_with_images(config))
    return Seeing(family, model, text, tower)


def make_seeing_chat(path: Path, family: str, **options: Any) -> Path:
    """Saves such a model. family: one of `PLACEHOLDERS`. Its pictures are cut into tiles of 48 pixels, where tiles they
    are."""
    make_seeing(path, family, max_position_embeddings=2048, **options)
    names = _SPECIAL[family]
    assert names[PLACEHOLDER] == PLACEHOLDERS[family]
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({name: number for number, name in enumerate((*names, *letters))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(path / "tokenizer.json"))
    told = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": _TEMPLATES[family]}
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    if family == "smolvlm":
        pictures = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 48}}
        (path / "preprocessor_config.json").write_text(json.dumps(pictures))
    return path
