"""A compared system: an engine at a precision, and how requests become batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from varlen_bench.peers.engines import Cores, EngineName, Precision

if TYPE_CHECKING:
    from varlen.config import SpeculationMethod

# The engine gets all requests and batches them itself; or it gets batches, in order of arrival or by length.
Batching = Literal["engine", "arrival", "sorted"]
# Units of a batch size; tokens with their padding.
BatchUnit = Literal["sequences", "tokens"]


@dataclass(frozen=True, slots=True)
class NamedEngine:
    """An engine at a precision; the name is its name in rows and options."""

    name: str
    engine: EngineName
    precision: Precision

    @property
    def is_ours(self) -> bool:
        """Whether it is varlen."""
        return self.engine == "varlen"


@dataclass(frozen=True, slots=True)
class System(NamedEngine):
    """An engine in a process, and how it batches requests.

    Attributes:
        unit: unit of the batch size.
        size: batch size; 0: calibrated, unless the engine batches requests itself.
        per_core: whether it has an instance on each core, which run batches at the same time; else one on all.
        drafts: the drafter of tokens; a draft model is in the folder `draft` beside the checkpoint.
        temperature: divisor of logits, which are sampled; 0: the most likely tokens.
        is_stored: whether the checkpoint has the weights of its precision, in groups of 32.
    """

    batching: Batching
    unit: BatchUnit = "sequences"
    size: int = 0
    per_core: bool = False
    drafts: SpeculationMethod = "none"
    temperature: float = 0.0
    is_stored: bool = False

    def cores(self, threads: int) -> Cores:
        """Return how it uses `threads` cores."""
        return Cores(threads, 1) if self.per_core else Cores(1, threads)

    def ordered(self, requests: Sequence[int], inputs: Sequence[Sequence[int]]) -> list[int]:
        """Return requests in the order of their batches; sorted: the longest inputs first."""
        if self.batching != "sorted":
            return list(requests)
        return sorted(requests, key=lambda request: -len(inputs[request]))

    def split(self, inputs: Sequence[Sequence[int]], size: int) -> list[list[int]]:
        """Return the requests of each batch.

        An input that is longer than a limit in tokens is a batch of its own.
        """
        requests = self.ordered(range(len(inputs)), inputs)
        if self.batching == "engine":
            return [requests]
        if self.unit == "sequences":
            return [requests[at : at + size] for at in range(0, len(requests), size)]
        batches: list[list[int]] = []
        longest = 0
        for request in requests:
            longest = max(longest, len(inputs[request]))
            if batches and longest * (len(batches[-1]) + 1) <= size:
                batches[-1].append(request)
            else:
                batches.append([request])
                longest = len(inputs[request])
        return batches


AnySystem = TypeVar("AnySystem", bound=NamedEngine)


def by_name(*systems: AnySystem) -> dict[str, AnySystem]:
    """Return systems by their names."""
    return {system.name: system for system in systems}


# Each input by itself and so unpadded: the answers of every system are compared with these.
REFERENCE = System("transformers-fp32-alone", "transformers", "fp32", "arrival", size=1)
