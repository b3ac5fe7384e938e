"""What a model keeps on its device, with one state for each kind.

`OneShot` keeps nothing, and is apart, since it needs no torch. `SeveralOutputs` runs several heads behind one encoder.
`Decoder` runs steps over KV caches, and `EncoderDecoder` encodes the source texts of a step first. A state fills the
inputs of its programs, and reads their result: rows of a head, or chosen tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from varlen.config import EngineConfig
from varlen.execution.adapters import NO_ADAPTER, ResidentAdapters
from varlen.execution.arenas import caches_of, new_caches
from varlen.execution.cpu.runner import CpuRunner, CpuSteps, SearchSteps, StepCores, tensors_of
from varlen.execution.cuda.graphs import CudaGraphs
from varlen.execution.cuda.runner import CudaSources, CudaSteps
from varlen.execution.model_info import GraphUse
from varlen.execution.one_shot import OneShot, ProgramRunner
from varlen.execution.packing import (
    ADAPTERS,
    Arrays,
    PackedStep,
    bounds_of,
    in_order,
    joined_rows,
    pack_step,
    part_of_step,
    rows_of_step,
    source_arrays,
    source_dims,
    step_arrays,
    step_dims,
    tokens_of_rows,
)
from varlen.execution.programs import HIDDEN, LoadedPrograms
from varlen.execution.rank_link import NO_OTHERS, RankLink
from varlen.execution.token_state import Chooser, DeviceEdits, DeviceSearches, choices_of
from varlen.memory.arena import Arena, moved
from varlen.memory.planner import Dims, memory_errors
from varlen.program.program import Program
from varlen.request.request import (
    Bytes,
    Float32Array,
    Int32Array,
    Prompt,
    RequestOptions,
    join_outputs,
)
from varlen.scheduling.batch import Batch, Chunk
from varlen.scheduling.device_plan import (
    BeamStep,
    Chosen,
    DevicePlan,
    EditLimits,
    SampledToken,
)
from varlen.tasks import Task
from varlen_kernels.cpu import sample_tokens
from varlen_kernels.cpu.choices import best_tokens


class SeveralOutputs(OneShot):
    """Whole sequences with several outputs: one pass, then a head for each output.

    A head gets the packed hidden states of the sequences that ask for it, and runs if there are any. The answer of a
    sequence that names its outputs is `join_outputs` of them.
    """

    def __init__(
        self,
        device: ProgramRunner,
        heads: Mapping[Task, CpuRunner],
        unweighted: Sequence[int] | None = None,
        adapters: ResidentAdapters | None = None,
    ) -> None:
        """Use the programs of an encoder and of its heads.

        Args:
            device: runs the encoder, whose output are hidden states.
            heads: run the heads, first the head of the model's own task.
            unweighted: see `OneShot`.
        """
        super().__init__(device, adapters=adapters)
        self._heads = heads
        self._default = next(iter(heads))
        self._readers = {
            task: OneShot(_OnHidden(head), task, unweighted, adapters=adapters, number=number)
            for number, (task, head) in enumerate(heads.items(), 1)
        }

    def _start(
        self, packed: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> Callable[[], list[Float32Array] | None]:
        """Start a batch in this order; see `OneShot`."""
        wishes = [each.outputs or (self._default,) for each in options]
        arrays, dims = self._inputs(packed, options)
        wait = self.device.launch(arrays, dims)

        def answers() -> list[Float32Array]:
            hidden = wait()
            assert isinstance(hidden, Tensor)
            found: list[dict[Task, Float32Array]] = [{} for _ in packed]
            for task, reader in self._readers.items():
                rows = [row for row, asked in enumerate(wishes) if task in asked]
                if not rows:
                    continue
                with memory_errors():
                    of_rows = _tokens_of(hidden, packed, rows)
                device = reader.device
                assert isinstance(device, _OnHidden)
                device.hidden = of_rows
                outputs = reader.run([packed[row] for row in rows], [options[row] for row in rows])
                for row, output in zip(rows, outputs, strict=True):
                    found[row][task] = output
            return [
                join_outputs([outputs[task] for task in each.outputs])
                if each.outputs
                else outputs[self._default]
                for outputs, each in zip(found, options, strict=True)
            ]

        return answers


class _OnHidden:
    """The head of one output: a `ProgramRunner`.

    Attributes:
        hidden: `[tokens, hidden]`, of the batch that comes next.
    """

    # the batch is in the order of the encoder already
    longest_first, runs_at_launch = False, True

    def __init__(self, head: CpuRunner) -> None:
        self.row_dimension, self.input_names = head.row_dimension, head.input_names
        self._head = head
        self.hidden = torch.empty(0)

    def launch(self, arrays: Arrays, dims: Dims) -> Callable[[], Tensor | None]:
        return self._head.launch(arrays, dims, {HIDDEN: self.hidden})

    def close(self) -> None:
        """No resources to release."""


def _tokens_of(hidden: Tensor, packed: Sequence[Prompt], rows: Sequence[int]) -> Tensor:
    """Return the hidden states of some sequences of a batch.

    If these are all, they are `hidden` itself.
    """
    if len(rows) == len(packed):
        return hidden
    bounds = bounds_of([prompt.num_tokens for prompt in packed]).tolist()
    return torch.cat([hidden[bounds[row] : bounds[row + 1]] for row in rows])


class Decoder:
    """Sequences that run step by step over KV caches.

    Not for two threads at once, except for `prepare`.

    Attributes:
        searches: searches that the device continues.
        draft: drafts tokens that a step verifies, if the settings have a draft model.
    """

    draft: DraftModel | None = None

    def __init__(
        self,
        loaded: LoadedPrograms,
        arenas: Sequence[Arena],
        config: EngineConfig,
        chooser: Chooser,
        kernels: Any,
        *,
        longest: int,
        limits: EditLimits,
        link: RankLink[PackedStep],
    ) -> None:
        """Reserve the KV caches; on a GPU, capture the graphs of steps.

        Args:
            loaded: the step of the decoder, and the encoder if there is one.
            arenas: memory of the intermediates of each program.
            limits: number and size of edit lists.
        """
        assert loaded.kv is not None
        self.kv = loaded.kv
        self._device, self._largest = arenas[0].device, arenas[0].largest
        self._chooser, self._kernels, self._link = chooser, kernels, link
        program = loaded.programs[0]
        self.adapters: ResidentAdapters | None = None
        # numbers of adapters by name
        self._numbers = {} if loaded.adapters is None else loaded.adapters.numbers
        if loaded.adapters is not None and loaded.tables is not None:
            self.adapters = ResidentAdapters(
                loaded.adapters, loaded.tables, loaded.programs, link.fault_of_ranks
            )
        others = link.states.keys() | (self.adapters.states.keys() if self.adapters else set())
        caches = [state for state in program.states if state.name not in others]
        self._kv_memory = new_caches(caches, self._device)
        self._states = {**caches_of(caches, self._kv_memory), **link.states}
        if self.adapters is not None:
            self._states |= self.adapters.states
        # one thread may prepare a step while another one runs a step
        self._searching = Lock()
        blocks, rows = -(-longest // self.kv.block_size), self._largest["logit_rows"]
        self.searches = DeviceSearches(
            kernels, self._device, rows=rows, blocks=blocks, block_size=self.kv.block_size
        )
        self.edits = DeviceEdits(kernels, self._device, limits)
        self.steps: CpuSteps | CudaSteps
        self._searching_steps: SearchSteps | None = None
        self.graph_use = GraphUse()
        if self._device.type == "cuda":
            self.steps = CudaSteps(
                program,
                kernels,
                arenas[0],
                self._states,
                blocks_per_sequence=blocks,
                blocks_per_source=blocks if len(loaded.programs) > 1 else 0,
                graphs=CudaGraphs(self._device, config.device_timeout_seconds),
                searches=self.searches,
                edits=self.edits,
                follow=self._follow,
                few_rows=loaded.few_rows,
            )
            self.graph_use = self.steps.graph_use
        else:
            runner = CpuRunner(
                program, kernels, arenas[0], self._states, handoffs=link.handoffs, of_steps=True
            )
            self.steps = CpuSteps(runner, link.stage)
            if link is NO_OTHERS and self.adapters is None:
                self._searching_steps = SearchSteps(
                    runner,
                    self.searches.state,
                    self._kv_memory,
                    StepCores(time.perf_counter),
                    block_size=self.kv.block_size,
                )
        self._bind_others(loaded.programs[1:], arenas[1:])

    @property
    def arrived(self) -> Bytes | None:
        """`[1]`, not 0 when a launch should end; None if each step is one."""
        return None if self._searching_steps is None else self._searching_steps.arrived

    def hear(self, arrived: Bytes) -> None:
        """Let another process say when a launch should end."""
        if self._searching_steps is not None:
            self._searching_steps.arrived = arrived

    def launch_batch(self, batch: Batch) -> Callable[[], Sequence[SampledToken | BeamStep]]:
        return partial(self._run_batch, batch)

    def _run_batch(self, batch: Batch) -> Sequence[SampledToken | BeamStep]:
        with memory_errors(), torch.inference_mode():
            plan = self._chooser.plan(batch)
            packed = self.pack(batch, plan)
            self._give(packed, batch)
            chosen = self._run(packed, self._part_of(packed))
            logits = None if plan.is_whole else self.steps.last_logits(batch.num_logit_rows)
            return self._chooser.outputs(batch, plan, chosen, logits)

    def run_packed(self, step: PackedStep) -> Chosen:
        """Run a step on a CPU, or on ranks; return what was chosen here.

        The host chooses the rest from logits that are valid until the next step.

        Raises:
            MemoryError: too little memory for what the step needs beside the arena.
        """
        return self.run_prepared(step, self.prepare(step))

    def prepare(self, step: PackedStep) -> PackedStep:
        """Return a step as ranks or stages run it: beams have tokens and blocks.

        Another thread may run a step of other sequences meanwhile.

        Raises:
            MemoryError: too little memory.
        """
        with memory_errors(), torch.inference_mode():
            return self._part_of(step)

    def run_prepared(self, step: PackedStep, part: PackedStep) -> Chosen:
        with memory_errors(), torch.inference_mode():
            return self._run(step, part)

    def _part_of(self, step: PackedStep) -> PackedStep:
        if not step.beams or self._runs_searches(step):
            return step
        with self._searching:
            inputs = tensors_of(step.inputs)
            if isinstance(self.steps, CudaSteps):
                more = self._follow_first(self.steps, step.beams, inputs)
            else:
                more = self.searches.follow(tensors_of(step.beams), inputs)
        # one after another
        return replace(step, copies=np.concatenate([step.copies, more.numpy()]), beams={})

    def _follow_first(self, steps: CudaSteps, beams: Arrays, inputs: dict[str, Tensor]) -> Tensor:
        """Give beams their tokens and block tables in `inputs` on the host, for all ranks.

        Returns blocks to copy.
        """
        with steps.stream():
            here = {name: each.to(self._device) for name, each in inputs.items()}
            (on_device,) = moved((beams,), self._device)
            more = self.searches.follow(on_device, here).cpu()
            for name, each in inputs.items():
                each.copy_(here[name])
        return more

    def _run(self, step: PackedStep, part: PackedStep) -> Chosen:
        if isinstance(self.steps, CudaSteps):
            return self._run_on_gpu(self.steps, part)
        if self._searching_steps is not None and self._runs_searches(step):
            logits = self.steps.last_logits(len(step.searches["rows"]), step.slot)
            return Chosen((), self._searching_steps.run(step, logits))
        guesses = () if self.draft is None else self.draft.run(step, part)
        logits = self.run_part(part)
        token_ids: Sequence[int] = ()
        if step.edits:
            edits, inputs = tensors_of(step.edits), tensors_of(step.inputs)
            self.edits.apply(logits, inputs["token_ids"], inputs["logit_rows"], **edits)
        if "uniform" in step.draws:
            token_ids = sample_tokens(logits, **tensors_of(step.draws)).tolist()
        elif step.draws:
            token_ids = best_tokens(logits).tolist()
        searches = None
        if step.searches:
            with self._searching:
                on_device = tensors_of(step.searches)
                numbers = self.searches.advance(logits, step.searches, on_device)
            searches = choices_of(numbers.numpy()[None], len(step.searches["searches"]))
        if self.draft is not None:
            self.draft.store_last(step, part, token_ids)
        return Chosen(token_ids, searches, guesses)

    def _runs_searches(self, step: PackedStep) -> bool:
        if self.draft is not None and len(step.inputs["slots"]) > len(step.beams.get("given", ())):
            # keys of prompts are shared with sequences that draft
            return False
        return self._searching_steps is not None and self._searching_steps.runs(step)

    @torch.inference_mode()
    def run_part(self, step: PackedStep) -> Tensor:
        """Run this process's part of a step; return the logits on its device.

        The leader has them, until the next step with this slot.
        """
        if isinstance(self.steps, CudaSteps):
            self._run_on_gpu(self.steps, step)
            return self.steps.last_logits(len(step.inputs["logit_rows"]))
        with self._link.running(step):
            inputs, dims = step.inputs, step_dims(step.inputs)
            if self.adapters is not None:
                # first: where an adapter cannot be read, nothing has changed. Sources are of sequences of the step
                inputs, dims = self._adapted(inputs, dims, 0)
            self._before(step)
            return self.steps.run(inputs, dims, step.slot)

    def _run_on_gpu(self, steps: CudaSteps, part: PackedStep) -> Chosen:
        """Run this process's part of a step whose beams are prepared; return what is chosen."""
        with self._link.running(part), steps.stream():
            self._before(part)
            return steps.run(part)

    def _adapted(self, inputs: Arrays, dims: Dims, program: int) -> tuple[Arrays, Dims]:
        assert self.adapters is not None
        lengths = np.diff(inputs["cu_seqlens"])
        numbers = inputs.get(ADAPTERS)
        if numbers is None:
            numbers = np.full(len(lengths), NO_ADAPTER, np.int32)
        arrays, adapted = self.adapters.arrays(numbers, lengths, inputs, program)
        return {**inputs, **arrays}, {**dims, **adapted}

    def pack(self, step: Batch, plan: DevicePlan) -> PackedStep:
        return pack_step(step, self.kv.block_size, plan, self._numbers)

    def may_queue(self, packed: PackedStep) -> bool:  # noqa: ARG002  # of every device
        """Return True: a stream takes any step."""
        return True

    def start(self, step: Batch, packed: PackedStep) -> Callable[[], Chosen]:
        assert isinstance(self.steps, CudaSteps)
        with memory_errors(), torch.inference_mode(), self.steps.stream():
            try:
                self._give(packed, step)
                self._before(packed)
                return self.steps.start(packed)
            except BaseException:
                # what has started reads memory that a later step writes
                self.steps.wait()
                raise

    def choose(
        self,
        step: Batch,
        packed: PackedStep,  # noqa: ARG002  # of every device
        plan: DevicePlan,
        chosen: Chosen,
    ) -> Sequence[SampledToken | BeamStep]:
        assert isinstance(self.steps, CudaSteps)
        with memory_errors(), torch.inference_mode(), self.steps.stream():
            logits = self.steps.last_logits(step.num_logit_rows)
            try:
                outputs = self._chooser.outputs(step, plan, chosen, logits)
            except BaseException:
                # a choice has waited for the step
                self.steps.wait()
                raise
            self.steps.set_tokens(tokens_of_rows(step, outputs).tolist())
        return outputs

    def has_nan(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether the logits of a step hold NaN."""
        size = self.kv.block_size
        step = part_of_step(step_arrays(chunks, size), sources=source_arrays(chunks, size))
        return bool(self.run_part(step).isnan().any())

    def close(self) -> None:
        self.steps.close()
        self._states.clear()
        del self._kv_memory
        self.draft = None

    def _give(self, packed: PackedStep, step: Batch) -> None:
        if packed.beams:
            packed.beams["given"][:] = self._chooser.given(step)

    def _bind_others(self, programs: Sequence[Program], arenas: Sequence[Arena]) -> None:
        """Bind programs beside the step to their memory; a decoder has none."""

    def _before(self, step: PackedStep) -> None:
        """Start what comes before the program of a step: the copies of blocks."""
        if self._link is NO_OTHERS or self._device.type == "cpu":
            self._copy_blocks(step.copies)
            return
        # copies of beams come after others, which they may read
        for copies in in_order(step.copies):
            self._copy_blocks(copies)

    def _follow(self, beams: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        self._kernels.copy_blocks(self._kv_memory, self.searches.follow(beams, inputs))

    def _copy_blocks(self, copies: Int32Array) -> None:
        if not len(copies):
            return
        # nothing waits for the copy of pinned memory
        is_cuda = self._device.type == "cuda"
        blocks = torch.empty(len(copies), 2, dtype=torch.int32, pin_memory=is_cuda)
        blocks.numpy()[:] = copies
        self._kernels.copy_blocks(self._kv_memory, blocks.to(self._device, non_blocking=True))


class DraftModel:
    """A smaller decoder of the same vocabulary, which drafts the tokens that a step verifies.

    It runs every token that the model beside it runs, and block j of a sequence is block j of both. So a block that is
    shared, copied or written again is so in both. Rows of steps without drafts wait, and run together.
    """

    def __init__(self, decoder: Decoder, vocab_size: int, most_rows: int) -> None:
        """Draft tokens below `vocab_size`, which both models have.

        Args:
            most_rows: rows of the decoder's largest step.
        """
        self._decoder, self._last, self._most_rows = decoder, vocab_size - 1, most_rows
        # rows that have not run
        self._late: list[Arrays] = []

    def run(self, step: PackedStep, part: PackedStep) -> Sequence[int]:
        """Run a step, and then each drafted token that another one follows; return these tokens.

        They are drawn with the numbers of the rows that verify them, and written into the inputs of the step.

        Args:
            part: the step as `Decoder.prepare` returns it.
        """
        drafts, tokens = step.drafts, part.inputs["token_ids"]
        count = len(drafts)
        if not count and self._is_late(part):
            return ()
        self._catch_up()
        # the keys of rows that are not drafted yet are written again
        logits = self._run(part)
        rows = np.flatnonzero(drafts >= count)
        logits = logits[torch.from_numpy(drafts[rows])]
        while True:
            tokens[rows] = self._guesses(step, logits, drafts[rows])
            rows = np.flatnonzero(np.isin(drafts, rows))
            if not len(rows):
                return list(tokens[:count])
            logits = self._run_rows(part, drafts[rows])

    def _is_late(self, part: PackedStep) -> bool:
        """Let a step wait, if it has rows alone."""
        rows = len(part.inputs["context_lens"])
        if rows < len(part.inputs["slots"]) or len(part.copies):
            return False
        if rows + sum([len(each["slots"]) for each in self._late]) > self._most_rows:
            self._catch_up()
        self._late.append(rows_of_step(part.inputs, np.arange(rows)))
        return True

    def _catch_up(self) -> None:
        if self._late:
            self._run(part_of_step(joined_rows(self._late)))
        self._late = []

    def store_last(self, step: PackedStep, part: PackedStep, token_ids: Sequence[int]) -> None:
        """Run drafted tokens that none follows, where they were chosen.

        Args:
            token_ids: see `Chosen`; without them all may have been chosen.
        """
        drafts = step.drafts
        last = np.setdiff1d(np.arange(len(drafts)), drafts)
        if token_ids:
            last = last[part.inputs["token_ids"][last] == np.array(token_ids)[drafts[last]]]
        if len(last):
            self._run_rows(part, last)

    def _guesses(self, step: PackedStep, logits: Tensor, rows: Int32Array) -> Int32Array:
        """Return a token for each of some rows of the logits of a step."""
        if not len(rows):
            return rows
        draws = {name: each[rows] for name, each in step.draws.items()}
        found = (
            sample_tokens(logits, **tensors_of(draws))
            if "uniform" in draws
            else best_tokens(logits)
        )
        # logits that are no numbers draw any token
        return found.numpy().clip(0, self._last)

    def _run_rows(self, part: PackedStep, rows: Int32Array) -> Tensor:
        return self._run(part_of_step(rows_of_step(part.inputs, rows)))

    def _run(self, part: PackedStep) -> Tensor:
        token_ids = part.inputs["token_ids"].clip(0, self._last)
        return self._decoder.run_part(replace(part, inputs={**part.inputs, "token_ids": token_ids}))


class EncoderDecoder(Decoder):
    """A decoder whose sequences have a source text, which an encoder reads first."""

    def _bind_others(self, programs: Sequence[Program], arenas: Sequence[Arena]) -> None:
        (program,), (arena,) = programs, arenas
        self._sources: CudaSources | None = None
        self._encode: Callable[[Arrays, Dims], object]
        if isinstance(self.steps, CudaSteps):
            self._sources = CudaSources(
                program, self._kernels, arena, self._states, self.steps.graphs
            )
            self._encode = self._sources.start
            self.graph_use += self._sources.graph_use
            return
        encoder = CpuRunner(
            program,
            self._kernels,
            arena,
            self._states,
            handoffs=self._link.handoffs,
            number=1,
            of_steps=True,
        )
        self._encode = partial(encoder.run, out=[])
        if self._searching_steps is not None:
            self._searching_steps.encoder = encoder

    def close(self) -> None:
        if self._sources is not None:
            self._sources.close()
        super().close()

    def _before(self, step: PackedStep) -> None:
        """Start the copies of blocks, and encode the sources of the step."""
        super()._before(step)
        if step.sources:
            sources, dims = step.sources, source_dims(step.sources)
            if self.adapters is not None:
                sources, dims = self._adapted(sources, dims, 1)
            self._encode(sources, dims)
