"""The systems that the benchmark compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EngineName = Literal["varlen", "transformers", "ctranslate2"]
Precision = Literal["fp32", "bf16", "int8"]
# Requests join and leave at any step; or batches run to their end, in order of arrival or by prompt length.
Batching = Literal["iteration", "arrival", "sorted"]

OURS, REQUEST_LEVEL = "varlen-fp32", "varlen-fp32-batches"
# Of a batch that runs to its end.
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

    @property
    def is_static(self) -> bool:
        """Whether it is transformers with padded batches that run to their end."""
        return self.engine == "transformers" and self.batching != "iteration"

    def next_batch(
        self, waiting: Sequence[int], prompts: Sequence[Sequence[int]], size: int
    ) -> list[int]:
        """Return the waiting requests that run next, at most `size`; sorted: the longest prompts."""
        if self.batching == "sorted":
            waiting = sorted(waiting, key=lambda request: -len(prompts[request]))
        return list(waiting[:size])


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
