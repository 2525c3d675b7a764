"""Checks and benchmarks on a GPU; run.sh runs them."""

from bench.gpu.stand_ins import provide_missing

provide_missing()  # before any module here imports llmc
