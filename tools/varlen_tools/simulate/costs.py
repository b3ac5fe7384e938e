"""Costs of batches for the simulator: a formula, or measurements of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import TypeAlias

from varlen.config import Execution
from varlen.costs.model import CostModel
from varlen.costs.store import CostStore, StoredCosts

# Makes a new cost model for an execution.
MakeModel: TypeAlias = Callable[[Execution], CostModel]


class CostSource(str, Enum):
    """Source of the seconds of a batch: a formula, or measurements of this machine."""

    cpu = "cpu"
    gpu = "gpu"
    measured = "measured"

    @property
    def workers(self) -> int:
        """Usual number of workers: that of the smallest machines with these costs."""
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
    executions: Iterable[Execution],
    *,
    cache: str,
    max_sequences: int,
    longest: int,
) -> MakeModel:
    """Return a function that makes a cost model for one of the executions.

    Args:
        source: formula or measurements.
        executions: what models are made for.
        cache: cache folder of measured costs; the latest measurement is used.
        max_sequences, longest: largest batch that a formula is asked for.

    Raises:
        ValueError: nothing has been measured for an execution.
    """
    if source is CostSource.measured:
        # imports torch, which nothing else here needs
        from varlen.costs.store import cache_folder

        stored = CostStore(cache_folder(cache)).entries()
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
            f"the cache has no costs of {execution} batches; python -m varlen_tools.profile_costs measures them"
        )
    return max(matching, key=lambda costs: costs.measured_at)
