"""The conversations in Jane Austen's novels, as turns of a user and an assistant.

Nothing is written for the purpose: a turn is what a paragraph of a novel has in quotation marks, less the words of the
narrator. Paragraphs of speech that follow one another are taken for speakers who answer one another.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import austen

DIALOGUE_SHA256 = "a3dda46f80da88d01061abdb5f467d427da37a091c397b3530c42c44f625d7b5"

# A longer turn is cut after its last sentence that fits: an answer should come to an end.
MAX_TURN_CHARS = 400
# A paragraph with more narration starts another conversation.
MAX_NARRATION_CHARS = 160
MAX_TURNS = 12
TITLES = ("Emma", "Mansfield Park", "Northanger Abbey", "Persuasion", "Pride and Prejudice", "Sense and Sensibility")

Turns = list[str]

SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
END = "</s>"  # ends a turn; the tokenizer of tiny-english has it already
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
{%- if message.role not in ("system", "user", "assistant") %}
{{- raise_exception("a message's role is " ~ message.role ~ ": use system, user or assistant") }}
{%- endif %}
{{- "<|" ~ message.role ~ "|>" ~ message.content | trim ~ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|>" }}{% endif -%}
"""


def speech(paragraph: str) -> tuple[str, int, bool]:
    """What is said in a paragraph, the characters of narration beside it, and whether the speech goes on after it."""
    parts = paragraph.split('"')
    said = ""
    for i in range(1, len(parts), 2):
        part = parts[i].strip()
        # "Well," she said. "You are…": the narrator's full stop was the speaker's.
        if said.endswith(",") and part[:1].isupper() and re.search(r"[.!?]\s*$", parts[i - 1]):
            said = said[:-1] + "."
        said = f"{said} {part}".strip()
    return said, sum(map(len, parts[::2])), len(parts) % 2 == 0


def finished(turn: str) -> str:
    """A turn that ends as a sentence does, cut if it is long."""
    if len(turn) > MAX_TURN_CHARS:
        ends = [found.end() for found in re.finditer(r"[.!?](?=\s+[A-Z])", turn[:MAX_TURN_CHARS])]
        turn = turn[: max(ends, default=0)]
    turn = re.sub(r"[\s,;:-]+$", "", turn)
    return turn if not turn or turn[-1] in ".!?'" else turn + "."


def conversations(paragraphs: list[str]) -> Iterator[Turns]:
    """Runs of at least two turns."""
    turns: Turns = []
    goes_on = False
    for paragraph in paragraphs:
        said, narration, open_end = speech(paragraph)
        if goes_on and paragraph.startswith('"') and turns:
            turns[-1] += f" {said}"
        else:
            # What starts in small letters is mostly speech that the narrator retells.
            spoken = said[:1].isupper()
            if not spoken or narration > MAX_NARRATION_CHARS:
                yield from whole(turns)
                turns = []
            if spoken:
                turns.append(said)
        goes_on = open_end
    yield from whole(turns)


def whole(turns: Turns) -> Iterator[Turns]:
    """The parts of a run whose every turn has at least a word left, at most MAX_TURNS turns each."""
    part: Turns = []
    for turn in [*map(finished, turns), ""]:
        if turn and len(part) < MAX_TURNS:
            part.append(turn)
            continue
        if len(part) > 1:
            yield part
        part = [turn] if turn else []


def rendered(turns: Turns, system: str | None) -> str:
    """The turns as TEMPLATE renders them, the first one the user's, without the tokens before the first and after the
    last."""
    roles = [] if system is None else [SYSTEM]
    roles += [ASSISTANT if i % 2 else USER for i in range(len(turns))]
    texts = turns if system is None else [system, *turns]
    return END.join(role + text for role, text in zip(roles, texts, strict=True))


def corpus(deb: Path | None) -> tuple[list[str], list[str]]:
    """Conversations as a chat template renders them, for training and held out; the passages that austen.split holds
    out are where the latter come from. Each conversation also starts at its second turn, so that every turn but the
    first is an answer; every other one names its novel in a system message."""
    parts: tuple[list[str], list[str]] = ([], [])
    num_passages = 0
    for title, novel in zip(TITLES, austen.novels(deb), strict=True):
        # Neighbours of the same part are read as one text.
        runs: list[tuple[bool, list[str]]] = []
        for passage in austen.passages(novel):
            held_out = austen.is_held_out(num_passages)
            num_passages += 1
            if not runs or runs[-1][0] != held_out:
                runs.append((held_out, []))
            runs[-1][1].extend(passage.split("\n"))
        for held_out, paragraphs in runs:
            for i, turns in enumerate(conversations(paragraphs)):
                for start in (0, 1) if len(turns) > 2 else (0,):
                    system = f"You are in {title}, a novel by Jane Austen." if (i + start) % 2 else None
                    parts[held_out].append(rendered(turns[start:], system))
    digest = hashlib.sha256("\n\n".join([*parts[0], *parts[1]]).encode()).hexdigest()
    sizes = ", ".join(f"{len(part)} conversations of {sum(map(len, part))} characters" for part in parts)
    print(f"dialogues: {sizes} (held out), sha256 {digest}")
    if digest != DIALOGUE_SHA256:
        raise ValueError("the dialogues differ from the recorded ones")
    return parts
