"""What a model keeps on its device, with one state for each kind.

`OneShot` runs whole sequences and keeps nothing. `Decoder` runs steps over KV caches, and `EncoderDecoder` encodes the
source texts of a step first. A state fills the inputs of its programs, and reads their result: rows of a head, or
chosen tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from varlen.config import EngineConfig
from varlen.execution.arenas import caches_of, new_caches
from varlen.execution.cpu.runner import CpuRunner, CpuSteps
from varlen.execution.cuda.graphs import CudaGraphs
from varlen.execution.cuda.runner import CudaSteps, OpsOnDevice
from varlen.execution.packing import (
    Arrays,
    PackedStep,
    dims_of,
    pack_step,
    part_of_step,
    payload_dims,
    prompt_arrays,
    source_arrays,
    source_dims,
    split_answers,
    step_arrays,
    step_dims,
    tensors_of,
    tokens_of_rows,
)
from varlen.execution.programs import LoadedPrograms
from varlen.execution.rank_link import NO_OTHERS, RankLink
from varlen.execution.token_state import Chooser, DeviceEdits, DeviceSearches, choices_of
from varlen.memory.arena import Arena, memory_errors
from varlen.memory.usage import Dims
from varlen.program.program import Program
from varlen.request.request import (
    DEFAULT_OPTIONS,
    Float32Array,
    Int32Array,
    Prompt,
    RequestOptions,
    Vectors,
)
from varlen.request.sparse_vectors import terms_in_order
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


class ProgramRunner(Protocol):
    """Runs batches of whole sequences on one device.

    Attributes:
        program: the program.
        input_names: inputs that a batch brings.
        longest_first: whether the longest sequence comes first in a batch.
    """

    program: Program
    input_names: list[str]
    longest_first: bool

    def launch(self, arrays: Arrays, dims: Dims) -> Callable[[], Tensor | None]:
        """Start a batch; return a function that waits for the output on the host.

        It is called once. There is no output if it goes to the next stage.
        """

    def close(self) -> None:
        """Release device memory."""


class OneShot:
    """Sequences that run as a whole, each with one answer.

    Attributes:
        device: runs the program.
    """

    def __init__(
        self,
        device: ProgramRunner,
        task: Task = "hidden",
        *,
        is_padded: bool = False,
        link: RankLink[Any] = NO_OTHERS,
    ) -> None:
        """Use a program.

        Args:
            device: runs it.
            task: task of the model.
            is_padded: whether sequences are padded to the longest of their batch, for comparison.
            link: link to the other processes that hold the model.
        """
        self.device = device
        self._task, self._is_padded, self._link = task, is_padded, link
        self._rows = device.program.row_dimension
        self._reads_payloads = not {"mask_rows", "word_rows"}.isdisjoint(device.input_names)

    def launch(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> Callable[[], list[Float32Array]]:
        """Start a batch; return a function that waits for the answer of each sequence.

        On a CPU the batch has run. The function must be called once. See `Runner.run` for the answers.
        """
        with self._link.running((prompts, options)):
            return self._launch(prompts, options)

    def launch_batch(self, batch: Batch) -> Callable[[], list[Float32Array]]:
        """Start a batch of the engine; see `launch`."""
        return self.launch(batch.prompts, batch.options)

    def _launch(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> Callable[[], list[Float32Array]]:
        count = len(prompts)
        if self._is_padded:
            padding = _padding(prompts)
            prompts = [*prompts, *padding]
            options = [*options, *(DEFAULT_OPTIONS for _ in padding)]
        lengths = [prompt.num_tokens for prompt in prompts]
        longest_first = self.device.longest_first
        order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=longest_first)
        packed = [prompts[i] for i in order]
        payloads = payload_dims(packed) if self._reads_payloads else {}
        names = self.device.input_names
        arrays = prompt_arrays(names, packed, [options[i] for i in order])
        dims = dims_of([lengths[i] for i in order], **payloads)
        with memory_errors():
            wait = self.device.launch(arrays, dims)

        def answers() -> list[Float32Array]:
            with memory_errors():
                output = wait()
                if output is None:
                    return []
                found = split_answers(output.numpy(), packed, self._rows)
                in_order = [found[place] for place in np.argsort(order).tolist()]
                return self._finished(prompts, in_order[:count])

        return answers

    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> list[Float32Array]:
        """Return the answer of each sequence; see `launch`."""
        return self.launch(prompts, options)()

    def close(self) -> None:
        """Release device memory."""
        self.device.close()

    def _finished(
        self, prompts: Sequence[Prompt], answers: list[Float32Array]
    ) -> list[Float32Array]:
        """Return answers in the form in which they leave the runner."""
        if self._task == "sparse_embed":
            return [active_terms(weights) for weights in answers]
        if self._task == "token_embed":
            return [_kept_vectors(*each) for each in zip(prompts, answers, strict=False)]
        return answers


def active_terms(weights: Float32Array) -> Float32Array:
    """Return the terms of a sequence whose weight is not 0, the largest weight first.

    Args:
        weights: `[vocabulary]`, of each term; none is negative.

    Returns:
        `[terms, 2]` fp32, see `terms_in_order`.
    """
    # numpy finds what is true ten times as fast as what is not 0
    terms = np.flatnonzero(weights != 0)
    return terms_in_order(terms, weights[terms])


def _kept_vectors(prompt: Prompt, vectors: Float32Array) -> Float32Array:
    places = prompt.payload_tokens(Vectors)
    return vectors if places is None else vectors[places]


def _padding(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts that fill each sequence up to the longest; their answers are dropped."""
    longest = max(prompt.num_tokens for prompt in prompts)
    missing = [longest - prompt.num_tokens for prompt in prompts]
    return [Prompt(np.zeros(count, dtype=np.int32)) for count in missing if count]


class Decoder:
    """Sequences that run step by step over KV caches.

    Not for two threads at once, except for `prepare`.

    Attributes:
        kv: size of the KV caches.
        searches: searches that the device continues.
        edits: edit lists of the device.
        steps: runs the program of a step.
    """

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
            config: the settings.
            chooser: chooses tokens from logits on the device.
            kernels: module with the functions that ops name.
            longest: longest sequence, in tokens.
            limits: number and size of edit lists.
            link: link to the other processes that hold the model.
        """
        assert loaded.kv is not None
        self.kv = loaded.kv
        self._device, self._largest = arenas[0].device, arenas[0].largest
        self._chooser, self._kernels, self._link = chooser, kernels, link
        program = loaded.programs[0]
        caches = [state for state in program.states if state.name not in link.states]
        self._kv_memory = new_caches(caches, self._device)
        self._states = {**caches_of(caches, self._kv_memory), **link.states}
        # one thread may prepare a step while another one runs a step
        self._searching = Lock()
        blocks, rows = -(-longest // self.kv.block_size), self._largest["logit_rows"]
        self.searches = DeviceSearches(
            kernels, self._device, rows=rows, blocks=blocks, block_size=self.kv.block_size
        )
        self.edits = DeviceEdits(kernels, self._device, limits)
        self.steps: CpuSteps | CudaSteps
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
            )
        else:
            runner = CpuRunner(
                program, kernels, arenas[0], self._states, handoffs=link.handoffs, of_steps=True
            )
            self.steps = CpuSteps(runner, link.stage)
        self._bind_others(loaded.programs[1:], arenas[1:])

    def launch_batch(self, batch: Batch) -> Callable[[], Sequence[SampledToken | BeamStep]]:
        """Return a function that runs a step on a CPU and returns its outputs."""
        return partial(self._run_batch, batch)

    def _run_batch(self, batch: Batch) -> Sequence[SampledToken | BeamStep]:
        assert isinstance(self.steps, CpuSteps)
        with memory_errors(), torch.inference_mode():
            plan = self._chooser.plan(batch)
            packed = pack_step(batch, self.kv.block_size, plan)
            self._give(packed, batch)
            chosen = self._run(packed, self._part_of(packed))
            logits = None if plan.is_whole else self.steps.last_logits(batch.num_logit_rows)
            return self._chooser.outputs(batch, plan, chosen, logits)

    def run_packed(self, step: PackedStep) -> Chosen:
        """Run a step on a CPU; return what was chosen here.

        The host chooses the rest from logits that are valid until the next step.

        Raises:
            MemoryError: too little memory for what the step needs beside the arena.
        """
        with memory_errors(), torch.inference_mode():
            return self._run(step, self._part_of(step))

    def prepare(self, step: PackedStep) -> PackedStep:
        """Return a step as ranks or stages run it: beams have tokens and blocks.

        Another thread may run a step of other sequences meanwhile.

        Raises:
            MemoryError: too little memory.
        """
        with memory_errors(), torch.inference_mode():
            return self._part_of(step)

    def run_prepared(self, step: PackedStep, part: PackedStep) -> Chosen:
        """Run a step whose part is prepared; see `run_packed`."""
        with memory_errors(), torch.inference_mode():
            return self._run(step, part)

    def _part_of(self, step: PackedStep) -> PackedStep:
        if not step.beams:
            return step
        with self._searching:
            # on a CPU, blocks are copied one after another
            more = self.searches.follow(tensors_of(step.beams), tensors_of(step.inputs))
        return replace(step, copies=np.concatenate([step.copies, more.numpy()]))

    def _run(self, step: PackedStep, part: PackedStep) -> Chosen:
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
            searches = choices_of(numbers, step.searches)
        return Chosen(token_ids, searches)

    @torch.inference_mode()
    def run_part(self, step: PackedStep) -> Tensor:
        """Run this process's part of a step on a CPU; return the logits.

        The leader has them, until the next step with this slot.
        """
        assert isinstance(self.steps, CpuSteps)
        with self._link.running(step):
            self._before(step)
            return self.steps.run(step.inputs, step_dims(step.inputs), step.slot)

    def pack(self, step: Batch, plan: DevicePlan) -> PackedStep:
        """Return a step as arrays; see `StepDevice`."""
        return pack_step(step, self.kv.block_size, plan)

    def may_queue(self, packed: PackedStep) -> bool:  # noqa: ARG002  # of every device
        """Return True: a stream takes any step."""
        return True

    def start(self, step: Batch, packed: PackedStep) -> Callable[[], Chosen]:
        """Start a step; return a function that waits for what the GPU chooses."""
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
        """Return the outputs of a step, and give the tokens to the next one."""
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
        if isinstance(self.steps, CpuSteps):
            return bool(self.run_part(step).isnan().any())
        with torch.inference_mode(), self.steps.stream():
            return bool(self.steps.logits(step).isnan().any())

    def close(self) -> None:
        """Release the KV caches, and what runs steps."""
        self.steps.close()
        self._states.clear()
        del self._kv_memory

    def _give(self, packed: PackedStep, step: Batch) -> None:
        """Give beams the tokens that the host has chosen."""
        if packed.beams:
            packed.beams["given"][:] = self._chooser.given(step)

    def _bind_others(self, programs: Sequence[Program], arenas: Sequence[Arena]) -> None:
        """Bind programs beside the step to their memory; a decoder has none."""

    def _before(self, step: PackedStep) -> None:
        """Start what comes before the program of a step: the copies of blocks."""
        self._copy_blocks(step.copies)

    def _follow(self, beams: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        """Give beams their tokens and block tables; see `DeviceSearches.follow`."""
        self._kernels.copy_blocks(self._kv_memory, self.searches.follow(beams, inputs))

    def _copy_blocks(self, copies: Int32Array) -> None:
        if not len(copies):
            return
        # nothing waits for the copy of pinned memory
        is_cuda = self._device.type == "cuda"
        blocks = torch.empty(len(copies), 2, dtype=torch.int32, pin_memory=is_cuda)
        blocks.numpy()[:] = copies
        self._kernels.copy_blocks(self._kv_memory, blocks.to(self._device, non_blocking=True))


class EncoderDecoder(Decoder):
    """A decoder whose sequences have a source text, which an encoder reads first."""

    def _bind_others(self, programs: Sequence[Program], arenas: Sequence[Arena]) -> None:
        """Bind the encoder to its memory."""
        (program,), (arena,) = programs, arenas
        self._encoder: CpuRunner | OpsOnDevice
        if self._device.type == "cuda":
            self._encoder = OpsOnDevice(program, self._kernels, arena, self._states)
            return
        self._encoder = CpuRunner(
            program,
            self._kernels,
            arena,
            self._states,
            handoffs=self._link.handoffs,
            number=1,
            of_steps=True,
        )

    def _before(self, step: PackedStep) -> None:
        """Start the copies of blocks, and encode the sources of the step."""
        super()._before(step)
        if step.sources:
            self._encoder.run(step.sources, source_dims(step.sources), [])
