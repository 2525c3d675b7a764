"""Input ids of pairs of texts that stand in a template, as the authors of such models cut them."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from llmc.models.rank_prompts import QWEN3_RERANKER, RANK_TEMPLATES
from llmc.runtime.request_error import RequestError
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.vector_task import VectorTask

MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes, with words of three letters that begin with their space."""
    pieces, merges = [*sorted(pre_tokenizers.ByteLevel.alphabet())], []
    for first in "drs":
        merges += [("Ġ", first), (f"Ġ{first}", "e")]
        pieces += [f"Ġ{first}", f"Ġ{first}e"]
    backend = Backend(BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    path = tmp_path_factory.mktemp("words")
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({}))
    return Tokenizer(path)


def test_a_long_document_is_cut_as_by_the_authors_of_the_template(tokenizer: Tokenizer) -> None:
    """They tokenize instruction, query and document as one text, cut it, and put it between two others."""
    template, query, document = RANK_TEMPLATES[QWEN3_RERANKER], "re {document} de?", "de se re {query} de.\n"
    task = VectorTask("rank", 2, False, "softmax", (), template, 300, False)
    head, _, rest = template.partition("<Instruct>")
    tail = rest.partition("{document}")[2]
    body = f"<Instruct>: se\n<Query>: {query}\n<Document>: {document}"
    before, text, behind = (tokenizer.encode(one, add_special_tokens=False) for one in (head, body, tail))
    whole = task.pair_ids(tokenizer, query, document, "se")
    assert whole == task.pair_ids(tokenizer, query, document, "se", len(whole)) == [*before, *text, *behind]
    least = len(whole) - len(tokenizer.encode(f" {document}", add_special_tokens=False)) + 2
    for most in range(least, len(whole)):
        cut = text[: most - len(before) - len(behind)]
        assert task.pair_ids(tokenizer, query, document, "se", most) == [*before, *cut, *behind]
    with pytest.raises(RequestError, match=r"\d+ tokens leaves no room for the document beside \d+ around it: allow"):
        task.pair_ids(tokenizer, query, document, "se", least - 2)
