"""A loaded decoder: steps in, one token per sequence that samples out."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.execution.arenas import caches_of, new_caches, step_arenas
from varlen.execution.bound_program import BoundProgram
from varlen.execution.cpu.compiled_program import compile_program
from varlen.execution.cpu.step_runner import CpuSteps
from varlen.execution.cuda.graphs import CudaGraphs
from varlen.execution.cuda.step_device import GpuSteps
from varlen.execution.cuda.step_runner import CudaSteps
from varlen.execution.device import choose_device, name_of
from varlen.execution.model_info import (
    GraphUse,
    StepInfo,
    edit_limits,
    generation_limit,
    step_limit,
)
from varlen.execution.programs import load_programs
from varlen.execution.rank_link import NO_OTHERS, RankLink
from varlen.execution.source_encoder import SourceEncoder
from varlen.execution.step_launcher import Chooser, StepLauncher
from varlen.execution.step_packing import (
    DeviceEdits,
    DeviceSearches,
    PackedStep,
    choices_of,
    pack_step,
    part_of_step,
    source_arrays,
    step_arrays,
    tensors_of,
)
from varlen.memory.memory_use import MemoryUse
from varlen.memory.out_of_memory import memory_errors
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Int32Array
from varlen.scheduling.batch import Batch, Chunk
from varlen.scheduling.device_plan import (
    BeamStep,
    Chosen,
    DevicePlan,
    SampledToken,
)
from varlen.scheduling.iteration.iteration import MAX_IN_FLIGHT
from varlen_kernels.cpu import sample_tokens
from varlen_kernels.cpu.greedy import best_tokens
from varlen_kernels.ops import kernels_for


class DeviceSteps(Protocol):
    """Runs a program's steps on one device."""

    def stream(self) -> AbstractContextManager[object]:
        """Return the context in which everything on the device is done."""

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the logits of a step, `[logit rows, vocabulary]`, valid until the next one."""

    def close(self) -> None:
        """Release device memory."""


class StepRunner:
    """Runs the steps of one model on one device. Not for two threads at once.

    Attributes:
        link: link to the other processes that hold the model.
        slots: steps that may be in flight.
        device: device of weights, caches and steps.
        dtype: data type of weights and activations.
        vocab_size: token ids are below this.
        max_sequence_tokens: longest sequence, prompt and answer together, in tokens.
        max_step_tokens: largest step, in tokens.
        weight_bytes: memory of the weights, in bytes.
        kv: size of the KV caches.
        programs: the step of the decoder, then the encoder if there is one.
        arenas: memory of their intermediates.
        steps: runs the steps of the decoder.
        graph_use: cost of the CUDA graphs, if there are any.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        choice: Chooser,
        *,
        gpu: int = 0,
        kernels: object | None = None,
        link: RankLink[PackedStep] = NO_OTHERS,
    ) -> None:
        """Load the weights, record the step and reserve the KV caches.

        Args:
            checkpoint: the checkpoint to load.
            config: the settings.
            choice: chooses tokens from logits on the device of the settings.
            gpu: number of the GPU, if the model runs on one.
            kernels: a module with the functions that ops name; None selects the device's own.
            link: link to the other ranks, if this process holds a part of the model.

        Raises:
            CheckpointError: the checkpoint is incomplete.
            ConfigError: a limit does not fit the checkpoint, or the device is absent.
        """
        self.link = link
        has_sources = checkpoint.translate is not None
        checkpoint.check_task("translate" if has_sources else "generate")
        self.max_sequence_tokens = generation_limit(checkpoint, config)
        self.device = choose_device(config.device, gpu)
        self.max_step_tokens = step_limit(checkpoint, config)
        kernels = kernels or kernels_for(self.device)
        loaded = load_programs(
            checkpoint,
            config,
            self.device,
            kernels,
            max_sequence_tokens=self.max_sequence_tokens,
            link=link,
        )
        self.programs, self.vocab_size = loaded.programs, loaded.vocab_size
        self.dtype, self.kv, self.weight_bytes = loaded.dtype, loaded.kv, loaded.weight_bytes
        caches = [state for state in self.programs[0].states if state.name not in link.states]
        self._kv_memory = new_caches(caches, self.device)
        self._states = {**caches_of(caches, self._kv_memory), **link.states}
        self._choice = choice
        # one thread may prepare a step while another one runs a step
        self._searching = Lock()
        self.arenas = step_arenas(
            self.programs, config, self.device, max_step_tokens=self.max_step_tokens
        )
        if link.handoffs is not None:
            link.handoffs.map(loaded.parts, [arena.largest for arena in self.arenas])
        bound = self._bind(kernels)
        self._encoder = SourceEncoder(bound[1]) if has_sources else None
        blocks = -(-self.max_sequence_tokens // self.kv.block_size)
        self._kernels: Any = kernels
        self.searches = DeviceSearches(
            self._kernels,
            self.device,
            rows=self.arenas[0].largest["logit_rows"],
            blocks=blocks,
            block_size=self.kv.block_size,
        )
        self.edits = DeviceEdits(kernels, self.device, edit_limits(checkpoint, config))
        self.steps: DeviceSteps
        self.slots = 1
        self._launcher: StepLauncher[DevicePlan] | None = None
        self.graph_use = GraphUse()
        if self.device.type == "cuda":
            self.steps = CudaSteps(
                bound[0],
                blocks_per_sequence=blocks,
                blocks_per_source=blocks if has_sources else 0,
                graphs=CudaGraphs(self.device, config.device_timeout_seconds),
                searches=self.searches,
                edits=self.edits,
                follow=self._follow,
            )
            self.graph_use = self.steps.graph_use
            self.slots = MAX_IN_FLIGHT
            self._launcher = StepLauncher(GpuSteps(self.steps, self._prepare, choice), choice)
        else:
            self.steps = CpuSteps(bound[0], link.stage)

    def _bind(self, kernels: object) -> list[BoundProgram]:
        """Return the programs with the memory that they read and write."""
        return [
            BoundProgram(
                program,
                kernels,
                arena,
                self._states,
                self.kv.block_size,
                compile_program(program, kernels, self._states),
                number,
                self.link.handoffs,
            )
            for number, (program, arena) in enumerate(zip(self.programs, self.arenas, strict=True))
        ]

    def launch_batch(self, batch: Batch) -> Callable[[], Sequence[SampledToken | BeamStep]]:
        """Start a step; return a function that waits for its outputs.

        On a CPU that function runs the step. The outputs are the token of each sample and the step of each search,
        chunk by chunk. The function raises:
            MemoryError: too little memory for what the step needs beside the arena.
            SkippedStepError: the step before it failed.
        """
        if self._launcher is not None:
            return self._launcher.launch(batch)
        return partial(self._run, batch)

    def wait(self, timeout: float | None) -> bool:  # noqa: ARG002  # of every launcher
        """Return True: nothing is known of a step before its outputs are asked for."""
        return True

    def run_batch(self, batch: Batch) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of a step; see `launch_batch`."""
        return self.launch_batch(batch)()

    def _run(self, step: Batch) -> Sequence[SampledToken | BeamStep]:
        assert isinstance(self.steps, CpuSteps)
        choice = self._choice.plan(step)
        packed = pack_step(step, self.kv.block_size, choice)
        if packed.beams:
            packed.beams["given"][:] = self._choice.given(step)
        chosen = self.run_packed(packed)
        logits = None if choice.is_whole else self.steps.last_logits(step.num_logit_rows)
        with memory_errors(), torch.inference_mode():
            return self._choice.outputs(step, choice, chosen, logits)

    def _prepare(self, step: Batch) -> None:
        """Start the copies of blocks, and the encoder."""
        self._copy_blocks(step.copies)
        if self._encoder is not None:
            self._encoder.encode(step.chunks)

    def run_packed(self, step: PackedStep) -> Chosen:
        """Run a step on a CPU; return what was chosen here.

        The host chooses the rest from logits that are valid until the next step.

        Raises:
            MemoryError: too little memory for what the step needs beside the arena.
        """
        return self.run_prepared(step, self.prepare(step))

    def prepare(self, step: PackedStep) -> PackedStep:
        """Return the part of a step that ranks or stages run.

        Another thread may run a step of other sequences meanwhile.

        Raises:
            MemoryError: too little memory.
        """
        with memory_errors(), torch.inference_mode(), self._searching:
            copies = step.copies
            if step.beams:
                # on a CPU, blocks are copied one after another
                more = self.searches.follow(tensors_of(step.beams), tensors_of(step.inputs))
                copies = np.concatenate([copies, more.numpy()])
            return part_of_step(step.inputs, copies, step.sources, step.order)

    def run_prepared(self, step: PackedStep, part: PackedStep) -> Chosen:
        """Run a step whose part is prepared; see `run_packed`."""
        with memory_errors(), torch.inference_mode():
            logits = self.run_part(part)
            token_ids: Sequence[int] = ()
            if step.edits:
                self._edit(logits, step)
            if "uniform" in step.draws:
                token_ids = sample_tokens(logits, **tensors_of(step.draws)).tolist()
            elif step.draws:
                token_ids = best_tokens(logits).tolist()
            searches = None
            if step.searches:
                with self._searching:
                    numbers = self.searches.advance(
                        logits, step.searches, tensors_of(step.searches)
                    )
                searches = choices_of(numbers, step.searches)
            return Chosen(token_ids, searches)

    @torch.inference_mode()
    def run_part(self, step: PackedStep) -> Tensor:
        """Run this process's part of a step on a CPU; return the logits.

        The leader has them, until the next step with this place.
        """
        assert isinstance(self.steps, CpuSteps)
        with self.link.running(step):
            self._copy_blocks(step.copies)
            if self._encoder is not None:
                self._encoder.run(step.sources)
            return self.steps.run(step.inputs, step.place)

    @property
    def has_sources(self) -> bool:
        """Whether each sequence has a source text, which an encoder reads."""
        return self._encoder is not None

    @property
    def info(self) -> StepInfo:
        """Model facts for the engine."""
        return StepInfo(
            device=self.device.type,
            device_name=name_of(self.device),
            dtype=self.dtype,
            vocab_size=self.vocab_size,
            has_sources=self.has_sources,
            max_sequence_tokens=self.max_sequence_tokens,
            max_step_tokens=self.max_step_tokens,
            max_logit_rows=self.arenas[0].largest["logit_rows"],
            weight_bytes=self.weight_bytes,
            arena_bytes=sum(arena.capacity for arena in self.arenas),
            num_blocks=self.kv.num_blocks,
            block_size=self.kv.block_size,
            block_bytes=self.kv.block_bytes,
        )

    def use(self) -> MemoryUse:
        """Return the memory use. From any thread."""
        return MemoryUse.total(arena.use() for arena in self.arenas)

    def release_arenas(self) -> None:
        """Return the memory of intermediates to the system, while no step runs."""
        for arena in self.arenas:
            arena.release()

    def has_nan(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether the logits of a step hold NaN."""
        if isinstance(self.steps, CpuSteps):
            size = self.kv.block_size
            step = part_of_step(step_arrays(chunks, size), sources=source_arrays(chunks, size))
            return bool(self.run_part(step).isnan().any())
        with torch.inference_mode(), self.steps.stream():
            return bool(self.steps.logits(chunks).isnan().any())

    def padding_tokens(self, shape: BatchShape) -> int:  # noqa: ARG002  # of every runner
        """Return 0: a step has no padding."""
        return 0

    def check(self) -> None:
        """Run one op on the device; raise whatever it raises."""
        torch.zeros(1, device=self.device).add_(1).item()

    def close(self) -> None:
        """Release the KV caches, and what runs steps."""
        self.steps.close()
        self._states.clear()
        del self._kv_memory

    def _follow(self, beams: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        """Give beams their tokens and block tables, see `DeviceSearches.follow`."""
        self._kernels.copy_blocks(self._kv_memory, self.searches.follow(beams, inputs))

    def _edit(self, logits: Tensor, step: PackedStep) -> None:
        """Change logits before tokens are drawn."""
        edits, inputs = tensors_of(step.edits), tensors_of(step.inputs)
        rows, penalties = edits.pop("rows"), edits.pop("penalties")
        self.edits.apply(logits, inputs["token_ids"], inputs["logit_rows"], rows, penalties, edits)

    def _copy_blocks(self, copies: Int32Array | Sequence[tuple[int, int]]) -> None:
        if not len(copies):
            return
        # nothing waits for the copy of pinned memory
        blocks = torch.empty(
            len(copies), 2, dtype=torch.int32, pin_memory=self.device.type == "cuda"
        )
        blocks.numpy()[:] = copies
        self._kernels.copy_blocks(self._kv_memory, blocks.to(self.device, non_blocking=True))
