"""Parameters that are allowed with a ranking of continuations: beam search, and best_of above n."""

from __future__ import annotations

from typing import Protocol

from ..errors import ApiError
from ..refusals import CONFLICT

_OF_DRAWING = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")


class Ranking(Protocol):
    """The fields of a body that concern ranking."""

    @property
    def best_of(self) -> int | None: ...
    @property
    def num_outputs(self) -> int: ...
    @property
    def ranks(self) -> bool: ...
    @property
    def use_beam_search(self) -> bool | None: ...
    @property
    def stream(self) -> bool | None: ...
    @property
    def stop(self) -> object: ...


def check_ranking(body: Ranking) -> None:
    """Raises ApiError for parameters that do not work with a ranking."""
    if body.best_of is not None and body.best_of < body.num_outputs:
        why = f"best_of is {body.best_of} but n is {body.num_outputs}: use a best_of no smaller than n"
        raise ApiError(why, param="best_of", code=CONFLICT)
    if not body.ranks:
        return
    what = "use_beam_search" if body.use_beam_search else "best_of above n"
    conflicts = {
        "stream": (bool(body.stream), "whose best answers are known only at the end: set stream to false"),
        "stop": (bool(body.stop), "continuations are ranked whole: use stop_token_ids"),
        **{
            name: (bool(body.use_beam_search) and getattr(body, name) is not None, "nothing is drawn: leave it out")
            for name in _OF_DRAWING
        },
    }
    for name, (conflicting, why) in conflicts.items():
        if conflicting:
            raise ApiError(f"{name} does not go with {what}, {why}", param=name, code=CONFLICT)


def check_guide(body: Ranking, guided: bool) -> None:
    """Raises ApiError if an answer is both ranked and guided token by token by a grammar."""
    if guided and body.ranks:
        name = "use_beam_search" if body.use_beam_search else "best_of"
        why = f"{name} does not go with an answer of a given form: leave out one of them"
        raise ApiError(why, param=name, code=CONFLICT)
