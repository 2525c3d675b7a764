"""The engines, by name, in the order of the tables."""

from __future__ import annotations

from bench.peers.engines.base import Engine
from bench.peers.engines.llama_cpp import LlamaCpp
from bench.peers.engines.llmc import Llmc
from bench.peers.engines.openvino import OpenVino
from bench.peers.engines.transformers import Transformers
from bench.peers.engines.vllm import Vllm

ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (Llmc, LlamaCpp, OpenVino, Vllm, Transformers)}
