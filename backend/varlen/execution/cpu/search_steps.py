"""Steps of searches on a CPU, one after another, without the host between them.

In a step that only searches take, all is compiled: beams follow the ones that they continue, blocks are copied, the
program runs, and the next beams are chosen. So a step is one table of calls, and the next one the same table with other
positions. Searches are independent of each other: where it is faster, each core runs the steps of some of them, with
intermediates of its own, and the cores meet at the end of the launch alone.

A launch ends before its last step when a search has ended, whose answer would wait, or when a request has come.
docs/decisions/0132-launches-of-searches.md has measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.execution.cpu.compiled_program import Int64Array, with_calls
from varlen.execution.cpu.runner import CpuRunner, StepCores
from varlen.execution.packing import PackedStep, searches_of_step, step_dims, tensors_of
from varlen.memory.arena import Region
from varlen.request.request import Bytes, Float32Array, Int32Array
from varlen.scheduling.device_plan import NOT_TAKEN, ChosenBeams
from varlen_kernels.cpu.calls.calls import run_calls
from varlen_kernels.cpu.native.threads import run_parts
from varlen_kernels.op import Bound
from varlen_kernels.op_table import OPS, STEP_BEAMS
from varlen_kernels.reference.beam import BeamCandidates
from varlen_kernels.reference.beam_search import SearchResults, SearchState


@dataclass(frozen=True, slots=True)
class _Part:
    """Some searches of a launch.

    Attributes:
        searches: their place among all searches; `beams` has the place of their beams.
        step: arrays that the calls read, with the divisors of the step.
        table: the calls of a step; `held` is memory that they use.
        counters: numbers that grow by one from step to step.
        found: results of the step.
    """

    searches: slice
    beams: slice
    step: PackedStep
    table: Int64Array
    held: object
    counters: Sequence[Int32Array]
    found: ChosenBeams

    def take(self, step: PackedStep) -> None:
        """Take the numbers of another step, whose arrays have the same shapes."""
        for own, given in zip(_arrays(self.step), _arrays(step), strict=True):
            own[...] = given


@dataclass(slots=True)
class _Launch:
    """Steps of all parts.

    Attributes:
        later: see `PackedStep.searches`.
        is_over: whether no further step begins.
    """

    later: Float32Array
    chosen: ChosenBeams
    arrived: Bytes
    parts: list[_Part] = field(default_factory=list)
    is_over: bool = False

    def run(self, first: int, last: int) -> None:
        """Run the steps of some parts."""
        for part in self.parts[first:last]:
            self._run(part)

    def _run(self, part: _Part) -> None:
        for step in range(len(self.chosen.ends)):
            if step:
                if self.is_over or self.arrived[0]:
                    return
                for numbers in part.counters:
                    np.add(numbers, 1, out=numbers)
                part.step.searches["divisors"][:] = self.later[step - 1, part.searches]
            try:
                run_calls(part.table, 1)
            except MemoryError:
                # a step changes nothing that it reads, so a later launch takes it
                return
            for whole, own, place in zip(
                self.chosen, part.found, (part.searches, part.beams, part.beams), strict=True
            ):
                whole[step, place] = own
            self.is_over |= bool(part.found.ends[:, 0].any())


class SearchSteps:
    """Runs steps of searches. Not for two threads at once.

    Attributes:
        arrived: `[1]`, not 0 when the launch should end with the step that runs; another thread or process writes it.
    """

    def __init__(
        self,
        runner: CpuRunner,
        state: SearchState,
        kv_memory: Tensor,
        cores: StepCores,
        *,
        block_size: int,
    ) -> None:
        """Use the program of a decoder, and the state of searches and their blocks."""
        self.arrived = np.zeros(1, np.uint8)
        self._runner, self._state, self._kv_memory = runner, state, kv_memory
        self._cores, self._block_size = cores, block_size
        # the parts of the last launch, each with what its calls are the same for
        self._kept: list[tuple[object, _Part]] = []

    def runs(self, step: PackedStep) -> bool:
        """Return whether all rows of a step are beams of searches that choose here."""
        searches, beams = step.searches, step.beams
        if not searches or not beams or not self._runner.is_one_call:
            return False
        rows = len(step.inputs["slots"])
        is_all = rows == len(beams["beam_slots"]) == len(searches["rows"])
        has_more = step.is_read or step.sources or step.edits or step.draws or len(step.copies)
        return is_all and not has_more and not _normalizes_again(step)

    def run(self, step: PackedStep, logits: Tensor) -> ChosenBeams:
        """Return what searches choose in one step, or several.

        Args:
            logits: `[beams, vocabulary]` fp32, overwritten.

        Raises:
            MemoryError: none has taken a step, or not all of them the only one.
        """
        count, beams = len(step.searches["searches"]), len(logits)
        later = step.searches.get("later", np.empty((0, count, 2), np.float32))
        steps = 1 + len(later)
        chosen = ChosenBeams(
            np.full((steps, count, 2), NOT_TAKEN, np.int32),
            np.zeros((steps, beams, 5), np.int32),
            np.zeros((steps, beams), np.float32),
        )

        def run_on(cores: int) -> int:
            launch = _Launch(later, chosen, self.arrived)
            launch.parts = self._parts(step, logits, min(cores, count))
            run_parts(launch.run, range(len(launch.parts) + 1))
            return int((chosen.ends[:, :, 0] != NOT_TAKEN).any(1).sum())

        self._cores.run(run_on, beams, torch.get_num_threads())
        failed = chosen.ends[0, :, 0] == NOT_TAKEN
        # a launch of one step runs again as a whole
        if failed.all() or (steps == 1 and failed.any()):
            raise MemoryError
        return chosen

    def _parts(self, step: PackedStep, logits: Tensor, count: int) -> list[_Part]:
        searches = step.searches["searches"]
        bounds = [number * len(searches) // count for number in range(count + 1)]
        steps = [searches_of_step(step, *bound) for bound in pairwise(bounds)]
        dims = [step_dims(each.inputs) for each in steps]
        regions = self._runner.arena.allocate_several(dims)
        if not regions:
            # one part fits, as any step does
            return self._parts(step, logits, 1)
        kept, self._kept = self._kept, []
        begin = 0
        for i, (part, region, bound) in enumerate(
            zip(steps, regions, pairwise(bounds), strict=True)
        ):
            end = begin + len(part.beams["beam_slots"])
            of_part = logits[begin:end]
            addresses = of_part.data_ptr(), region.memory.data_ptr(), region.offsets
            # the table has candidates of each beam, and bounds of the banned tokens of each row
            fixed = [part.searches[name].tobytes() for name in ("sizes", "banned_rows")]
            same = *bound, begin, addresses, fixed, [each.shape for each in _arrays(part)]
            if i < len(kept) and kept[i][0] == same:
                self._kept.append(kept[i])
                kept[i][1].take(part)
            else:
                new = self._part(part, region, of_part, slice(*bound), slice(begin, end))
                self._kept.append((same, new))
            begin = end
        return [part for _, part in self._kept]

    def _part(
        self, step: PackedStep, region: Region, logits: Tensor, searches: slice, beams: slice
    ) -> _Part:
        inputs, of_beams, own = map(tensors_of, (step.inputs, step.beams, step.searches))
        rows, state = len(logits), self._state
        copies = torch.empty_like(of_beams["given"])
        found = BeamCandidates.empty(
            rows, min(int(own["sizes"][0]), logits.shape[1]), logits.device
        )
        numbers = SearchResults.numbers(len(own["searches"]), rows, logits.device)
        results = SearchResults.views(numbers, len(own["searches"]))
        bounds = np.searchsorted(step.searches["banned_rows"], np.arange(rows + 1))
        bans = own["banned_tokens"]
        of_model = [
            inputs[name]
            for name in ("token_ids", "context_lens", "cu_blocks", "block_ids", "slots")
        ]
        before = [
            *_bound(
                "follow_beams",
                *(
                    state,
                    of_beams["searches"],
                    of_beams["beam_slots"],
                    of_beams["given"],
                    *of_model,
                    copies,
                ),
                block_size=self._block_size,
            ),
            *_bound("copy_blocks", self._kv_memory, copies),
        ]
        best = (
            *(logits, torch.zeros(rows, 1), torch.zeros(rows, dtype=torch.bool)),
            *(torch.from_numpy(bounds), bans, torch.full(bans.shape, torch.inf), *found),
        )
        after = [
            Bound(STEP_BEAMS, best, ()),
            *_bound(
                "advance_searches",
                *(
                    found,
                    own["searches"],
                    own["beam_slots"],
                    own["divisors"],
                    own["ends"],
                    state,
                    results,
                ),
            ),
        ]
        program = self._runner.table(inputs, step_dims(step.inputs), region, [logits])
        counters = (
            *(step.inputs["context_lens"], step.inputs["position_ids"]),
            *(step.beams["searches"][:, 2], step.searches["searches"][:, 3]),
        )
        return _Part(
            searches,
            beams,
            step,
            with_calls(before, program, after),
            (before, after, logits, region),
            counters,
            ChosenBeams(*(each.numpy() for each in results)),
        )


def _arrays(step: PackedStep) -> list[npt.NDArray[Any]]:
    """Return what the calls of a step read."""
    return [
        array
        for group in (step.inputs, step.beams, step.searches)
        for name, array in group.items()
        if name != "later"
    ]


def _normalizes_again(step: PackedStep) -> bool:
    """Return whether log probabilities are normalized again without banned tokens."""
    return bool(step.searches["sizes"][2]) and len(step.searches["banned_rows"]) > 0


def _bound(name: str, *operands: Any, **attributes: Any) -> list[Bound]:
    op = OPS[name]
    return op.bound(op.named(operands, attributes))
