"""The systems that the benchmark compares."""

from __future__ import annotations

from varlen_bench.compare.systems import System, by_name

OURS, REQUEST_LEVEL = "varlen-fp32", "varlen-fp32-batches"
TRANSFORMERS = "transformers-fp32-sorted"
BEAMS = 4

SYSTEMS = by_name(
    System(OURS, "varlen", "fp32", "engine"),
    System("varlen-int8", "varlen", "int8", "engine"),
    System(REQUEST_LEVEL, "varlen", "fp32", "sorted"),
    System(TRANSFORMERS, "transformers", "fp32", "sorted"),
    System("ctranslate2-fp32-sorted", "ctranslate2", "fp32", "sorted"),
    System("ctranslate2-fp32-per-core", "ctranslate2", "fp32", "sorted", per_core=True),
    System("ctranslate2-int8-sorted", "ctranslate2", "int8", "sorted"),
    System("ctranslate2-int8-per-core", "ctranslate2", "int8", "sorted", per_core=True),
)
