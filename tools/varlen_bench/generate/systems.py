"""The systems that the benchmark compares."""

from __future__ import annotations

from varlen_bench.compare.systems import System, by_name

OURS, REQUEST_LEVEL = "varlen-fp32", "varlen-fp32-batches"

SYSTEMS = by_name(
    System(OURS, "varlen", "fp32", "engine"),
    System("varlen-bf16", "varlen", "bf16", "engine"),
    System("varlen-int8", "varlen", "int8", "engine"),
    System("varlen-int4", "varlen", "int4", "engine"),
    System(REQUEST_LEVEL, "varlen", "fp32", "arrival"),
    System("transformers-fp32-arrival", "transformers", "fp32", "arrival"),
    System("transformers-fp32-sorted", "transformers", "fp32", "sorted"),
    System("transformers-fp32-continuous", "transformers", "fp32", "engine"),
    System("ctranslate2-fp32-sorted", "ctranslate2", "fp32", "sorted"),
    System("ctranslate2-fp32-per-core", "ctranslate2", "fp32", "sorted", per_core=True),
    System("ctranslate2-int8-sorted", "ctranslate2", "int8", "sorted"),
    System("ctranslate2-int8-per-core", "ctranslate2", "int8", "sorted", per_core=True),
    System("openvino-fp32", "openvino-genai", "fp32", "engine"),
    System("openvino-bf16", "openvino-genai", "bf16", "engine"),
    System("openvino-int8", "openvino-genai", "int8", "engine"),
    System("llamacpp-fp32", "llamacpp", "fp32", "engine"),
    System("llamacpp-bf16", "llamacpp", "bf16", "engine"),
    System("llamacpp-int8", "llamacpp", "int8", "engine"),
    System("llamacpp-int4", "llamacpp", "int4", "engine"),
    System("vllm-fp32", "vllm", "fp32", "engine"),
    System("vllm-bf16", "vllm", "bf16", "engine"),
)
