"""The systems that the benchmark compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EngineName = Literal["varlen", "transformers", "ctranslate2"]
Precision = Literal["fp32", "int8"]
# Requests join and leave at any step; or batches run to their end, in order of arrival or by source length.
Batching = Literal["iteration", "arrival", "sorted"]

OURS, REQUEST_LEVEL = "varlen-fp32", "varlen-fp32-batches"
TRANSFORMERS = "transformers-fp32-sorted"
BEAMS = 4
# Sentences of a batch that runs to its end.
SIZES = (1, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class System:
    """An engine at a precision, and how it batches requests."""

    name: str
    engine: EngineName
    precision: Precision
    batching: Batching

    @property
    def is_ours(self) -> bool:
        """Whether it is varlen."""
        return self.engine == "varlen"

    def next_batch(
        self, waiting: Sequence[int], sources: Sequence[Sequence[int]], size: int
    ) -> list[int]:
        """Return the waiting requests that run next, at most `size`; sorted: the longest sources."""
        if self.batching == "sorted":
            waiting = sorted(waiting, key=lambda request: -len(sources[request]))
        return list(waiting[:size])


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
