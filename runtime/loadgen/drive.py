"""Load on an engine in this process: no server, no sockets."""

from __future__ import annotations

import time
from collections.abc import Sequence

from llmc.runtime.binding import Engine, SamplingParams
from llmc.runtime.loadgen.answer import Outcome
from llmc.runtime.loadgen.error import BenchError
from llmc.runtime.loadgen.workload import Ask


def drive(engine: Engine, asks: Sequence[Ask], concurrency: int) -> list[Outcome]:
    """Runs greedy requests of token ids to their full lengths, at most `concurrency` submitted; outcomes by index.

    A token's time is when its step ended. Raises BenchError when the engine fails a request.
    """
    start_ns: dict[int, int] = {}
    token_ns: dict[int, list[int]] = {}
    index_of: dict[int, int] = {}
    outcomes: list[Outcome | None] = [None] * len(asks)
    next_index = num_done = 0
    while num_done < len(asks):
        while next_index < len(asks) and len(index_of) < concurrency:
            ask = asks[next_index]
            begin = time.monotonic_ns()
            params = SamplingParams(temperature=0.0, max_tokens=ask.output_len, ignore_eos=True)
            request = engine.submit(_token_ids(ask), params)
            index_of[request], start_ns[request], token_ns[request] = next_index, begin, []
            next_index += 1
        engine.step()
        for event in engine.poll():
            request = event.request_id
            if event.kind == "token":
                token_ns[request].append(event.time_ns)
            elif event.kind == "failed":
                raise BenchError(f"the engine failed request {index_of[request]}: {event.error_message}")
            elif event.kind == "finished":
                index, times = index_of.pop(request), tuple(token_ns.pop(request))
                begin = start_ns.pop(request)
                outcomes[index] = Outcome(
                    index, begin, begin, event.time_ns, times, event.num_prompt_tokens, len(times),
                    event.num_cached_tokens, event.finish_reason, True,
                )  # fmt: skip
                num_done += 1
    return [outcome for outcome in outcomes if outcome is not None]


def _token_ids(ask: Ask) -> list[int]:
    return [token for token in ask.prompt if isinstance(token, int)]
