"""A loaded model on one device: batches in, their outputs out.

A batch is some sequences, each with a number of tokens: all of its tokens in a model that runs whole sequences, or the
tokens of one step in a model that generates. `model_state` has the differences.

A model that extracts spans has labels, which are no tokens of a text for the scheduler, so a batch may have more than
memory holds, and then runs in parts. With a second encoder, for labels, results are kept by the label's tokens; those
used longest ago make room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from varlen.config import EngineConfig
from varlen.errors import ConfigError
from varlen.execution.adapters import ResidentAdapters
from varlen.execution.arenas import batch_arenas, step_arenas
from varlen.execution.cpu.runner import CpuRunner
from varlen.execution.cuda.graphs import CudaGraphs
from varlen.execution.cuda.runner import CudaRunner, CudaSteps, OpsOnDevice
from varlen.execution.device import choose_device, device_memory, device_name, name_of
from varlen.execution.executor import Outputs, StepLauncher
from varlen.execution.model_info import (
    GraphUse,
    ModelInfo,
    edit_limits,
    generation_limit,
    sequence_limit,
    step_limit,
)
from varlen.execution.model_state import (
    Decoder,
    DraftModel,
    EncoderDecoder,
    SeveralOutputs,
)
from varlen.execution.one_shot import OneShot, ProgramRunner
from varlen.execution.packing import Arrays, PackedStep
from varlen.execution.programs import (
    HIDDEN,
    LoadedPrograms,
    Steps,
    WholeSequences,
    load_programs,
)
from varlen.execution.rank_link import NO_OTHERS, RankLink
from varlen.execution.thread_executor import CoreShare
from varlen.execution.token_state import Chooser
from varlen.memory.arena import Arena
from varlen.memory.memory_use import AdapterUse, MemoryUse, Swap
from varlen.memory.planner import Dims
from varlen.models.blocks.inputs import LABEL_PART
from varlen.models.checkpoint.lora_folder import adapter_folders
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import Program, Value
from varlen.request.request import (
    DEFAULT_OPTIONS,
    SHORTEST_PROMPT,
    ApartLabels,
    Bytes,
    Float32Array,
    Int32Array,
    Prompt,
    RequestOptions,
)
from varlen.scheduling.batch import MAX_STEPS, Batch
from varlen.scheduling.device_plan import EditLimits
from varlen.tasks import TASKS, Task
from varlen_kernels.ops import kernels_for

# What several processes of a model run together: prompts and options, or the part of a step.
Work: TypeAlias = tuple[Sequence[Prompt], Sequence[RequestOptions]] | PackedStep
# Memory of the results that a worker keeps, in bytes.
KEPT_BYTES = 32 << 20


class Runner:
    """Runs batches of one model on one device. Not for two threads at once.

    Whole sequences use the cores that torch gives the thread of a CPU; workers give it one. Steps use all of them.

    Attributes:
        state: memory of the model on the device, which decides how batches run.
        slots: batches that may be in flight; more than one if `launch_batch` starts them.
        launch_batch: starts a batch and returns a function that waits for its outputs. On a CPU the batch has run then,
            and a step runs in that function. The outputs are the answer of each sequence, or the token of each sample
            and the step of each search, chunk by chunk. The function raises MemoryError if there is too little memory
            for what the batch needs beside the arena, and SkippedStepError if the step before failed.
        graph_use: cost of the CUDA graphs, if there are any.
    """

    state: OneShot | Decoder
    _resident: ResidentAdapters | None = None
    launch_batch: Callable[[Batch], Callable[[], Outputs]]
    # nothing is known of a batch before its outputs are asked for
    wait = None
    # set when a launch should end with the step that runs; None if each step is a launch
    arrived: Bytes | None = None
    # only adapters of other processes are counted
    adapter_uses: Sequence[AdapterUse] = ()

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        chooser: Chooser | None = None,
        *,
        gpu: int = 0,
        kernels: object | None = None,
        workers: int = 1,
        measures: bool = False,
        link: RankLink[Any] = NO_OTHERS,
    ) -> None:
        """Load the weights and record the forward passes; on a GPU, capture their graphs.

        Args:
            chooser: chooses tokens from logits on the device; None if the model runs whole sequences.
            kernels: a module with the functions that ops name; None selects the device's own.
            workers: number of runners of the model, which share `arena_bytes`.
            measures: whether to measure the fastest way to run linear layers of whole sequences, unless
                `warmup_seconds` is 0. Layers of steps are measured in any case.
            link: link to the other ranks or stages, if this process holds a part of the model.

        Raises:
            CheckpointError: the checkpoint is incomplete, or lacks the head of the task.
            ConfigError: a limit does not fit the checkpoint, or the device is absent.
        """
        self.link = link
        self.device = choose_device(config.device, gpu)
        self._config, self._workers = config, workers
        self._kernels: Any = kernels or kernels_for(self.device, link.rank.size)
        self.slots, self.graph_use = 1, GraphUse()
        self._heads: Sequence[CpuRunner] = ()
        if chooser is None:
            self._load_whole_sequences(checkpoint, measures * config.warmup_seconds)
        else:
            self._load_steps(checkpoint, chooser)

    def _load(
        self,
        kind: type[WholeSequences | Steps],
        checkpoint: Checkpoint,
        task: Task,
        *,
        longest: int,
        seconds: float,
        beside: int = 0,
    ) -> LoadedPrograms:
        self._loaded = load_programs(
            kind,
            checkpoint,
            self._config,
            task,
            self.device,
            self._kernels,
            longest=longest,
            seconds=seconds,
            workers=self._workers,
            link=self.link,
            beside=beside,
        )
        self.programs = self._loaded.programs
        return self._loaded

    def _load_whole_sequences(self, checkpoint: Checkpoint, seconds: float) -> None:
        config = self._config
        task = _task_of_sequences(checkpoint, config)
        longest = sequence_limit(checkpoint, config)
        self._load(WholeSequences, checkpoint, task, longest=longest, seconds=seconds)
        self._unweighted = None if checkpoint.m3 is None else checkpoint.m3.unweighted
        self.arenas: Sequence[Arena] = self._batch_arenas(longest)
        self._map_handoffs()
        device = self._new_program_runner()
        self._run_whole(device, task)
        self.info = self._info(
            task,
            longest,
            device_name(self.device),
            max_batch_tokens=min(config.max_batch_tokens, self.arena.max_tokens),
            outputs=config.further_tasks,
            has_apart_labels=isinstance(self.state, LabelledSpans),
            is_padded=config.execution == "padded",
            workers=self._workers,
        )
        if isinstance(device, CudaRunner | OpsOnDevice):
            self.slots = device.slots
        if isinstance(device, CudaRunner):
            self.graph_use = device.graph_use

    def _load_steps(self, checkpoint: Checkpoint, chooser: Chooser) -> None:
        config = self._config
        is_translation = checkpoint.translate is not None
        task: Task = "translate" if is_translation else "generate"
        checkpoint.check_task(task)
        longest = generation_limit(checkpoint, config)
        max_step_tokens = step_limit(checkpoint, config)
        seconds = config.warmup_seconds
        draft = self._load_draft(checkpoint, longest, seconds)
        beside = 0 if draft is None or draft.kv is None else draft.kv.block_bytes
        loaded = self._load(
            Steps, checkpoint, task, longest=longest, seconds=seconds, beside=beside
        )
        assert loaded.kv is not None
        self.arenas = step_arenas(
            self.programs if draft is None else (*self.programs, *draft.programs),
            config,
            self.device,
            max_step_tokens=max_step_tokens,
            few_rows=loaded.few_rows,
        )
        self._map_handoffs()
        self.state = (EncoderDecoder if is_translation else Decoder)(
            loaded,
            self.arenas,
            config,
            chooser,
            self._kernels,
            longest=longest,
            limits=edit_limits(checkpoint, config),
            link=self.link,
        )
        if draft is not None:
            weight_bytes = loaded.weight_bytes + draft.weight_bytes
            self._loaded = replace(loaded, weight_bytes=weight_bytes)
            decoder = Decoder(
                draft,
                self.arenas[1:],
                config,
                chooser,
                self._kernels,
                longest=longest,
                limits=EditLimits(0, 0),
                link=NO_OTHERS,
            )
            vocab_size = min(loaded.vocab_size, draft.vocab_size)
            self.state.draft = DraftModel(decoder, vocab_size, self.arenas[1].largest["sequences"])
        self.launch_batch, self.arrived = self.state.launch_batch, self.state.arrived
        if isinstance(self.state.steps, CudaSteps):
            self.graph_use = self.state.graph_use
            if self.link is NO_OTHERS:
                self.launch_batch, self.slots = StepLauncher(self.state, chooser).launch, MAX_STEPS
        self.info = self._info(
            task,
            longest,
            name_of(self.device),
            max_batch_tokens=max_step_tokens,
            max_logit_rows=self.arena.largest["logit_rows"],
            num_blocks=loaded.kv.num_blocks,
            block_size=loaded.kv.block_size,
            block_bytes=loaded.kv.block_bytes,
        )

    def _load_draft(
        self, checkpoint: Checkpoint, longest: int, seconds: float
    ) -> LoadedPrograms | None:
        """Return the draft model of a checkpoint, if the settings have one."""
        config = self._config
        if config.speculation != "draft_model":
            return None
        for is_refused, what, remedy in (
            (
                self.device.type != "cpu",
                "the device is a GPU",
                "device: cpu, or speculation: ngram",
            ),
            (
                adapter_folders(checkpoint.folder, config.adapters),
                "it has adapters",
                "adapters: none",
            ),
        ):
            if is_refused:
                raise ConfigError(f"speculation is draft_model, and {what}; set {remedy}")
        draft = Checkpoint.open(checkpoint.folder / config.draft_model)
        draft.check_task("generate")
        if longest > draft.position_limit:
            raise ConfigError(
                f"sequences have up to {longest} tokens, and the draft model has positions for"
                f" {draft.position_limit}: set max_sequence_tokens to that"
            )
        return load_programs(
            Steps,
            draft,
            replace(config, adapters="none"),
            "generate",
            self.device,
            self._kernels,
            longest=longest,
            seconds=seconds,
        )

    def _info(self, task: Task, longest: int, device: str, **own: Any) -> ModelInfo:
        loaded = self._loaded
        return ModelInfo(
            task=task,
            device=self.device.type,
            device_name=device,
            dtype=loaded.dtype,
            vocab_size=loaded.vocab_size,
            type_vocab_size=loaded.type_vocab_size,
            max_sequence_tokens=longest,
            max_arena_tokens=self.arena.max_tokens,
            weight_bytes=loaded.weight_bytes,
            arena_bytes=sum(arena.capacity for arena in self.arenas),
            cost_fields=loaded.cost_fields,
            adapters=() if loaded.adapters is None else loaded.adapters.reasons,
            adapter_bytes=0
            if loaded.tables is None
            else loaded.tables.nbytes // loaded.tables.slots,
            **own,
        )

    def another(self) -> Runner:
        """Return a runner of the same whole sequences on its CPU, with another arena."""
        other = copy(self)
        other.arenas = self._batch_arenas(self.info.max_sequence_tokens)
        other._run_whole(other._new_program_runner(), self.info.task)
        return other

    def _run_whole(self, device: ProgramRunner, task: Task) -> None:
        further = self._config.further_tasks
        is_padded = self._config.execution == "padded"
        link = None if self.link is NO_OTHERS else self.link
        if further:
            self._heads = [self._new_head(number) for number in range(1, len(self.programs))]
            heads = dict(zip((task, *further), self._heads, strict=True))
            self.state = SeveralOutputs(device, heads, self._unweighted, self._resident)
        elif len(self.programs) > 1:
            self._heads = [self._new_head(1)]
            self.state = LabelledSpans(
                device,
                *self._heads,
                inputs=self.program.inputs,
                largest=self.arena.largest,
                most_tokens=min(self._config.max_batch_tokens, self.arena.max_tokens),
                is_padded=is_padded,
            )
        elif task == "extract":
            self.state = SpansInParts(
                device, largest=self.arena.largest, is_padded=is_padded, link=link
            )
        else:
            self.state = OneShot(
                device,
                task,
                self._unweighted,
                is_padded=is_padded,
                link=link,
                adapters=self._resident,
            )
        self.launch_batch = self.state.launch_batch

    def share_cores(self, share: CoreShare) -> None:
        for each in (self.cpu_runner, *self._heads):
            each.share_cores(share, self._workers)

    def run_batch(self, batch: Batch) -> Outputs:
        return self.launch_batch(batch)()

    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> list[Float32Array]:
        """Return the answer of each of some whole sequences, in the order given.

        Args:
            prompts: checked, at least one; together at most `max_batch_tokens` long, padding included if they
                are padded, or one of at most `max_arena_tokens`.

        Returns:
            Per sequence: embed `[hidden]`, sparse_embed `[terms, 2]` (see `active_terms`), classify and rerank
            `[labels]`, hidden `[tokens, hidden]`, token_classify `[tokens, labels]`, token_embed `[vectors, features]`.
            Views of arrays made for this call. Nothing on a stage that is not the last.

        Raises:
            MemoryError: too little memory for what the batch needs beside the arena.
        """
        assert isinstance(self.state, OneShot)
        return self.state.run(prompts, options)

    def run_part(self, work: Work) -> Sequence[Float32Array] | Tensor:
        """Run this process's part of some work; return what the leader gets: answers, or logits."""
        if isinstance(work, PackedStep):
            return self.decoder.run_part(work)
        return self.run(*work)

    def facts(self) -> dict[str, Any]:
        """Return its description as a message has it."""
        return asdict(self.info)

    @property
    def decoder(self) -> Decoder:
        """The state of a model that generates."""
        assert isinstance(self.state, Decoder)
        return self.state

    @property
    def arena(self) -> Arena:
        return self.arenas[0]

    @property
    def program(self) -> Program:
        return self.programs[0]

    def use(self) -> MemoryUse:
        return MemoryUse.total(arena.use() for arena in self.arenas)

    def new_swaps(self) -> Sequence[Swap]:
        adapters = self.state.adapters
        return () if adapters is None else adapters.new_swaps()

    def release_arenas(self) -> None:
        """Return the memory of intermediates to the system, while no batch runs."""
        for arena in self.arenas:
            arena.release()

    def compile(self) -> None:
        """Compile what batches of whole sequences need, so that none of them has to."""
        self.compile_products()
        self.check()

    def compile_products(self) -> None:
        for each in (self.cpu_runner, *self._heads):
            each.compile()

    def check(self) -> None:
        """Run the smallest batch, or one op of a decoder; raise whatever it raises."""
        if isinstance(self.state, Decoder):
            torch.zeros(1, device=self.device).add_(1).item()
        else:
            self.run([SHORTEST_PROMPT], [DEFAULT_OPTIONS])

    def close(self) -> None:
        self.state.close()
        if self._resident is not None:
            self._resident.close()

    @property
    def cpu_runner(self) -> CpuRunner:
        """What runs whole sequences on a CPU."""
        assert isinstance(self.state, OneShot)
        assert isinstance(self.state.device, CpuRunner)
        return self.state.device

    def _batch_arenas(self, longest: int) -> Sequence[Arena]:
        parts = self._loaded.parts
        # stages run the same batches
        stages = [part.program for part in parts[0]] if parts else ()
        return batch_arenas(
            self.programs, self._config, longest, self.device, self._workers, stages
        )

    def _map_handoffs(self) -> None:
        if self.link.handoffs is not None:
            parts = [of_stages[self.link.stage.number] for of_stages in self._loaded.parts]
            self.link.handoffs.map(parts, [arena.largest for arena in self.arenas])

    def _new_head(self, number: int) -> CpuRunner:
        """Return what runs the head with this program, or the encoder of labels."""
        if self.device.type != "cpu":
            raise ConfigError(
                f"outputs is {self._config.outputs}; further outputs are served on CPUs: set device to cpu, or outputs"
                " to none"
            )
        states = {} if self._resident is None else self._resident.states
        head = CpuRunner(self.programs[number], self._kernels, self.arenas[number], states)
        head.input_names = [name for name in head.input_names if name != HIDDEN]
        return head

    def _new_program_runner(self) -> ProgramRunner:
        self._resident, loaded = None, self._loaded
        if loaded.adapters is not None and loaded.tables is not None:
            self._resident = ResidentAdapters(
                loaded.adapters, loaded.tables, loaded.programs, self.link.fault_of_ranks
            )
        parts, link = (self.programs[0], self._kernels, self.arenas[0]), self.link
        with device_memory(
            f"the GPU has too little memory for the graphs of batches up to {self.arena.max_tokens} tokens:"
            " lower max_batch_tokens, max_sequence_tokens or max_batch_sequences"
        ):
            if self.device.type == "cpu":
                own = {} if self._resident is None else self._resident.states
                states = {**link.states, **own}
                return CpuRunner(*parts, states, handoffs=link.handoffs)
            graphs = CudaGraphs(self.device, self._config.device_timeout_seconds)
            if self._config.execution == "padded":
                return OpsOnDevice(*parts, graphs, states=link.states)
            most = self._config.max_batch_tokens
            return CudaRunner(*parts, graphs, max_batch_tokens=most, states=link.states)


def _task_of_sequences(checkpoint: Checkpoint, config: EngineConfig) -> Task:
    """Return the task of a model that runs whole sequences.

    Raises:
        CheckpointError: the checkpoint lacks the head of the task.
        ConfigError: its answers are written token by token, and the model does not generate.
    """
    task = config.task or checkpoint.task
    checkpoint.check_outputs(task, config.further_tasks)
    if TASKS[task].is_iterative:
        others = [each for each in checkpoint.tasks if not TASKS[each].is_iterative]
        raise ConfigError(
            f'task is "{task}", whose answers are written token by token by a Generator or the server;'
            f" allowed here: {', '.join(others) or 'no task of this checkpoint'}"
        )
    return task


class SpansInParts(OneShot):
    """Texts with labels as a whole, as many of them as memory holds."""

    def __init__(self, device: ProgramRunner, *, largest: Dims, **settings: Any) -> None:
        """Use the program of texts.

        Args:
            largest: largest dimensions of a batch.
        """
        super().__init__(device, "extract", **settings)
        self._largest = largest

    def _launch(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> Callable[[], list[Float32Array]]:
        parts = list(self._parts(prompts))
        if len(parts) > 1:
            return self._launch_parts(prompts, options, parts)
        return super()._launch(prompts, options)

    def _parts(self, prompts: Sequence[Prompt]) -> Iterator[Sequence[int]]:
        most = self._largest["labels"], self._largest["pairs"]
        part: list[int] = []
        labels = pairs = 0
        for place, prompt in enumerate(prompts):
            own = prompt.num_labels, prompt.num_labels * prompt.num_words
            labels, pairs = labels + own[0], pairs + own[1]
            if part and (labels > most[0] or pairs > most[1]):
                yield part
                part = []
                labels, pairs = own
            part.append(place)
        yield part


class LabelledSpans(SpansInParts):
    """Texts with labels as a whole; labels that are not known run first."""

    def __init__(
        self,
        device: ProgramRunner,
        labels: ProgramRunner,
        *,
        inputs: Sequence[Value],
        most_tokens: int,
        **settings: Any,
    ) -> None:
        """Use the programs of texts and of labels.

        Args:
            inputs: inputs of the program of texts.
            most_tokens: tokens of the largest batch of several labels.
        """
        device.input_names = [
            name for name in device.input_names if not name.startswith(LABEL_PART)
        ]
        super().__init__(device, **settings)
        self._labels, self._most_tokens = OneShot(labels), most_tokens
        parts = [each for each in inputs if each.name.startswith(LABEL_PART)]
        sizes = [each.at({"labels": 0})[1] for each in parts]
        # columns of each input in a result
        self._columns: Mapping[str, slice] = {
            each.name: slice(*bounds)
            for each, bounds in zip(parts, pairwise(accumulate(sizes, initial=0)), strict=True)
        }
        self._size = sum(sizes)
        self._most_kept = KEPT_BYTES // (self._size * np.dtype(np.float32).itemsize)
        # by the label's tokens, the one used longest ago first
        self._kept: OrderedDict[bytes, Float32Array] = OrderedDict()

    def _inputs(
        self, packed: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> tuple[Arrays, Dims]:
        arrays, dims = super()._inputs(packed, options)
        payloads = [prompt.payload for prompt in packed]
        rows = self._results(
            [label for each in payloads if isinstance(each, ApartLabels) for label in each.labels]
        )
        of_labels = {
            name: np.ascontiguousarray(rows[:, columns]) for name, columns in self._columns.items()
        }
        return {**arrays, **of_labels}, dims

    def _results(self, labels: Sequence[Int32Array]) -> Float32Array:
        """Return the result for each label, `[labels, size]`."""
        keys = [label.tobytes() for label in labels]
        found: dict[bytes, Float32Array] = {}
        new: dict[bytes, Int32Array] = {}
        for key, label in zip(keys, labels, strict=True):
            kept = self._kept.get(key)
            if kept is None:
                new[key] = label
            else:
                found[key] = kept
                self._kept.move_to_end(key)
        for batch in _batches(sorted(new, key=len), self._most_tokens):
            prompts = [Prompt(new[key]) for key in batch]
            for key, row in zip(
                batch, self._labels.run(prompts, [DEFAULT_OPTIONS] * len(batch)), strict=True
            ):
                # not a view of the whole batch
                found[key] = self._kept[key] = row.copy()
        while len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)
        rows = np.empty((len(keys), self._size), np.float32)
        for row, key in zip(rows, keys, strict=True):
            row[:] = found[key]
        return rows


def _batches(keys: Sequence[bytes], most_tokens: int) -> Iterator[Sequence[bytes]]:
    """Yield labels that run together, by their tokens; one of them may be longer."""
    batch: list[bytes] = []
    tokens = 0
    for key in keys:
        count = len(key) // np.dtype(np.int32).itemsize
        tokens += count
        if batch and tokens > most_tokens:
            yield batch
            batch, tokens = [], count
        batch.append(key)
    if batch:
        yield batch
