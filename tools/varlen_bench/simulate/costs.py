"""Seconds of a simulated batch or step, by a formula or measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from varlen.config import Execution
from varlen.costs.model import CostModel
from varlen.costs.store import CostStore, StoredCosts, find_cache
from varlen.scheduling.batch import Batch
from varlen_bench.simulate.command import parse_numbers

# Makes a new cost model for an execution.
MakeModel: TypeAlias = Callable[[Execution], CostModel]

_MICROSECONDS = 1e6


class CostSource(str, Enum):
    """Source of the seconds of a batch: a formula, or measurements of this machine."""

    cpu = "cpu"
    gpu = "gpu"
    measured = "measured"

    @property
    def workers(self) -> int:
        """Usual number of workers on the smallest machines with these costs."""
        return 2 if self is CostSource.cpu else 1


def cpu_seconds(count: int, length: int) -> float:
    """Return seconds of a batch on one CPU core, near a MiniLM's in fp32."""
    tokens = count * length
    return 6e-3 + 160e-6 * count + 360e-6 * tokens + 120e-9 * tokens * length


def gpu_seconds(count: int, length: int) -> float:
    """Return made-up seconds of a batch on a GPU; few tokens cost like 256."""
    return 2e-3 + 4e-6 * max(256, count * length) + 2e-9 * count * length**2


def cost_models(
    source: CostSource,
    executions: Iterable[Execution] = (),
    *,
    cache: str = "auto",
    max_sequences: int,
    longest: int,
) -> MakeModel:
    """Return a function that makes a cost model for an execution.

    Args:
        executions: executions that must have been measured.
        cache: cache folder of measured costs; the latest measurement is used.
        max_sequences, longest: largest batch that a formula is asked for.

    Raises:
        ValueError: nothing has been measured for an execution.
    """
    if source is CostSource.measured:
        stored = CostStore(find_cache(cache)).entries()
        latest = {execution: _latest(stored, execution) for execution in executions}
        return lambda execution: latest[execution].measurement.model(execution)
    formula = cpu_seconds if source is CostSource.cpu else gpu_seconds
    return lambda execution: CostModel.of_function(
        formula, execution, max_sequences=max_sequences, max_length=longest
    )


def _latest(stored: Iterable[StoredCosts], execution: Execution) -> StoredCosts:
    matching = [costs for costs in stored if costs.key["execution"] == execution]
    if not matching:
        raise ValueError(
            f"the cache has no costs of {execution} batches; `varlen costs` measures them"
        )
    return max(matching, key=lambda costs: costs.measured_at)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step: constant, per token, and per KV token that it reads.

    Attention's arithmetic in long chunks of prompts counts as a part of their tokens.
    """

    step: float
    token: float
    kv_token: float

    @classmethod
    def parse(cls, text: str) -> StepCosts:
        """Return the costs of three numbers of microseconds, as `str` writes them.

        Raises:
            ValueError: they are not three, or one is negative, or a step or a token costs nothing.
        """
        numbers = parse_numbers("costs", text)
        if len(numbers) != 3 or min(numbers) < 0 or numbers[0] + numbers[1] == 0:
            raise ValueError(
                f'costs are "{text}"; allowed: microseconds of a step, a token and a KV token, such as 20000,700,5'
            )
        return cls(*(number / _MICROSECONDS for number in numbers))

    def __str__(self) -> str:
        numbers = (self.step, self.token, self.kv_token)
        return ",".join(f"{float(f'{_MICROSECONDS * number:.3g}'):g}" for number in numbers)

    def seconds(self, step: Batch) -> float:
        """Return the seconds of a step."""
        return self.of(step.shape.tokens, kv_tokens(step))

    def of(self, tokens: int, kv_tokens: int) -> float:
        """Return the seconds of a step of these sizes."""
        return self.step + self.token * tokens + self.kv_token * kv_tokens


def kv_tokens(step: Batch) -> int:
    """Return the number of tokens whose keys and values a step reads."""
    return sum(chunk.start + len(chunk.token_ids) for chunk in step.chunks)
