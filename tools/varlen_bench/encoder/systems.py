"""The systems that the benchmark compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from varlen_bench.encoder.workload import Workload
from varlen_bench.peers.engines import EngineName, Precision

Order = Literal["arrival", "sorted"]
Kind = Literal["whole", "sequences", "tokens"]

BASELINE = "transformers-fp32-fifo"
_FIFO_BATCH = 20


@dataclass(frozen=True, slots=True)
class System:
    """An engine at a precision, and how it splits a workload into batches.

    Attributes:
        kind: what the batch size counts: sequences, or tokens with their padding.
        size: batch size; 0: calibrated, unless the workload is one batch.
    """

    name: str
    engine: EngineName
    precision: Precision
    order: Order
    kind: Kind
    size: int = 0

    def batch_sizes(self, workload: Workload) -> Sequence[int]:
        """Return the batch sizes to try on a workload."""
        if self.kind == "whole" or self.size:
            return [self.size]
        return workload.batch_sizes if self.kind == "sequences" else workload.batch_tokens

    def batching(self, size: int) -> str:
        """Return the batching of this size, such as "8 sequences"."""
        return self.kind if self.kind == "whole" else f"{size} {self.kind}"

    def split(self, sequences: Sequence[Sequence[int]], size: int) -> list[list[int]]:
        """Return the indices of each batch.

        A sequence that is longer than a limit in tokens is a batch of its own.
        """
        lengths = list(map(len, sequences))
        indices = list(range(len(lengths)))
        if self.order == "sorted":
            indices.sort(key=lambda i: -lengths[i])
        if self.kind == "whole":
            return [indices]
        if self.kind == "sequences":
            return [indices[at : at + size] for at in range(0, len(indices), size)]
        batches: list[list[int]] = []
        longest = 0
        for i in indices:
            longest = max(longest, lengths[i])
            if batches and longest * (len(batches[-1]) + 1) <= size:
                batches[-1].append(i)
            else:
                batches.append([i])
                longest = lengths[i]
        return batches


_ALL = (
    System("varlen-fp32", "varlen", "fp32", "arrival", "whole"),
    System("varlen-bf16", "varlen", "bf16", "arrival", "whole"),
    System("varlen-int8", "varlen", "int8", "arrival", "whole"),
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
