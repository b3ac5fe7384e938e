"""The systems that the benchmark compares."""

from __future__ import annotations

from varlen_bench.compare.systems import System, by_name

BASELINE = "transformers-fp32-fifo"
_FIFO_BATCH = 20

SYSTEMS = by_name(
    System("varlen-fp32", "varlen", "fp32", "engine"),
    System("varlen-bf16", "varlen", "bf16", "engine"),
    System("varlen-int8", "varlen", "int8", "engine"),
    System(BASELINE, "transformers", "fp32", "arrival", size=_FIFO_BATCH),
    System("transformers-fp32-arrival", "transformers", "fp32", "arrival"),
    System("transformers-fp32-sorted", "transformers", "fp32", "sorted"),
    System("transformers-bf16-arrival", "transformers", "bf16", "arrival"),
    System("transformers-bf16-sorted", "transformers", "bf16", "sorted"),
    System("onnxruntime-fp32-arrival", "onnxruntime", "fp32", "arrival"),
    System("onnxruntime-fp32-sorted", "onnxruntime", "fp32", "sorted"),
    System("onnxruntime-int8-sorted", "onnxruntime", "int8", "sorted"),
    System("ctranslate2-fp32-sorted", "ctranslate2", "fp32", "sorted", "tokens"),
    System("ctranslate2-int8-sorted", "ctranslate2", "int8", "sorted", "tokens"),
)
