"""Graphs that join a running engine: those added to its artifact."""

from __future__ import annotations

from pathlib import Path

from llmc.runtime.binding import Artifact, Engine, GraphInfo
from llmc.runtime.warm_up.measuring import light_load


def take_graphs(engine: Engine, graphs: list[GraphInfo], path: Path) -> range:
    """Takes over the graphs of the artifact `path`, appends them to `graphs`, and returns their indices; thread-safe.

    No request uses them yet. Raises LlmcError; the engine then continues with its present graphs.
    """
    with Artifact(path) as artifact:
        known = artifact.graphs()
        new = engine.add_graphs(artifact)
    # In place, and before requests use them: observers hold this list.
    graphs.extend(known[new.start : new.stop])
    return new


def join_graphs(engine: Engine, graphs: list[GraphInfo], path: Path) -> int:
    """As take_graphs, but replays each once between two steps and enables it; returns their number."""
    new = take_graphs(engine, graphs, path)
    for index in new:
        load = light_load(graphs[index])
        engine.warm_load(index, load.num_seqs, load.tokens_each, load.context)
        engine.enable_graph(index, True)
    return len(new)
