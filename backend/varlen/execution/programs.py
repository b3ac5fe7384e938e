"""The programs of a model, as one device runs them.

A model that runs whole sequences has one: its encoder with the head of a task. A model that generates has the step of
its decoder, then the encoder of its source texts, if it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from varlen.config import EngineConfig
from varlen.costs.store import find_cache
from varlen.execution.arenas import KvSize, kv_size
from varlen.execution.cpu.linear_paths import BATCHES, STEPS, choose_paths
from varlen.execution.cpu.runner import limit_primitives
from varlen.execution.cpu.stage_cut import agree_on_cut
from varlen.execution.cpu.weight_pages import in_large_pages
from varlen.execution.device import check_task_device, check_task_dtype, choose_dtype
from varlen.execution.fingerprint import cost_fields
from varlen.execution.int8.int8_decoder import CALIBRATION_KV, CalibratedDecoder
from varlen.execution.int8.int8_encoder import CalibratedEncoder
from varlen.execution.int8.int8_model import to_int8
from varlen.execution.int8.quantization import BITS, WeightBits, product_of
from varlen.execution.rank_link import NO_OTHERS, RankLink
from varlen.models.blocks import inputs
from varlen.models.blocks.attention import CrossAttention, PagedAttention
from varlen.models.blocks.heads import record_head
from varlen.models.blocks.model_types import DecoderModel, EncoderDecoderModel
from varlen.models.checkpoint.stage_layers import StageLayers
from varlen.models.checkpoint.vector_layers import load_layers
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder, load_encoder, load_encoder_decoder, load_heads
from varlen.program.program import Program, bytes_of
from varlen.program.rank import Rank
from varlen.program.recorder import Recorder
from varlen.program.stages import StageProgram
from varlen.tasks import Task

# The least KV cache: no step finds keys in it.
_NO_KV = KvSize(1, 1, 0, torch.float32)


@dataclass(frozen=True, slots=True)
class LoadedPrograms:
    """The programs of a loaded model; they hold the weights.

    Attributes:
        programs: the encoder, or the step of the decoder and the encoder of its sources, if there is one.
        vocab_size, type_vocab_size: ids below these are valid.
        dtype: data type of weights and activations.
        weight_bytes: memory of the weights, in bytes.
        cost_fields: fields that decide the run time of batches beside settings.
        kv: size of the KV caches, if the model generates.
        parts: the part of each stage of each program; empty without stages.
    """

    programs: tuple[Program, ...]
    vocab_size: int
    type_vocab_size: int
    dtype: str
    weight_bytes: int
    cost_fields: Mapping[str, str]
    kv: KvSize | None
    parts: Sequence[Sequence[StageProgram]] = ()


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
    link: RankLink[Any] = NO_OTHERS,
) -> LoadedPrograms:
    """Return the programs of a checkpoint for a task.

    Args:
        kind: kind of the model.
        checkpoint, config, kernels, link: arguments of `Runner`.
        task: task of the model.
        device: the device that runs them.
        longest: longest sequence, in tokens.
        seconds: most time to measure the fastest way to run linear layers; 0 measures none.

    Raises:
        CheckpointError: the checkpoint is incomplete, or lacks the head of the task.
        ConfigError: the device or the task does not run the dtype, or `kv_bytes` allows no block.
    """
    check_task_dtype(config.dtype, task)
    check_task_device(device, task)
    dtype = choose_dtype(config.dtype, device)
    fields = dict(cost_fields(checkpoint, device, link.rank))
    loading = _Loading(checkpoint, config, task, dtype, device, link.rank)
    cut = agree_on_cut(
        lambda shapes: kind(loading, shapes).record(_NO_KV)[0],
        kernels,
        config,
        fields | {"dtype": str(dtype)} | kind.cost_fields(task),
        use=kind.use,
        seconds=seconds,
        link=link,
    )
    model: _Model = kind(loading, None if cut is None else cut.layers)
    vocab_size, type_vocab_size = model.vocab_size, model.type_vocab_size
    # every stage has as many blocks as the one with the most layers
    kv = model.kv_size(longest, None if cut is None else cut.most_layers)
    if kv is not None:
        kv = replace(kv, num_blocks=link.agree(partial(int, kv.num_blocks)))
    programs = model.record(kv or _NO_KV)
    parts = [] if cut is None else [cut.parts(program) for program in programs]
    if parts:
        programs = tuple(of_stages[link.stage.number].program for of_stages in parts)
    if config.approximate_gelu:
        fields["gelu"] = "tanh"
    name = str(dtype).removeprefix("torch.")
    if bits := BITS.get(config.dtype):
        cache = find_cache(config.cache_folder) if seconds else None
        programs, name = model.to_int8(programs, cache, bits), config.dtype
        fields["int8"] = product_of(bits).kernel
    # packed weights replace those that it holds
    del model, cut
    weight_bytes = bytes_of([weight for program in programs for weight in program.weights])
    if device.type == "cpu":
        choose = partial(
            choose_paths,
            kernels=kernels,
            config=config,
            key=fields,
            use=kind.use,
            threads=kind.threads(),
            seconds=seconds,
            # each stage has layers of its own to measure
            link=NO_OTHERS if parts else link,
        )
        programs = in_large_pages(tuple(map(choose, programs)))
    return LoadedPrograms(
        programs, vocab_size, type_vocab_size, name, weight_bytes, fields, kv, parts
    )


@dataclass(frozen=True, slots=True)
class _Loading:
    """What decides how a model is loaded and recorded; see `load_programs`."""

    checkpoint: Checkpoint
    config: EngineConfig
    task: Task
    dtype: torch.dtype
    device: torch.device
    rank: Rank

    def new_recorder(self) -> Recorder:
        """Return a recorder of a program."""
        return Recorder(
            for_gpu=self.device.type == "cuda",
            approximate_gelu=self.config.approximate_gelu,
            has_key_lengths=self.task == "token_embed" and self.checkpoint.has_unattended_tokens,
            rank=self.rank,
        )


class _Model(Protocol):
    """A loaded model, or the layers of one stage.

    Attributes:
        vocab_size, type_vocab_size: ids below these are valid.
    """

    vocab_size: int
    type_vocab_size: int

    def kv_size(self, longest: int, layers: int | None) -> KvSize | None:
        """Return the size of the KV caches, given the layers of the largest stage."""

    def record(self, kv: KvSize) -> tuple[Program, ...]:
        """Return its programs."""

    def to_int8(
        self, programs: Sequence[Program], cache: Path | None, bits: WeightBits
    ) -> tuple[Program, ...]:
        """Return programs whose linear layers have weights of this many bits."""


class WholeSequences:
    """An encoder, whose sequences run as a whole: a `_Model`."""

    use = BATCHES

    def __init__(self, loading: _Loading, stage: StageLayers | None) -> None:
        self._loading = loading
        self._encoder = load_encoder(
            loading.checkpoint, loading.dtype, loading.device, loading.rank, stage
        )
        self.vocab_size = self._encoder.vocab_size
        self.type_vocab_size = self._encoder.type_vocab_size

    @staticmethod
    def cost_fields(task: Task) -> dict[str, str]:
        """Return what decides the times of layers beside the checkpoint: heads of tasks differ."""
        return {"task": task}

    @staticmethod
    def threads() -> int:
        """Return the number of threads that run a layer."""
        limit_primitives()
        return 1

    def kv_size(self, longest: int, layers: int | None) -> None:
        """Return None: nothing outlives a batch."""

    def record(self, kv: KvSize) -> tuple[Program, ...]:  # noqa: ARG002
        """Return the forward pass with the head of the task."""
        loading, encoder = self._loading, self._encoder
        checkpoint, task, device = loading.checkpoint, loading.task, loading.device
        ops = loading.new_recorder()
        hidden = encoder.record(ops)
        layers = load_layers(checkpoint.folder, checkpoint.vector_layers(task), device)
        heads = load_heads(checkpoint, encoder, task, loading.dtype, device, loading.rank)
        output = record_head(
            ops,
            task,
            heads,
            hidden,
            checkpoint.pooling,
            layers,
            checkpoint.splade,
            pools_prompt=checkpoint.pools_prompt,
        )
        return (ops.finish(output),)

    def to_int8(
        self, programs: Sequence[Program], cache: Path | None, bits: WeightBits
    ) -> tuple[Program, ...]:
        """Return programs with the layers of the encoder in int8."""
        calibrated = CalibratedEncoder(self._encoder, self._loading.checkpoint)
        return to_int8(calibrated, programs, cache, bits)


class Steps:
    """A decoder, perhaps with an encoder, whose sequences run step by step: a `_Model`."""

    use = STEPS
    type_vocab_size = 1

    def __init__(self, loading: _Loading, stage: StageLayers | None) -> None:
        self._loading = loading
        self._has_sources = loading.checkpoint.translate is not None
        load = load_encoder_decoder if self._has_sources else load_decoder
        self._model: DecoderModel | EncoderDecoderModel = load(
            loading.checkpoint, loading.dtype, loading.device, loading.rank, stage
        )
        self.vocab_size = self._model.vocab_size

    @staticmethod
    def cost_fields(task: Task) -> dict[str, str]:  # noqa: ARG004
        """Return nothing: the checkpoint decides the task."""
        return {}

    @staticmethod
    def threads() -> int:
        """Return the number of threads that run a layer."""
        return torch.get_num_threads()

    def kv_size(self, longest: int, layers: int | None) -> KvSize:
        """Return the size of the KV caches that the settings allow."""
        config = self._loading.config
        return kv_size(
            config,
            self._loading.device,
            self._loading.dtype,
            self._model.attention_heads,
            num_layers=layers or self._model.num_layers,
            # a source and its target
            lengths=[longest] * (2 if self._has_sources else 1),
            has_beams=self._has_sources,
            processes=config.num_processes,
        )

    def record(self, kv: KvSize) -> tuple[Program, ...]:
        """Return the step of the decoder, and the encoder of sources."""
        kv = replace(kv, dtype=self._loading.dtype)
        return record_steps(self._model, kv, self._loading.new_recorder)

    def to_int8(
        self, programs: Sequence[Program], cache: Path | None, bits: WeightBits
    ) -> tuple[Program, ...]:
        """Return programs with the layers of decoder and encoder in int8 or int4."""
        recorded = record_steps(self._model, CALIBRATION_KV)
        calibrated = CalibratedDecoder(recorded, self._loading.checkpoint)
        return to_int8(calibrated, programs, cache, bits)


def record_steps(
    model: DecoderModel | EncoderDecoderModel,
    kv: KvSize,
    new_recorder: Callable[[], Recorder] = Recorder,
) -> tuple[Program, ...]:
    """Return the program of a decoder's step, then the encoder's, if any.

    The encoder's program has no outputs: it stores keys and values for the decoder.

    Args:
        model: the model to record.
        kv: sizes of its KV caches.
        new_recorder: starts the recording of each program.
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
