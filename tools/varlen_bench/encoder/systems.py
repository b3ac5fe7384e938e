"""The systems that the benchmark compares, and how each splits a workload into batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from varlen_bench.encoder.workload import Workload
from varlen_bench.peers.engines import EngineName, Precision

Order = Literal["arrival", "sorted"]
Kind = Literal["whole", "sequences", "tokens"]

BASELINE = "transformers-fp32-fifo"
_FIFO_BATCH = 20


@dataclass(frozen=True, slots=True)
class Batching:
    """How a workload becomes batches: as a whole, or by a number of sequences or padded tokens."""

    kind: Kind
    size: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "whole" else f"{self.size} {self.kind}"


@dataclass(frozen=True, slots=True)
class System:
    """An engine at a precision, with its batching; a batching without a size is calibrated."""

    name: str
    engine: EngineName
    precision: Precision
    order: Order
    kind: Kind
    size: int = 0

    def batchings(self, workload: Workload) -> list[Batching]:
        """Return the batchings to try on a workload; a single one needs no calibration."""
        if self.kind == "whole" or self.size:
            return [Batching(self.kind, self.size)]
        sizes = workload.batch_sizes if self.kind == "sequences" else workload.batch_tokens
        return [Batching(self.kind, size) for size in sizes]


_ALL = (
    System("varlen-fp32", "varlen", "fp32", "arrival", "whole"),
    System("varlen-bf16", "varlen", "bf16", "arrival", "whole"),
    System(BASELINE, "transformers", "fp32", "arrival", "sequences", _FIFO_BATCH),
    System("transformers-fp32-arrival", "transformers", "fp32", "arrival", "sequences"),
    System("transformers-fp32-sorted", "transformers", "fp32", "sorted", "sequences"),
    System("transformers-bf16-arrival", "transformers", "bf16", "arrival", "sequences"),
    System("transformers-bf16-sorted", "transformers", "bf16", "sorted", "sequences"),
    System("onnxruntime-fp32-arrival", "onnxruntime", "fp32", "arrival", "sequences"),
    System("onnxruntime-fp32-sorted", "onnxruntime", "fp32", "sorted", "sequences"),
    System("onnxruntime-int8-sorted", "onnxruntime", "int8", "sorted", "sequences"),
    System("ctranslate2-fp32-sorted", "ctranslate2", "fp32", "sorted", "tokens"),
    System("ctranslate2-int8-sorted", "ctranslate2", "int8", "sorted", "tokens"),
)
SYSTEMS = {system.name: system for system in _ALL}
# Each sequence alone and so unpadded: every system's vectors are compared with these.
REFERENCE = System("transformers-fp32-alone", "transformers", "fp32", "arrival", "sequences", 1)


def split(lengths: list[int], order: Order, batching: Batching) -> list[list[int]]:
    """Return batches of indices into `lengths`.

    The tokens of a batch count with their padding, as in CTranslate2: longest times sequences. A sequence that is
    longer than the limit is a batch of its own.
    """
    indices = list(range(len(lengths)))
    if order == "sorted":
        indices.sort(key=lambda i: -lengths[i])
    if batching.kind == "whole":
        return [indices]
    if batching.kind == "sequences":
        return [indices[at : at + batching.size] for at in range(0, len(indices), batching.size)]
    batches: list[list[int]] = []
    longest = 0
    for i in indices:
        longest = max(longest, lengths[i])
        if batches and longest * (len(batches[-1]) + 1) <= batching.size:
            batches[-1].append(i)
        else:
            batches.append([i])
            longest = lengths[i]
    return batches
