"""The systems that the benchmark compares."""

from __future__ import annotations

from varlen_bench.harness.generating import System

OURS, REQUEST_LEVEL = "varlen-fp32", "varlen-fp32-batches"

_ALL = (
    System(OURS, "varlen", "fp32", "iteration"),
    System("varlen-bf16", "varlen", "bf16", "iteration"),
    System(REQUEST_LEVEL, "varlen", "fp32", "arrival"),
    System("transformers-fp32-arrival", "transformers", "fp32", "arrival"),
    System("transformers-fp32-sorted", "transformers", "fp32", "sorted"),
    System("transformers-fp32-continuous", "transformers", "fp32", "iteration"),
    System("ctranslate2-fp32-sorted", "ctranslate2", "fp32", "sorted"),
    System("ctranslate2-int8-sorted", "ctranslate2", "int8", "sorted"),
)
SYSTEMS = {system.name: system for system in _ALL}
# Each prompt alone and so unpadded: every system's tokens are compared with these.
REFERENCE = System("transformers-fp32-alone", "transformers", "fp32", "arrival")
