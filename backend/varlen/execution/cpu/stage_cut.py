"""Where a model is cut into stages.

Each stage should take as long as the others. It takes as long as its linear layers do, which read nearly all weights.
Each is measured with weights that come from memory, as they do in a step, or counts by the bytes of its weights.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from varlen.config import EngineConfig
from varlen.costs.store import CostKey, CostStore, find_cache
from varlen.errors import ConfigError
from varlen.execution.cpu.linear_paths import (
    LAYOUTS,
    PLAIN,
    LayerUse,
    operands_of,
    paths_of,
    stored_paths,
)
from varlen.execution.rank_link import RankLink
from varlen.models.checkpoint.layers import StageLayers
from varlen.program.program import Program
from varlen.program.stages import StageProgram, balanced_bounds, cut_program, layer_starts

# Bytes that are written before a layer is timed, so that no weight of it is left in a cache.
_EVICTED_BYTES = 1 << 27
_ROUNDS = 5
# To be increased when layers are measured in another way.
_VERSION = "1"


@dataclass(frozen=True, slots=True)
class StageCut:
    """The cut of a model, as one stage has it.

    Attributes:
        bounds: first layer of each stage, and the number of layers.
    """

    bounds: Sequence[int]
    layers: StageLayers

    @property
    def most_layers(self) -> int:
        return max(last - first for first, last in pairwise(self.bounds))

    def parts(self, program: Program) -> list[StageProgram]:
        """Return the part of each stage of a program that was recorded with these layers."""
        starts = layer_starts(program, self.layers.layer_of, self.layers.count)
        return cut_program(program, starts, self.bounds)


def agree_on_cut(choose: Callable[[], Sequence[int]], link: RankLink[Any]) -> StageCut | None:
    """Return the cut that the last stage chooses by `choose_bounds`, or None without stages."""
    stage = link.stage
    if stage.count == 1:
        return None
    bounds = link.agree(choose)
    first, last = bounds[stage.number : stage.number + 2]
    return StageCut(bounds, StageLayers(first, last, is_first=not stage.number))


def choose_bounds(
    load: Callable[[StageLayers], Program],
    kernels: object,
    config: EngineConfig,
    key: CostKey,
    *,
    use: LayerUse,
    seconds: float,
) -> list[int]:
    """Return the first layer of each stage, and the number of layers.

    Args:
        load: returns the program of a model whose weights are read for some layers.
        config: says how many stages there are, and where measurements are stored.
        key: cost key of whatever else decides the times of layers.
        seconds: most time to measure; at 0 nothing is measured.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    stages = config.pipeline_parallel

    def bounds_by(costs_of: Callable[[Program], Sequence[float]]) -> list[int]:
        """Return the bounds by the costs of a program's ops."""
        layers = StageLayers()
        program = load(layers)
        if layers.count < stages:
            raise ConfigError(
                f"pipeline_parallel is {stages}; this model has {layers.count} layers with weights of their own:"
                f" allowed are 1 to {layers.count}"
            )
        starts = layer_starts(program, layers.layer_of, layers.count)
        return balanced_bounds(costs_of(program), starts, stages)

    def measure() -> dict[str, str]:
        bounds = bounds_by(partial(_measure, kernels=kernels, use=use, seconds=seconds))
        return {str(number): str(bound) for number, bound in enumerate(bounds)}

    if not seconds:
        return bounds_by(_bytes)
    more = {
        "stages": str(stages),
        "cut": _VERSION,
        "threads": str(torch.get_num_threads()),
        "rows": str(use.rows),
    }
    store = CostStore(find_cache(config.cache_folder))
    stored = stored_paths(store, {**key, **more}, measure, "first layers of stages")
    return [int(stored[str(number)]) for number in range(stages + 1)]


def _bytes(program: Program) -> list[float]:
    """Return the bytes of the weights of each linear layer, 0 for other ops."""
    return [
        float(sum(weight.nbytes for weight in op.weights)) if op.kernel == PLAIN else 0.0
        for op in program.ops
    ]


@torch.inference_mode()
def _measure(program: Program, kernels: object, use: LayerUse, seconds: float) -> list[float]:
    """Return the seconds of each linear layer, 0 for other ops."""
    kinds = [
        (tuple(op.weights[0].shape), op.weights[0].dtype) if op.kernel == PLAIN else None
        for op in program.ops
    ]
    calls = {kind: _call(*kind, kernels, use) for kind in dict.fromkeys(kinds) if kind}
    others = torch.zeros(_EVICTED_BYTES, dtype=torch.uint8)
    times: defaultdict[object, list[float]] = defaultdict(list)
    deadline = time.monotonic() + seconds
    for number in range(_ROUNDS + 1):
        for kind, call in calls.items():
            others.fill_(number)
            began = time.perf_counter()
            call()
            # the first round compiles
            if number:
                times[kind].append(time.perf_counter() - began)
        if number and time.monotonic() > deadline:
            break
    return [statistics.median(times[kind]) if kind else 0.0 for kind in kinds]


def _call(
    shape: Sequence[int], dtype: torch.dtype, kernels: object, use: LayerUse
) -> Callable[[], None]:
    path = paths_of(dtype)[-1]
    path = path if hasattr(kernels, path) else PLAIN
    plain = torch.zeros(*shape, dtype=dtype)
    weight, multiply = LAYOUTS[path](plain), getattr(kernels, path)
    x, out = operands_of(plain, sorted(use.rows)[len(use.rows) // 2 - 1])
    return lambda: multiply(x, weight, out=out)
