"""The script that trains the example models: what it exports is what it trained, and the chat model is one."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BatchEncoding, LlamaForCausalLM

from llmc.runtime.text.tokenizer import Tokenizer as OwnTokenizer

from support.paths import ROOT

EXAMPLES = ROOT / "examples"


CHAT = EXAMPLES / "tiny-chat"
CONVERSATION = [
    {"role": "system", "content": "You are in Emma, a novel by Jane Austen."},
    {"role": "user", "content": " Will you dance? "},
    {"role": "assistant", "content": "Not I."},
    {"role": "user", "content": "Why?"},
]
RENDERED = (
    "<s><|system|>You are in Emma, a novel by Jane Austen.</s><|user|>Will you dance?</s><|assistant|>Not I.</s>"
    "<|user|>Why?</s><|assistant|>"
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("train_example_model")


@pytest.mark.parametrize("name", ["PROSE", "CHAT"])
def test_transformers_reads_the_export_as_the_model_that_was_trained(
    script: ModuleType, tmp_path: Path, name: str
) -> None:
    recipe = getattr(script, name)
    torch.manual_seed(0)
    model = script.Llama(recipe.vocab)
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape).mul(0.1).bfloat16().float()
    base = Tokenizer.from_file(str(EXAMPLES / "tiny-english" / "tokenizer.json"))
    script.export(recipe, model, script.with_turns(base, recipe), tmp_path)
    context = recipe.context
    stream = torch.randint(recipe.vocab, (2 * context + 1,))
    rows = stream.unfold(0, context + 1, context)
    assert script.held_out_loss(tmp_path, stream, context) == pytest.approx(model(rows).item(), rel=1e-5)
    bundled = EXAMPLES / recipe.name
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {path.name for path in bundled.iterdir()} - {"README.md"}
    for file in files - {"model.safetensors"}:
        assert (tmp_path / file).read_text() == (bundled / file).read_text(), file
    again = script.Llama(recipe.vocab)
    again.take(load_file(tmp_path / "model.safetensors"))
    assert all(map(torch.equal, again.parameters(), model.parameters()))


def test_the_chat_model_is_what_the_script_trains(script: ModuleType) -> None:
    with safe_open(CHAT / "model.safetensors", "pt") as file:
        assert file.metadata()["corpus_sha256"] == script.CHAT.corpus_sha256
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == {name: tuple(weight.shape) for name, weight in script.Llama(script.CHAT.vocab).tensors().items()}
    assert script.CHAT.corpus_sha256 in (CHAT / "README.md").read_text()


def test_the_template_renders_what_the_model_was_trained_on(script: ModuleType) -> None:
    own, reference = OwnTokenizer(CHAT), AutoTokenizer.from_pretrained(CHAT)
    text = own.apply_chat_template(CONVERSATION)
    assert text == RENDERED
    assert reference.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True) == text
    ids = own.encode(text, add_special_tokens=False)
    assert own.decode(ids, skip_special_tokens=False) == text
    assert [own.special_token_id(token) for token in script.CHAT.turn_tokens] == [2048, 2049, 2050]
    turns = [message["content"].strip() for message in CONVERSATION[1:]]
    trained = script.dialogue.rendered(turns, CONVERSATION[0]["content"])
    stream = script.encode(Tokenizer.from_file(str(CHAT / "tokenizer.json")), [trained]).tolist()
    assert stream == [*ids[:-1]]


@torch.no_grad()
def test_the_chat_model_answers_and_ends_its_turn() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    model = LlamaForCausalLM.from_pretrained(CHAT, dtype=torch.float32)
    for question in ("Hello!", "Who are you?", "Shall we take a walk?", "What is the capital of France?"):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert isinstance(prompt, BatchEncoding)
        answer = model.generate(**prompt, max_new_tokens=200, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert answer[-1] == tokenizer.eos_token_id, tokenizer.decode(answer)
        text = tokenizer.decode(answer[:-1])
        assert isinstance(text, str)
        assert len(text.split()) > 1
        assert all(token not in text for token in ("<s>", "</s>", "<|"))
        assert text[0].isupper()
        assert text[-1] in ".!?"


def test_conversations_are_found_in_prose(script: ModuleType) -> None:
    paragraphs = [
        "Emma was silent.",
        '"Well," said he, "we will go."',
        '"Perfectly," she said. "You are right,"',
        '"The first part of a letter',
        '"and the second."',
        "They walked on.",
        '"Nobody answers this."',
        f'{"She thought of it. " * 20} "A new conversation?"',
        '"Yes!"',
        '"it was so, he had told her--"',
        f'"{"A sentence. " * 60}"',
        '"Really?"',
    ]
    assert list(script.dialogue.conversations(paragraphs)) == [
        ["Well, we will go.", "Perfectly. You are right.", "The first part of a letter and the second."],
        ["A new conversation?", "Yes!"],
        [("A sentence. " * 33).strip(), "Really?"],
    ]


@pytest.mark.parametrize("shape", [(3, 2, 512, 192), (20, 64, 192)])
def test_steps_are_nearly_orthogonal(script: ModuleType, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    values = torch.linspace(0.3, 1, min(shape[-2:]))
    update = script.Muon.orthogonal(left * values @ right)
    torch.testing.assert_close(update, left @ right, atol=0.1, rtol=0)
    assert (torch.linalg.svdvals(update) - 1).abs().max() < 0.11


@pytest.mark.slow
def test_training_learns_and_repeats(script: ModuleType) -> None:
    stream = torch.arange(1, 5).repeat(1000)
    models = [script.train(script.PROSE, stream, 12_000, seed=3) for _ in range(2)]
    assert models[0](stream[None, :65]).item() < 4  # ln 2048 = 7.6 before
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
