"""The programs of a model, as one device runs them.

A model that runs whole sequences has one: its encoder with the head of a task. With further outputs it has its encoder,
and a head for each task, which runs for the sequences that ask for it. A model of spans may have an encoder of labels
behind it. A model that generates has the step of its decoder, then the encoder of its source texts, if it has one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from varlen.config import CODED, EngineConfig
from varlen.costs.store import find_cache
from varlen.errors import ConfigError
from varlen.execution.adapters import Adapters, find_adapters
from varlen.execution.arenas import KvSize, kv_size
from varlen.execution.cpu.linear_paths import BATCHES, STEPS, choose_paths, in_large_pages
from varlen.execution.cpu.runner import limit_primitives
from varlen.execution.cpu.stage_cut import agree_on_cut, choose_bounds
from varlen.execution.cuda.step_fusion import fuse_steps
from varlen.execution.device import check_task_device, check_task_dtype, choose_dtype, cost_fields
from varlen.execution.int8.calibration import BITS, Codes, WeightBits, product_of, to_codes
from varlen.execution.int8.int8_model import to_int8
from varlen.execution.int8.layer_inputs import (
    CalibratedDecoder,
    CalibratedEncoder,
    calibration_kv,
)
from varlen.execution.rank_link import NO_OTHERS, RankLink
from varlen.models.blocks import inputs
from varlen.models.blocks.attention import CrossAttention, PagedAttention
from varlen.models.blocks.heads import Heads, record_head
from varlen.models.checkpoint.layers import StageLayers
from varlen.models.checkpoint.lora_folder import adapter_folders
from varlen.models.checkpoint.vector_layers import RoundLayer, load_layers
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder, load_encoder, load_heads
from varlen.models.registry import DecoderModel, EncoderDecoderModel, EncoderModel
from varlen.program.adapters import AdapterTables
from varlen.program.program import Program, Value, bytes_of
from varlen.program.rank import Rank
from varlen.program.recorder import Recorder
from varlen.program.stages import StageProgram
from varlen.tasks import TASKS, Task
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops

_log = logging.getLogger(__name__)

# Input of a head that is a program of its own: the encoder's last hidden state of some sequences, `[tokens, hidden]`.
HIDDEN = "hidden"
# The least KV cache: no step finds keys in it.
_NO_KV = KvSize(1, 1, 0, torch.float32)


@dataclass(frozen=True, slots=True)
class LoadedPrograms:
    """The programs of a loaded model; they hold the weights.

    Attributes:
        programs: the programs, in the order that the module names.
        vocab_size, type_vocab_size: ids below these are valid.
        cost_fields: fields that decide the run time of batches beside settings.
        kv: size of the KV caches, if the model generates.
        parts: the part of each stage of each program; empty without stages.
        few_rows: a step of few rows on a GPU, if it has a program of its own.
    """

    programs: tuple[Program, ...]
    vocab_size: int
    type_vocab_size: int
    dtype: str
    weight_bytes: int
    cost_fields: Mapping[str, str]
    kv: KvSize | None
    parts: Sequence[Sequence[StageProgram]] = ()
    adapters: Adapters | None = None
    tables: AdapterTables | None = None
    few_rows: Program | None = None


def load_programs(
    kind: type[WholeSequences | Steps],
    checkpoint: Checkpoint,
    config: EngineConfig,
    task: Task,
    device: torch.device,
    kernels: object,
    *,
    longest: int,
    seconds: float,
    workers: int = 1,
    link: RankLink[Any] = NO_OTHERS,
    beside: int = 0,
) -> LoadedPrograms:
    """Return the programs of a checkpoint for a task.

    Args:
        checkpoint, config, kernels, link: arguments of `Runner`.
        longest: longest sequence, in tokens.
        workers: workers that hold adapters each.
        seconds: most time to measure a cut; 0 measures none, nor linear layers.
        beside: bytes of a KV block of a draft model.

    Raises:
        CheckpointError: the checkpoint is incomplete, or lacks the head of the task.
        ConfigError: the device or the task does not run the dtype, or `kv_bytes` allows no block.
    """
    check_task_dtype(config.dtype, task)
    check_task_device(device, task)
    dtype = choose_dtype(config.dtype, device)
    loading = _Loading(checkpoint, config, task, dtype, device, link.rank, beside)
    # its weights go with the model: packed ones replace them
    loaded = _record(
        kind, loading, kernels, longest=longest, seconds=seconds, workers=workers, link=link
    )
    if device.type == "cpu":
        choose = partial(
            choose_paths,
            kernels=kernels,
            config=config,
            key=loaded.cost_fields,
            use=kind.use,
            threads=kind.threads(),
            seconds=seconds,
            # each stage has layers of its own to measure
            link=NO_OTHERS if loaded.parts else link,
        )
        loaded = replace(loaded, programs=in_large_pages(tuple(map(choose, loaded.programs))))
    elif loaded.kv is not None:
        loaded = replace(loaded, few_rows=fuse_steps(loaded.programs[0]))
    if (tables := loaded.tables) is not None:
        slots = f"{tables.slots} of ranks {sum(tables.ranks.values())}"
        loaded = replace(loaded, cost_fields={**loaded.cost_fields, "adapters": slots})
    return loaded


def _record(
    kind: type[WholeSequences | Steps],
    loading: _Loading,
    kernels: object,
    *,
    longest: int,
    seconds: float,
    workers: int,
    link: RankLink[Any],
) -> LoadedPrograms:
    """Return the programs of a checkpoint, or of one stage; see `load_programs`."""
    config, dtype = loading.config, str(loading.dtype)
    fields = dict(cost_fields(loading.checkpoint, loading.device, link.rank))
    cut = agree_on_cut(
        lambda: choose_bounds(
            lambda shapes: kind(loading, shapes).record(replace(_NO_KV, dtype=loading.dtype))[0],
            kernels,
            config,
            fields | {"dtype": dtype} | kind.cost_fields(loading.task),
            use=kind.use,
            seconds=seconds,
        ),
        link,
    )
    model = kind(loading, None if cut is None else cut.layers)
    # every stage has as many blocks as the one with the most layers
    kv = model.kv_size(longest, None if cut is None else cut.most_layers)
    if kv is not None:
        kv = replace(kv, num_blocks=link.agree(partial(int, kv.num_blocks)))
    adapters, tables = _adapters_of(model, loading, workers, kv or _NO_KV)
    programs = model.record(kv or _NO_KV, tables)
    parts = [] if cut is None else [cut.parts(program) for program in programs]
    if parts:
        programs = tuple(of_stages[link.stage.number].program for of_stages in parts)
    if config.approximate_gelu:
        fields["gelu"] = "tanh"
    if config.kv_cache_dtype != "auto":
        fields["kv_cache"] = config.kv_cache_dtype
    kernels_used = Counter(op.kernel for program in programs for op in program.ops)
    if kept := kernels_used["linear_blocks"]:
        _log.info("linear layers that keep codes: %d", kept)
        fields["linear_blocks"] = str(kept)
    name = dtype.removeprefix("torch.")
    if loading.codes is not None:
        programs, name = to_codes(programs, loading.codes, loading.device), loading.codes
    elif bits := BITS.get(config.dtype):
        cores = max(workers, torch.get_num_threads())
        programs = model.to_int8(programs, find_cache(config.cache_folder), bits, cores)
        name = config.dtype
        fields["int8"] = f"{product_of(bits).kernel} of {dtype}"
    return LoadedPrograms(
        programs,
        model.vocab_size,
        model.type_vocab_size,
        name,
        bytes_of([weight for program in programs for weight in program.weights]),
        fields,
        kv,
        parts,
        adapters,
        tables,
    )


def _adapters_of(
    model: WholeSequences | Steps, loading: _Loading, workers: int, kv: KvSize
) -> tuple[Adapters | None, AdapterTables | None]:
    """Return the adapters of a model and the tables for them, if it has any.

    Raises:
        ConfigError: the model serves none, or see `find_adapters`.
    """
    checkpoint, config = loading.checkpoint, loading.config
    if not adapter_folders(checkpoint.folder, config.adapters):
        return None, None
    for is_refused, what in (
        (loading.device.type != "cpu", "the device is a GPU"),
        (not checkpoint.family.takes_adapters, f"the model is a {checkpoint.architecture}"),
        (loading.task == "extract", "the task is extract"),
    ):
        if is_refused:
            raise ConfigError(
                f"the checkpoint has adapters, and {what}, which serves none; the setting adapters: none serves it"
                " without them"
            )
    adapters = find_adapters(
        checkpoint, config, lambda tables: model.record(kv, tables), loading.device, workers
    )
    assert adapters is not None
    if config.num_processes > 1 and adapters.slots < adapters.num_served:
        raise ConfigError(
            f"adapter_bytes holds {adapters.slots} of {adapters.num_served} adapters; ranks and stages hold all of"
            " them: raise adapter_bytes"
        )
    most = config.max_running_sequences + config.short_slots
    if TASKS[loading.task].is_iterative and adapters.slots < min(adapters.num_served, most):
        raise ConfigError(
            f"adapter_bytes holds {adapters.slots} of {adapters.num_served} adapters; a model that generates needs room"
            f" for an adapter of each of the {most} running sequences: raise adapter_bytes, or lower"
            " max_running_sequences"
        )
    return adapters, adapters.new_tables()


@dataclass(frozen=True, slots=True)
class _Loading:
    """What decides how a model is loaded and recorded; see `load_programs`."""

    checkpoint: Checkpoint
    config: EngineConfig
    task: Task
    dtype: torch.dtype
    device: torch.device
    rank: Rank
    beside: int

    @property
    def codes(self) -> Codes | None:
        """Codes of weights on a GPU; None for others."""
        is_coded = self.device.type == "cuda" and self.config.dtype in CODED
        return cast(Codes, self.config.dtype) if is_coded else None

    @property
    def weights_device(self) -> torch.device:
        """Device on which weights are loaded."""
        return self.device if self.codes is None else torch.device("cpu")

    @property
    def keeps_codes(self) -> bool:
        """Whether linear layers keep codes."""
        return self.config.keeps_codes and self.device.type == "cpu" and has_compiled_ops()

    def new_recorder(
        self, adapters: AdapterTables | None = None, *, is_padded: bool = False
    ) -> Recorder:
        return Recorder(
            for_gpu=self.device.type == "cuda",
            approximate_gelu=self.config.approximate_gelu,
            has_key_lengths=self.task == "token_embed" and self.checkpoint.has_unattended_tokens,
            is_padded=is_padded,
            rank=self.rank,
            adapters=adapters,
        )


class WholeSequences:
    """An encoder, whose sequences run as a whole; or one stage."""

    use = BATCHES

    def __init__(self, loading: _Loading, stage: StageLayers | None) -> None:
        self._loading, self._stage = loading, stage
        if loading.codes is None and loading.config.dtype in BITS:
            self._calibrated = CalibratedEncoder(self._load, loading.checkpoint)
        else:
            self._load(loading.dtype)
        self.vocab_size = self._encoder.token_table.vocab_size
        self.type_vocab_size = self._encoder.type_vocab_size

    def _load(self, dtype: torch.dtype) -> EncoderModel:
        loading = self._loading
        encoder = load_encoder(
            loading.checkpoint,
            dtype,
            loading.weights_device,
            loading.rank,
            self._stage,
            keeps_codes=loading.keeps_codes,
        )
        if dtype == loading.dtype:
            self._encoder = encoder
        return encoder

    @staticmethod
    def cost_fields(task: Task) -> dict[str, str]:
        return {"task": task}

    @staticmethod
    def threads() -> int:
        limit_primitives()
        return 1

    def kv_size(self, longest: int, layers: int | None) -> None:
        """Return None: nothing outlives a batch."""

    def record(
        self,
        kv: KvSize,  # noqa: ARG002
        adapters: AdapterTables | None = None,
    ) -> tuple[Program, ...]:
        """Return the forward pass with the head of the task.

        With further outputs, pass and heads are programs of their own, and so is an encoder of labels.
        """
        loading = self._loading
        is_padded, further = loading.config.execution == "padded", loading.config.further_tasks
        ops = loading.new_recorder(adapters, is_padded=is_padded)
        mix = loading.checkpoint.layer_mix if "embed" in (loading.task, *further) else None
        if mix is not None:
            if further:
                raise ConfigError(
                    "outputs must be empty: the checkpoint has the module WeightedLayerPooling, whose vector is served"
                    " alone"
                )
            ops.mix_layers(mix.load(loading.checkpoint.folder))
        hidden = self._encoder.record(ops)
        if mix is not None:
            hidden = ops.mixed_layers
        if not further:
            layers = self._heads(loading.task)
            program = ops.finish(self._record_head(ops, loading.task, hidden, layers))
            return (program, *self._record_labels(layers))
        heads = []
        for task in (loading.task, *further):
            head = loading.new_recorder(adapters)
            rows = head.input(HIDDEN, hidden.shape, hidden.dtype)
            heads.append(head.finish(self._record_head(head, task, rows, self._heads(task))))
        return (ops.finish(hidden), *heads)

    def _heads(self, task: Task) -> Heads:
        loading = self._loading
        return load_heads(
            loading.checkpoint, self._encoder, task, loading.dtype, loading.device, loading.rank
        )

    def _record_labels(self, heads: Heads) -> tuple[Program, ...]:
        """Return the program of an encoder of labels, if there is one."""
        if heads.extraction is None:
            return ()
        ops = self._loading.new_recorder()
        labels = heads.extraction.record_labels(ops)
        if labels is None:
            return ()
        if self._loading.config.num_processes > 1:
            raise ConfigError(
                "pipeline_parallel is above 1; allowed with an encoder of labels (gliner_config.json): 1"
            )
        return (ops.finish(labels),)

    def _record_head(self, ops: Recorder, task: Task, hidden: Value, heads: Heads) -> Value:
        checkpoint, device = self._loading.checkpoint, self._loading.device
        layers = load_layers(checkpoint.folder, checkpoint.vector_layers(task), device)
        if task == "embed" and checkpoint.rounds:
            layers = (*layers, RoundLayer())
        return record_head(
            ops,
            task,
            heads,
            hidden,
            checkpoint.pooling,
            layers,
            checkpoint.splade,
            pools_prompt=checkpoint.pools_prompt,
        )

    def to_int8(
        self, programs: Sequence[Program], cache: Path | None, bits: WeightBits, cores: int
    ) -> tuple[Program, ...]:
        body, *heads = programs
        return (*to_int8(self._calibrated, [body], cache, bits, cores), *heads)


class Steps:
    """A decoder, perhaps with an encoder, whose sequences run step by step; or one stage."""

    use = STEPS
    type_vocab_size = 1

    def __init__(self, loading: _Loading, stage: StageLayers | None) -> None:
        self._loading, self._stage = loading, stage
        self._has_sources = loading.checkpoint.translate is not None
        if loading.codes is None and loading.config.dtype in BITS:
            self._calibrated = CalibratedDecoder(self._calibration_steps, loading.checkpoint)
        else:
            self._load(loading.dtype)
        self.vocab_size = self._model.token_table.vocab_size

    def _load(self, dtype: torch.dtype) -> DecoderModel | EncoderDecoderModel:
        loading = self._loading
        model = load_decoder(
            loading.checkpoint,
            dtype,
            loading.weights_device,
            loading.rank,
            self._stage,
            keeps_codes=loading.keeps_codes,
        )
        if dtype == loading.dtype:
            self._model = model
        return model

    def _calibration_steps(self, dtype: torch.dtype) -> tuple[Program, ...]:
        return record_steps(self._load(dtype), calibration_kv(dtype))

    @staticmethod
    def cost_fields(task: Task) -> dict[str, str]:  # noqa: ARG004
        """Return nothing: the checkpoint decides the task."""
        return {}

    @staticmethod
    def threads() -> int:
        return torch.get_num_threads()

    def kv_size(self, longest: int, layers: int | None) -> KvSize:
        """Return the size of the KV caches that the settings allow."""
        config = self._loading.config
        return kv_size(
            config,
            self._loading.device,
            self._loading.dtype,
            self._model.attention_heads,
            num_layers=layers or len(self._model.layers),
            # a source and its target
            lengths=[longest] * (2 if self._has_sources else 1),
            has_beams=self._has_sources,
            processes=config.num_processes,
            beside=self._loading.beside,
        )

    def record(self, kv: KvSize, adapters: AdapterTables | None = None) -> tuple[Program, ...]:
        return record_steps(self._model, kv, partial(self._loading.new_recorder, adapters))

    def to_int8(
        self, programs: Sequence[Program], cache: Path | None, bits: WeightBits, cores: int
    ) -> tuple[Program, ...]:
        return to_int8(self._calibrated, programs, cache, bits, cores)


def record_steps(
    model: DecoderModel | EncoderDecoderModel,
    kv: KvSize,
    new_recorder: Callable[[], Recorder] = Recorder,
) -> tuple[Program, ...]:
    """Return the program of a decoder's step, then the encoder's, if any.

    The encoder's program has no outputs: it stores keys and values for the decoder.

    Args:
        kv: sizes of its KV caches.
    """
    caches = kv.num_blocks, kv.block_size, kv.dtype
    ops, attention = new_recorder(), PagedAttention(*caches)
    others: tuple[Program, ...] = ()
    if isinstance(model, EncoderDecoderModel):
        cross, encoder_ops = CrossAttention(*caches), new_recorder()
        model.record_encoder(encoder_ops, cross)
        hidden = model.record(ops, attention, cross)
        others = (encoder_ops.finish(),)
    else:
        hidden = model.record(ops, attention)
    rows = ops.select_rows(hidden, inputs.logit_rows(ops))
    return (ops.finish(model.record_logits(ops, rows)), *others)
