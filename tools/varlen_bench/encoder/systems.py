"""The systems that the benchmark compares."""

from __future__ import annotations

from varlen_bench.compare.systems import BatchUnit, System, by_name
from varlen_bench.peers.engines import EngineName, Precision

BASELINE = "transformers-fp32-fifo"
_FIFO_BATCH = 20


def _both(
    engine: EngineName, precision: Precision, unit: BatchUnit = "sequences"
) -> tuple[System, ...]:
    """Return a peer with one instance on all cores, and with one on each."""
    name = f"{engine}-{precision}"
    return (
        System(f"{name}-sorted", engine, precision, "sorted", unit),
        System(f"{name}-per-core", engine, precision, "sorted", unit, per_core=True),
    )


SYSTEMS = by_name(
    System("varlen-fp32", "varlen", "fp32", "engine"),
    System("varlen-bf16", "varlen", "bf16", "engine"),
    System("varlen-int8", "varlen", "int8", "engine"),
    System(BASELINE, "transformers", "fp32", "arrival", size=_FIFO_BATCH),
    *_both("transformers", "fp32"),
    *_both("transformers", "bf16"),
    *_both("zentorch", "fp32"),
    *_both("zentorch", "bf16"),
    *_both("onnxruntime", "fp32"),
    *_both("onnxruntime", "int8"),
    *_both("onnxruntime", "int8-blocks"),
    *_both("openvino", "fp32"),
    *_both("openvino", "bf16"),
    *_both("openvino", "int8"),
    *_both("ctranslate2", "fp32", "tokens"),
    *_both("ctranslate2", "int8", "tokens"),
)
