"""The systems that the benchmark compares, and how each cuts a workload into batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from varlen_bench.encoder.workload import Workload
from varlen_bench.peers.engines import EngineName, Precision

Order = Literal["arrival", "sorted"]

FIFO_BATCH = 20
BASELINE = "transformers-fp32-fifo"


@dataclass(frozen=True, slots=True)
class Batching:
    """How a list of sequences becomes batches: all at once, so many sequences, so many tokens."""

    kind: Literal["whole", "sequences", "tokens"]
    size: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "whole" else f"{self.size} {self.kind}"


@dataclass(frozen=True, slots=True)
class System:
    """One process of the benchmark: an engine at a precision, fed in an order."""

    name: str
    engine: EngineName
    precision: Precision
    order: Order
    kind: Literal["whole", "sequences", "tokens"]
    fixed_size: int | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this project is measured, not a peer."""
        return self.engine == "varlen"

    def candidates(self, workload: Workload) -> tuple[Batching, ...]:
        """Return the batchings to try on `workload`; a single one needs no calibration."""
        if self.kind == "whole":
            return (Batching("whole"),)
        if self.fixed_size is not None:
            return (Batching(self.kind, self.fixed_size),)
        sizes = workload.batch_sizes if self.kind == "sequences" else workload.batch_tokens
        return tuple(Batching(self.kind, size) for size in sizes)


SYSTEMS = (
    System("varlen-fp32", "varlen", "fp32", "arrival", "whole"),
    System("varlen-bf16", "varlen", "bf16", "arrival", "whole"),
    System(BASELINE, "transformers", "fp32", "arrival", "sequences", FIFO_BATCH),
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


# Each sequence alone and so unpadded: the vectors that every system is compared with.
REFERENCE = System("transformers-fp32-alone", "transformers", "fp32", "arrival", "sequences", 1)


def system(name: str) -> System:
    """Return the system called `name`.

    Raises:
        ValueError: there is none.
    """
    for candidate in (REFERENCE, *SYSTEMS):
        if candidate.name == name:
            return candidate
    raise ValueError(f"no system is called {name!r}; there are {[s.name for s in SYSTEMS]}")


def split(lengths: list[int], order: Order, batching: Batching) -> list[list[int]]:
    """Return batches of indices into `lengths`.

    A batch of so many tokens counts its padding: longest times sequences, as CTranslate2 does. A
    sequence longer than that is a batch of its own.
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
