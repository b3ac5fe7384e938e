"""Runs a program on a CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from varlen.execution.cpu.all_cores import AllCores, LoneCores
from varlen.execution.cpu.compiled_program import compile_program
from varlen.execution.cpu.linear_paths import compile_products, compiles_products
from varlen.execution.cpu.step_cores import StepCores
from varlen.execution.cpu.token_counts import batch_sizes, padded
from varlen.execution.executor import CoreShare
from varlen.execution.handoffs import Handoffs
from varlen.execution.packing import Arrays, padded_inputs, step_dims, tensors_of
from varlen.memory.arena import Arena
from varlen.memory.shared import map_shared, new_shared
from varlen.memory.usage import Dims
from varlen.program.program import NO_STATES, PackedBatch, Program
from varlen.program.stages import NO_STAGES, Stage
from varlen_kernels.cpu.native.threads import usable_cores, using_cores

# oneDNN caches compiled primitives by shape, for GELU (32 KiB each) and products (up to 1.7 MiB each), 1,024 by
# default. An encoder has products of four shapes, for the numbers of tokens in `batch_sizes`.
_KEPT_PRIMITIVES = 192
# Products of batches up to this size are compiled before workers start, which share them.
_USUAL_TOKENS = 512


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
        program: the program.
        arena: memory of its intermediates.
        input_names: inputs that a batch brings; a stage receives others.
        is_compiled: whether it runs as calls of compiled code.
    """

    # neighbours of one length share an attention call
    longest_first = False

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
            program: the program.
            kernels: module with the functions that ops name.
            arena: memory of the intermediates.
            states: the tensor of each state, by name.
            handoffs: values that its stage receives and sends, if it is a part of a pipeline.
            number: number of the program in the model.
            of_steps: whether it runs steps of generation, which have few numbers of tokens.
        """
        self.program = program
        self.arena = arena
        self._kernels, self._states = kernels, states
        self._handoffs, self._number = handoffs, number
        received = () if handoffs is None else handoffs.received_names(number)
        self.input_names = [each.name for each in program.inputs if each.name not in received]
        self._is_padded = not of_steps and compiles_products(program)
        self._compiled = compile_program(program, kernels, states, needs_products=not of_steps)
        self.is_compiled = self._compiled is not None
        self._lone: LoneCores | None = None
        self._call: AllCores | None = None

    def share_cores(self, share: CoreShare, cores: int) -> None:
        """Use this number of cores while `share` says that a batch runs alone, else one."""
        self._lone = LoneCores(share, cores)
        if self._compiled is None:
            self._call = AllCores(self.program, self._lone)

    def compile(self) -> None:
        """Compile what batches of usual sizes need."""
        if self._is_padded:
            compile_products(self.program, self._kernels, batch_sizes(_USUAL_TOKENS))

    def launch(self, arrays: Arrays, dims: Dims) -> Callable[[], Tensor | None]:
        """Run a batch; return a function that returns its output.

        There is none if it went to the next stage.
        """
        outputs = self.run(arrays, dims)
        return lambda: outputs[0] if outputs else None

    @torch.inference_mode()
    def run(
        self, arrays: Arrays, dims: Dims, out: Sequence[Tensor] | None = None
    ) -> Sequence[Tensor]:
        """Return the outputs of a batch: `out`, or new tensors.

        There are none if they go to the next stage.

        Args:
            arrays: inputs by name.
            dims: their dimensions.
            out: tensors of the outputs' shapes.
        """
        inputs = tensors_of(arrays)
        if self._is_padded:
            dims = {**dims, "tokens": min(padded(dims["tokens"]), self.arena.max_tokens)}
            own = [value for value in self.program.inputs if value.name in arrays]
            inputs = padded_inputs(own, dims, arrays)
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
        if self._compiled is not None:
            outputs = self._compiled.run(batch, self._kernels, region, out=out, lone=self._lone)
        else:
            outputs = self.program.run(
                batch, self._kernels, region, states=self._states, out=out, call=self._call
            )
        if self._handoffs is None:
            return outputs
        self._handoffs.pass_on(self._number, received, sent)
        return () if sent else outputs

    def close(self) -> None:
        """No resources to release."""


class CpuSteps:
    """Runs the steps of a decoder on one core or all, and keeps their logits.

    Not for two threads at once.
    """

    def __init__(self, runner: CpuRunner, stage: Stage = NO_STAGES) -> None:
        """Allocate the logits.

        Args:
            runner: runs the program of a step.
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

    def run(self, arrays: Arrays, place: int = 0) -> Tensor:
        """Return the logits of a step, `[logit rows, vocabulary]`, valid until the next one in this place.

        Args:
            arrays: `step_arrays`.
            place: place of the logits, where the logits of several steps are kept.
        """
        dims = step_dims(arrays)
        logits = self.last_logits(dims["logit_rows"], place)
        if not self._runner.is_compiled:
            # ops of torch use its threads in any case
            self._runner.run(arrays, dims, [logits])
            return logits

        def step(cores: int) -> None:
            with using_cores(cores):
                self._runner.run(arrays, dims, [logits])

        self._cores.run(step, dims["tokens"], usable_cores())
        return logits

    def last_logits(self, rows: int, place: int = 0) -> Tensor:
        """Return the logits of the last step in a place, `[rows, vocabulary]`.

        Stages before the last have none.
        """
        return self._logits[place, :rows] if len(self._logits) else self._logits

    def share_logits(self) -> int:
        """Move the logits to memory that another process can map; return its file descriptor."""
        descriptor = new_shared(self._logits.nbytes)
        self._logits = map_logits(descriptor, *self._logits.shape)
        return descriptor

    def close(self) -> None:
        """No resources to release."""


def map_logits(descriptor: int, places: int, rows: int, vocab_size: int) -> Tensor:
    """Return the logits in the memory of a file descriptor, `[places, rows, vocabulary]` fp32."""
    memory = map_shared(descriptor)
    return torch.frombuffer(memory, dtype=torch.float32).view(places, rows, vocab_size)
