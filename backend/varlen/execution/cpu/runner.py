"""Runs a program on a CPU.

A step that only searches take is one table of calls, the next one the same with other positions
(docs/decisions/0132-launches-of-searches.md). Each core takes some searches where that is faster.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.execution.cpu.all_cores import AllCores, batch_sizes, padded
from varlen.execution.cpu.compiled_program import compile_program, one_table
from varlen.execution.cpu.linear_paths import compile_products, compiles_products
from varlen.execution.packing import (
    Arrays,
    InputLayout,
    Int64Array,
    PackedStep,
    fill_inputs,
    searches_of_step,
    source_dims,
    step_dims,
)
from varlen.execution.rank_link import Handoffs
from varlen.execution.thread_executor import CoreShare, LoneCores
from varlen.execution.token_state import choices_of
from varlen.memory.arena import Arena
from varlen.memory.planner import Dims, Region, map_shared, memory_errors, new_shared
from varlen.program.program import NO_STATES, PackedBatch, Program, Value
from varlen.program.stages import NO_STAGES, Stage
from varlen.request.request import Bytes, Float32Array, Int32Array
from varlen.scheduling import device_plan
from varlen.scheduling.device_plan import NOT_TAKEN, ChosenBeams
from varlen_kernels.cpu.calls.run_calls import run_calls
from varlen_kernels.cpu.native.threads import run_parts
from varlen_kernels.functions import NOT_GIVEN, STEP_BEAMS
from varlen_kernels.op import Bound
from varlen_kernels.op_table import OPS
from varlen_kernels.reference.beam import BeamCandidates
from varlen_kernels.reference.beam_search import SearchResults, SearchState

# oneDNN caches compiled primitives by shape, of up to 1.7 MiB each, 1,024 by default. An encoder has products of four
# shapes, for the numbers of tokens in `batch_sizes`.
_KEPT_PRIMITIVES = 192
# Products of batches up to this size are compiled before workers start, which share them.
_USUAL_TOKENS = 512
# Times that are kept of each choice: the least of them counts, since other processes make some longer.
_KEPT = 4
# Steps before the first trial of the other choice, what later ones may cost as a part of the time, and the most steps
# between two of them.
_FIRST_TRIAL, _TRIAL_COST, _LONGEST_PAUSE = 16, 0.01, 4096
# Parts of launches that are kept for others of the same shapes.
_KEPT_PARTS = 16
# Steps that a launch takes after one in which a search has ended: others end soon, and a launch costs as much.
_STEPS_AFTER_END = 2
# Seconds of a step on all cores from which one core is not tried: it would delay answers.
_LONGEST = 5e-3


def limit_primitives() -> None:
    """Limit the memory of compiled primitives.

    oneDNN reads the limit once, when torch first uses it.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KEPT_PRIMITIVES))


class CpuRunner:
    """Runs a program on the cores that torch gives the thread.

    Not for two threads at once.
    oneDNN compiles a product for each number of rows, which takes longer than a small product itself. So batches of
    whole sequences are padded to few numbers of tokens: by less than an eighth, or by seven tokens.

    Attributes:
        input_names: inputs that a batch brings; a stage receives others.
        compiled: the program as calls of compiled code; None if it does not run so.
    """

    # neighbours of one length share an attention call
    longest_first, runs_at_launch = False, True

    def __init__(
        self,
        program: Program,
        kernels: object,
        arena: Arena,
        states: Mapping[str, Tensor] = NO_STATES,
        *,
        handoffs: Handoffs | None = None,
        number: int = 0,
        of_steps: bool = False,
    ) -> None:
        """Compile the program.

        Args:
            handoffs: values that its stage receives and sends, if it is a part of a pipeline.
            of_steps: whether it runs steps of generation, which have few numbers of tokens.
        """
        self.program = program
        self.arena = arena
        self._kernels, self._states = kernels, states
        self._handoffs, self._number = handoffs, number
        received = () if handoffs is None else handoffs.received_names(number)
        self.input_names = [each.name for each in program.inputs if each.name not in received]
        self._is_padded = not of_steps and compiles_products(program)
        self.compiled = compile_program(program, kernels, states, needs_products=not of_steps)
        self._lone: LoneCores | None = None
        self._call: AllCores | None = None

    @property
    def row_dimension(self) -> str:
        return self.program.row_dimension

    def share_cores(self, share: CoreShare, cores: int) -> None:
        """Use this number of cores while `share` says that a batch runs alone, else one."""
        self._lone = LoneCores(share, cores)
        if self.compiled is None:
            self._call = AllCores(self.program, self._lone)

    def compile(self) -> None:
        """Compile what batches of usual sizes need."""
        if self._is_padded:
            compile_products(self.program, self._kernels, batch_sizes(_USUAL_TOKENS))

    @memory_errors()
    def launch(
        self, arrays: Arrays, dims: Dims, given: Mapping[str, Tensor] = NO_STATES
    ) -> Callable[[], Tensor | None]:
        """Run a batch; return a function that returns its output.

        There is none if it went to the next stage. See `run` for `given`.
        """
        outputs = self.run(arrays, dims, given=given)
        return lambda: outputs[0] if outputs else None

    @torch.inference_mode()
    def run(
        self,
        arrays: Arrays,
        dims: Dims,
        out: Sequence[Tensor] | None = None,
        cores: int | None = None,
        given: Mapping[str, Tensor] = NO_STATES,
    ) -> Sequence[Tensor]:
        """Return the outputs of a batch: `out`, or new tensors.

        There are none if they go to the next stage.

        Args:
            cores: number of cores; None for the cores of the thread, or of the model while the batch runs alone.
            given: inputs that are results of another program, with a row for each token.
        """
        if self._is_padded:
            dims = {**dims, "tokens": min(padded(dims["tokens"]), self.arena.max_tokens)}
            own = [value for value in self.program.inputs if value.name in arrays]
            inputs = _padded_inputs(own, dims, arrays)
        else:
            inputs = tensors_of(arrays)
        inputs |= {name: _with_rows(rows, dims["tokens"]) for name, rows in given.items()}
        region = self.arena.allocate(dims)
        if self._handoffs is None:
            sent = {}
        else:
            received = self._handoffs.received(self._number, dims)
            sent = self._handoffs.sent(self._number, dims)
            inputs |= received
        if sent:
            out = [sent[value.name] for value in self.program.outputs]
        batch = PackedBatch(inputs, dims)
        if self.compiled is not None:
            outputs = self.compiled.run(
                batch, self._kernels, region, out=out, lone=self._lone, cores=cores
            )
        else:
            outputs = self.program.run(
                batch, self._kernels, region, states=self._states, out=out, call=self._call
            )
        if self._handoffs is None:
            return outputs
        self._handoffs.pass_on(self._number, received, sent)
        return () if sent else outputs

    @property
    def is_one_call(self) -> bool:
        """Whether one call of compiled code runs the program."""
        return self.compiled is not None and self.compiled.is_one_call and not self._handoffs

    def table(
        self, inputs: Mapping[str, Tensor], dims: Dims, region: Region, outputs: Sequence[Tensor]
    ) -> Int64Array:
        """Return the calls of a batch on one core; the program is one call."""
        assert self.compiled is not None
        return self.compiled.filled(PackedBatch(inputs, dims), region, outputs, cores=1)

    def close(self) -> None:
        """No resources to release."""


def tensors_of(arrays: Arrays) -> dict[str, Tensor]:
    """Return arrays as tensors, which share their memory."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _padded_inputs(inputs: Sequence[Value], dims: Dims, arrays: Arrays) -> dict[str, Tensor]:
    """Return inputs of these dimensions, in memory of their own; see `fill_inputs`."""
    layout = InputLayout.of(inputs, dims)
    views = layout.views(torch.empty(layout.num_bytes, dtype=torch.uint8))
    fill_inputs({name: view.numpy() for name, view in views.items()}, arrays)
    return views


def _with_rows(rows: Tensor, count: int) -> Tensor:
    """Return the first rows of a tensor, or all of them and zeros behind."""
    if len(rows) >= count:
        return rows[:count]
    filled = rows.new_zeros(count, *rows.shape[1:])
    filled[: len(rows)] = rows
    return filled


@dataclass(slots=True)
class _Times:
    """Recent times of steps of one size, in seconds.

    Attributes:
        left: number of steps before the next trial.
    """

    on_all: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    on_one: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    left: int = _FIRST_TRIAL

    @property
    def is_faster_alone(self) -> bool:
        """Whether one core is faster."""
        return bool(self.on_one) and min(self.on_one) < min(self.on_all)

    def end_trial(self, taken: float, usual: float) -> None:
        """Decide when the next trial comes, given the seconds of both choices."""
        pause = math.ceil((taken / usual - 1) / _TRIAL_COST)
        # after one that has cost nothing, at once
        self.left = min(max(1, pause), _LONGEST_PAUSE)


class StepCores:
    """Chooses the cores of steps: one or all, whichever is faster.

    Not for two threads at once. A step of a small model, or one whose cores are two threads of one real core, is faster
    on one (docs/decisions/0060-steps-on-cpus-with-bf16.md). Few of each size run on the slower choice.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # by the bits of the number of tokens
        self._times: dict[int, _Times] = {}

    def run(self, step: Callable[[int], int | None], tokens: int, cores: int) -> None:
        """Run a step of this many tokens.

        Args:
            step: runs it on a number of cores, and may return how many steps it has run instead.
        """
        if cores == 1:
            step(1)
            return
        times = self._times.setdefault(tokens.bit_length(), _Times())
        usual_alone = times.is_faster_alone
        is_trial = times.left == 0 and min(times.on_all) <= _LONGEST
        times.left = max(0, times.left - 1)
        is_alone = usual_alone != is_trial
        began = self._clock()
        steps = step(1 if is_alone else cores) or 1
        taken = (self._clock() - began) / steps
        if is_trial:
            times.end_trial(taken, min(times.on_one if usual_alone else times.on_all))
        (times.on_one if is_alone else times.on_all).append(taken)


class CpuSteps:
    """Runs the steps of a decoder on one core or all, and keeps their logits.

    Not for two threads at once.
    """

    def __init__(self, runner: CpuRunner, stage: Stage = NO_STAGES) -> None:
        """Allocate the logits.

        Args:
            stage: the stage that runs it; the last one keeps the logits of as many steps as there are stages.
        """
        self._runner = runner
        self._cores = StepCores(time.perf_counter)
        # allocated once: pages that are mapped anew for each step cost more than the copy into them
        self._logits = torch.empty(0)
        if stage.is_last:
            (logits,) = runner.program.outputs
            shape = logits.at(runner.arena.largest)
            self._logits = torch.empty(stage.count, *shape, dtype=logits.dtype)

    def run(self, arrays: Arrays, dims: Dims, slot: int = 0) -> Tensor:
        """Return the logits of a step, `[logit rows, vocabulary]`, valid until the next one in this slot.

        Args:
            slot: slot of the logits, where the logits of several steps are kept.
        """
        logits = self.last_logits(dims["logit_rows"], slot)

        def step(cores: int | None) -> None:
            self._runner.run(arrays, dims, [logits], cores)

        if self._runner.compiled is not None:
            self._cores.run(step, dims["tokens"], torch.get_num_threads())
        else:
            # ops of torch use its threads in any case
            step(None)
        return logits

    def last_logits(self, rows: int, slot: int = 0) -> Tensor:
        """Return the logits of the last step in a slot, `[rows, vocabulary]`.

        Stages before the last have none.
        """
        return self._logits[slot, :rows] if len(self._logits) else self._logits

    def share_logits(self) -> int:
        """Move the logits to memory that another process can map; return its file descriptor."""
        descriptor = new_shared(self._logits.nbytes)
        self._logits = map_logits(descriptor, *self._logits.shape)
        return descriptor

    def close(self) -> None:
        """No resources to release."""


def map_logits(descriptor: int, slots: int, rows: int, vocab_size: int) -> Tensor:
    """Return the logits in the memory of a file descriptor, `[slots, rows, vocabulary]` fp32."""
    memory = map_shared(descriptor)
    return torch.frombuffer(memory, dtype=torch.float32).view(slots, rows, vocab_size)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some searches of a launch.

    Attributes:
        searches: their place among all searches.
        first, step: arrays that the calls of the first step and of later ones read.
        first_table, table: these calls; `held` is their memory.
        counters: numbers that grow by one from step to step.
        found: results of the step, as in `SearchResults.numbers`.
    """

    searches: slice
    first: PackedStep
    step: PackedStep
    first_table: Int64Array
    table: Int64Array
    held: object
    counters: Sequence[Int32Array]
    found: Int32Array

    @property
    def count(self) -> int:
        return int(self.searches.stop - self.searches.start)

    def take(self, *steps: PackedStep) -> None:
        """Take the numbers of other steps, whose arrays have the same shapes."""
        own = _arrays(self.first, self.step)
        for array, given in zip(own, _arrays(*steps), strict=True):
            array[...] = given


@dataclass(slots=True)
class _Launch:
    """Steps of all parts; see `PackedStep.searches`.

    Attributes:
        found: results of each part, `[steps, numbers]`; NOT_TAKEN where it has taken no step.
        furthest, last: index of the last step that a part has begun, and may begin. Threads write them without a lock:
            at worst, a part takes fewer steps.
    """

    later: Float32Array
    arrived: Bytes
    parts: Sequence[_Part]
    found: list[Int32Array] = field(init=False)
    furthest: int = 0
    last: float = np.inf
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        steps = 1 + len(self.later)
        self.found = [np.full((steps, len(part.found)), NOT_TAKEN, np.int32) for part in self.parts]

    def run(self, first: int, last: int) -> None:
        """Run the steps of some parts."""
        for part, found in zip(self.parts[first:last], self.found[first:last], strict=True):
            self._run(part, found)

    def _run(self, part: _Part, found: Int32Array) -> None:
        ends, ended = choices_of(found, part.count).ends, part.found[: 2 * part.count : 2]
        has_ended = np.zeros(part.count, np.bool_)
        divisors, later = part.step.searches["divisors"], self.later[:, part.searches]
        for step in range(len(found)):
            if step:
                if not self._goes_on(step):
                    return
                self.furthest = max(self.furthest, step)
                for numbers in part.counters:
                    np.add(numbers, 1, out=numbers)
                divisors[:] = later[step - 1]
            if step == 1:
                # tokens of the first one
                part.step.beams["given"][:] = NOT_GIVEN
            try:
                run_calls(part.table if step else part.first_table, 1)
            except MemoryError:
                # a step changes nothing that it reads, so a later launch takes it
                return
            found[step] = part.found
            # they run on in vain
            ends[step, has_ended] = NOT_TAKEN
            if np.count_nonzero(ended):
                has_ended |= ended > 0
                self.last = min(self.last, max(self.furthest, step + _STEPS_AFTER_END))
                if has_ended.all():
                    return

    def chosen(self) -> ChosenBeams:
        """Return what all parts have found."""
        pairs = zip(self.found, self.parts, strict=True)
        of_parts = [choices_of(found, part.count) for found, part in pairs]
        return ChosenBeams(*[np.concatenate(each, 1) for each in zip(*of_parts, strict=True)])

    def _goes_on(self, step: int) -> bool:
        """Return whether a part begins a step after its first.

        One that is behind takes as many steps as the others: searches that stay together end in one launch.
        """
        if self.arrived[0] or step > self.last:
            return False
        seconds = time.perf_counter() - self.began
        if step <= self.furthest:
            return seconds < device_plan.LAUNCH_SECONDS
        if seconds * (step + 1) / step > device_plan.LAUNCH_SECONDS:
            self.last = self.furthest
        return step <= self.last


class SearchSteps:
    """Runs steps of searches. Not for two threads at once.

    Attributes:
        arrived: `[1]`, not 0 when the launch should end with the step that runs; another thread or process writes it.
        encoder: encodes the sources of searches, if they have any.
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
        self.encoder: CpuRunner | None = None
        self._runner, self._state, self._kv_memory = runner, state, kv_memory
        # steps that encode sources take longer
        self._cores = cores, StepCores(time.perf_counter)
        self._block_size = block_size
        # the last parts, by what their calls are the same for
        self._kept: dict[object, _Part] = {}

    def runs(self, step: PackedStep) -> bool:
        """Return whether all tokens of a step are of searches that choose here."""
        searches, encoder = step.searches, self.encoder
        if not searches or not self._runner.is_one_call:
            return False
        if step.sources and (encoder is None or not encoder.is_one_call):
            return False
        begun = np.count_nonzero(searches["searches"][:, 3] == 1)
        sources = len(step.sources.get("cu_seqlens", [0])) - 1
        is_all = len(step.inputs["slots"]) == len(searches["rows"]) and sources in (0, begun)
        has_more = bool(step.is_read or step.edits or step.draws or len(step.copies))
        # log probabilities that are normalized again without banned tokens are not compiled
        has_more |= bool(searches["sizes"][2]) and len(searches["banned_rows"]) > 0
        return is_all and not has_more

    def run(self, step: PackedStep, logits: Tensor) -> ChosenBeams:
        """Return what searches choose in one step, or several.

        Args:
            logits: `[rows, vocabulary]` fp32, overwritten.

        Raises:
            MemoryError: none has taken a step, or not all of them the only one.
        """
        count = len(step.searches["searches"])
        later = step.searches.get("later", np.empty((0, count, 2), np.float32))
        found: list[ChosenBeams] = []

        def run_on(cores: int) -> int:
            launch = _Launch(later, self.arrived, self._parts(step, logits, min(cores, count)))
            run_parts(launch.run, range(len(launch.parts) + 1))
            found.append(launch.chosen())
            return int((found[0].ends[:, :, 0] != NOT_TAKEN).any(1).sum())

        tokens = len(logits) + len(step.sources.get("slots", ()))
        self._cores[bool(step.sources)].run(run_on, tokens, torch.get_num_threads())
        (chosen,) = found
        failed = chosen.ends[0, :, 0] == NOT_TAKEN
        # a launch of one step runs again as a whole
        if failed.all() or (not len(later) and failed.any()):
            raise MemoryError
        return chosen

    def _parts(self, step: PackedStep, logits: Tensor, count: int) -> list[_Part]:
        searches = step.searches["searches"]
        bounds = [number * len(searches) // count for number in range(count + 1)]
        steps = [searches_of_step(step, *bound) for bound in pairwise(bounds)]
        regions = self._regions(steps)
        if not regions:
            # one part fits, as any step does
            return self._parts(step, logits, 1)
        found, row = [], 0
        for part, own, bound in zip(steps, regions, pairwise(bounds), strict=True):
            of_part = logits[row : row + len(part.searches["rows"])]
            row += len(of_part)
            addresses = [(each.memory.data_ptr(), *each.offsets) for each in own]
            both = searches_of_step(part, 0, bound[1] - bound[0], begins=True), part
            # the table has candidates of each beam, and bounds of the banned tokens of each row
            names = "sizes", "banned_rows"
            fixed = [each.searches[name].tobytes() for each in both for name in names]
            shapes = [each.shape for each in _arrays(*both)]
            same = *bound, of_part.data_ptr(), *addresses, *fixed, *shapes
            kept = self._kept.pop(same, None)
            if kept is None:
                # no views: rows of a later launch may be in another order
                kept = self._part(*deepcopy(both), own, of_part, slice(*bound))
            else:
                kept.take(*both)
            # used last
            self._kept[same] = kept
            found.append(kept)
        while len(self._kept) > max(_KEPT_PARTS, count):
            del self._kept[next(iter(self._kept))]
        return found

    def _regions(self, steps: Sequence[PackedStep]) -> list[list[Region]]:
        """Return the regions of each part, its encoder last; none if too large together."""
        found = self._runner.arena.allocate_several([step_dims(each.inputs) for each in steps])
        sources = [source_dims(each.sources) for each in steps if each.sources]
        of_sources: list[Region] = []
        if sources and self.encoder is not None:
            of_sources = self.encoder.arena.allocate_several(sources)
            found = found if of_sources else []
        left = iter(of_sources)
        return [
            [own, *([next(left)] if each.sources else [])]
            for own, each in zip(found, steps, strict=False)
        ]

    def _part(
        self,
        first: PackedStep,
        step: PackedStep,
        regions: Sequence[Region],
        logits: Tensor,
        searches: slice,
    ) -> _Part:
        own, device = step.searches, logits.device
        width, count = min(int(own["sizes"][0]), logits.shape[1]), len(own["searches"])
        found = BeamCandidates.empty(len(logits), width, device)
        numbers = SearchResults.numbers(count, len(own["beam_slots"]), device)
        results = SearchResults.views(numbers, count)
        calls = self._calls(step, regions[0], logits, found, results)
        of_first = calls
        if first is not step:
            of_first = self._calls(first, regions[0], logits, found, results)
        sources: list[Int64Array] = []
        if first.sources:
            assert self.encoder is not None
            inputs, dims = tensors_of(first.sources), source_dims(first.sources)
            sources.append(self.encoder.table(inputs, dims, regions[1], []))
        first_table = one_table([*sources, *of_first])
        table = first_table[sum(map(len, sources)) :] if first is step else one_table(calls)
        counters = [step.inputs["context_lens"], step.inputs["position_ids"]]
        counters.append(own["searches"][:, 3])
        if step.beams:
            counters.append(step.beams["searches"][:, 2])
        held = calls, of_first, logits, regions
        return _Part(searches, first, step, first_table, table, held, counters, numbers.numpy())

    def _calls(
        self,
        step: PackedStep,
        region: Region,
        logits: Tensor,
        found: BeamCandidates,
        results: SearchResults,
    ) -> list[Int64Array | Sequence[Bound]]:
        """Return the calls of a step after its sources."""
        inputs, of_beams, own = map(tensors_of, (step.inputs, step.beams, step.searches))
        rows, state = len(step.searches["rows"]), self._state
        logits, found = logits[:rows], BeamCandidates(*(each[:rows] for each in found))
        bounds = np.searchsorted(step.searches["banned_rows"], np.arange(rows + 1))
        bans = own["banned_tokens"]
        before: list[Bound] = []
        if of_beams:
            followed = state, *(of_beams[name] for name in "searches beam_slots given".split())
            names = "token_ids context_lens cu_blocks block_ids slots"
            of_model = [inputs[name] for name in names.split()]
            # from a block to itself where a beam follows none
            copies = torch.zeros_like(of_beams["given"])
            before = [
                *_bound("follow_beams", *followed, *of_model, copies, block_size=self._block_size),
                *_bound("copy_blocks", self._kv_memory, copies),
            ]
        best = (
            *(logits, torch.zeros(rows, 1), torch.zeros(rows, dtype=torch.bool)),
            *(torch.from_numpy(bounds), bans, torch.full(bans.shape, torch.inf), *found),
        )
        rules = [own[name] for name in "searches beam_slots divisors ends".split()]
        after = [
            Bound(STEP_BEAMS, best, ()),
            *_bound("advance_searches", found, *rules, state, results),
        ]
        program = self._runner.table(inputs, step_dims(step.inputs), region, [logits])
        return [before, program, after]


def _arrays(*steps: PackedStep) -> list[npt.NDArray[Any]]:
    """Return what the calls of steps read."""
    return [
        array
        for step in steps
        for group in (step.sources, step.inputs, step.beams, step.searches)
        for name, array in group.items()
        if name != "later"
    ]


def _bound(name: str, *operands: Any, **attributes: Any) -> list[Bound]:
    op = OPS[name]
    return op.bound(op.named(operands, attributes))
