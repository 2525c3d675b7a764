"""The references that are made of the code have all of it."""

from __future__ import annotations

import re

import pytest

from docs.site import c_reference, cli_reference, http_reference, python_reference
from llmc.cli.main import SUMMARIES

from support.paths import ROOT


def section(page: str, title: str) -> str:
    """The text below a heading, up to the next of its level or above."""
    found = re.search(
        rf"^#+ {re.escape(title)}(?: {{[^\n]*}})?\n(.*?)(?=^#{{1,3}} |\Z)", page, re.DOTALL | re.MULTILINE
    )
    assert found, title
    return found[1]


def test_every_command_has_its_options_defaults_and_examples() -> None:
    page = cli_reference.page()
    groups = {name.split()[0] for name in SUMMARIES if " " in name}
    assert set(re.findall(r"^## llmc (.*)$", page, re.MULTILINE)) == SUMMARIES.keys() - groups
    serve = section(page, "llmc serve")
    assert "| `--port N` | `8000` | Port to listen on; 0: any free one. `≥ 0` `≤ 65535` |" in serve
    assert "| `--pin`, `--no-pin` | on |" in serve
    assert "| `--allowed-methods METHOD` | `*` |" in serve
    assert r"| `--generation-config auto\|none` | `auto` |" in serve
    assert "```sh\nllmc serve qwen.llmc\n" in serve
    quantize = section(page, "llmc quantize")
    assert "| `--window N` | `256` | Tokens per window. `≥ 2` |" in quantize
    assert "Graph cache. Also from `LLMC_CACHE_DIR`. |" in quantize
    assert "| `MODEL` | required |" in section(page, "llmc compile")


def test_every_route_has_its_fields_and_statuses() -> None:
    page = http_reference.page()
    written: set[str] = set()
    for file in (ROOT / "runtime/server/routes").glob("*.py"):
        for method, path, rest in re.findall(r'@routes\.(\w+)\("([^"]+)"(.*)', file.read_text(encoding="utf-8")):
            if "include_in_schema=False" not in rest:  # another path of the route below
                written.add(f"{method.upper()} {path.replace(':path', '')}")
    assert len(written) > 20
    assert set(re.findall(r"^### ((?:GET|POST|DELETE) .*)$", page, re.MULTILINE)) == written
    chat = section(page, "POST /v1/chat/completions")
    assert "[ChatRequest](#ChatRequest)" in chat
    assert "`429`" in chat
    fields = section(page, "ChatRequest")
    assert "| `temperature` | number from 0 to 100 or null |  |" in fields
    assert re.search(r"\| `messages` \| list of 1 or more: .* \| required \|", fields)
    assert "| `echo` | refused unless empty |" in fields
    assert re.search(r"\| `404` \| There is no such model\. \|", section(page, "Statuses"))


def test_links_of_the_http_reference_lead_to_objects() -> None:
    page = http_reference.page()
    links, anchors = (set(re.findall(pattern, page)) for pattern in (r"\]\(#(\w+)\)", r"\{ #(\w+) \}"))
    assert links <= anchors
    assert len(links) > 50


def test_every_function_of_the_header_is_described() -> None:
    page = c_reference.page(ROOT)
    header = (ROOT / c_reference.HEADER).read_text(encoding="utf-8")
    functions = re.findall(r"^LLMC_API [^;(]*?\b(llmc_\w+)\(", header, re.MULTILINE | re.DOTALL)
    assert len(functions) > 40
    assert set(functions) <= set(re.findall(r"^### (\w+) \{", page, re.MULTILINE))
    submit = section(page, "llmc_engine_submit")
    assert "```c\nLLMC_API llmc_status llmc_engine_submit(llmc_engine *engine," in submit
    assert "Any thread may call submit" in submit
    assert "[`LLMC_ERR_CORRUPT`](#LLMC_OK)" in section(page, "llmc_artifact_verify")
    # No comment and no declaration is lost.
    for comment in re.findall(r"/\*.*?\*/", header, re.DOTALL):
        for word in re.findall(r"[a-zA-Z]\w+", comment.replace("LLMC_LLMC_H_", "")):
            assert word in page.replace("\\", "") or word.capitalize() in page, comment


@pytest.mark.parametrize("wrong", ["int llmc_lost(void);\n", "enum {\n  LLMC_A = 0\n"])
def test_what_is_no_declaration_is_an_error(wrong: str) -> None:
    with pytest.raises(c_reference.HeaderError, match=r"llmc_lost|does not end"):
        list(c_reference.sections(wrong))


def test_python_has_signatures_and_docstrings() -> None:
    page = python_reference.page()
    assert "    miss_policy: MissPolicy = 'larger',\n" in section(page, "LLM")
    assert "    logit_bias: Mapping[int, float] = {},\n" in section(page, "SamplingParams")
    for title in ("LLM.generate", "LLM.embed", "AsyncLLM.stream", "Guided.json_schema", "RequestOutput"):
        assert f"# {title} {{" in page
    assert "async def stream(" in page
    assert "`max_model_len`: " not in page.partition("### RequestOutput")[2]


def test_a_name_without_a_section_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.__all__", ["LLM", "Novelty"])
    with pytest.raises(python_reference.UnlistedError, match="llmc exports Novelty: give it a section"):
        python_reference.page()
