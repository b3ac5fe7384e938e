"""The systems that the benchmark compares."""

from __future__ import annotations

from varlen_bench.harness.generating import System

OURS, REQUEST_LEVEL = "varlen-fp32", "varlen-fp32-batches"
TRANSFORMERS = "transformers-fp32-sorted"
BEAMS = 4

_ALL = (
    System(OURS, "varlen", "fp32", "iteration"),
    System(REQUEST_LEVEL, "varlen", "fp32", "sorted"),
    System(TRANSFORMERS, "transformers", "fp32", "sorted"),
    System("ctranslate2-fp32-sorted", "ctranslate2", "fp32", "sorted"),
    System("ctranslate2-int8-sorted", "ctranslate2", "int8", "sorted"),
)
SYSTEMS = {system.name: system for system in _ALL}
# Each source alone and so unpadded: every system's answers are compared with these.
REFERENCE = System("transformers-fp32-alone", "transformers", "fp32", "arrival")
