"""The programs of a model that generates, as one device runs them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from varlen.config import EngineConfig
from varlen.costs.store import find_cache
from varlen.execution.arenas import KvSize, kv_size
from varlen.execution.cpu.linear_paths import BATCHES, STEPS, choose_paths
from varlen.execution.cpu.runner import limit_primitives
from varlen.execution.cpu.stage_cut import agree_on_cut
from varlen.execution.cpu.weight_pages import in_large_pages
from varlen.execution.device import check_task_dtype, choose_dtype
from varlen.execution.fingerprint import cost_fields
from varlen.execution.int8.int8_decoder import CALIBRATION_KV, CalibratedDecoder
from varlen.execution.int8.int8_encoder import CalibratedEncoder
from varlen.execution.int8.int8_model import to_int8
from varlen.execution.int8.quantization import BITS, product_of
from varlen.execution.rank_link import NO_OTHERS, RankLink
from varlen.models.blocks import inputs
from varlen.models.blocks.attention import CrossAttention, PagedAttention
from varlen.models.blocks.heads import record_head
from varlen.models.blocks.model_types import DecoderModel, EncoderDecoderModel, EncoderModel
from varlen.models.checkpoint.stage_layers import StageLayers
from varlen.models.checkpoint.vector_layers import load_layers
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder, load_encoder, load_encoder_decoder, load_heads
from varlen.program.program import Program, bytes_of
from varlen.program.rank import Rank
from varlen.program.recorder import Recorder
from varlen.program.stages import StageProgram
from varlen.tasks import Task


@dataclass(frozen=True, slots=True)
class EncoderProgram:
    """A loaded encoder.

    Attributes:
        program: its forward pass, which holds the weights.
        vocab_size, type_vocab_size: ids below these are valid.
        dtype: data type of weights and activations.
        weight_bytes: memory of the weights, in bytes.
        cost_fields: fields that decide the run time of batches beside settings.
        parts: the program as the part of each stage; empty without stages.
    """

    program: Program
    vocab_size: int
    type_vocab_size: int
    dtype: str
    weight_bytes: int
    cost_fields: Mapping[str, str]
    parts: Sequence[StageProgram] = ()


def load_program(
    checkpoint: Checkpoint,
    config: EngineConfig,
    task: Task,
    device: torch.device,
    kernels: object,
    *,
    measures: bool,
    link: RankLink[Any] = NO_OTHERS,
) -> EncoderProgram:
    """Return the program of a checkpoint for a task; see `Runner` for the arguments.

    Raises:
        CheckpointError: the checkpoint is incomplete, or lacks the head of the task.
        ConfigError: the device or the task does not run the dtype.
    """
    check_task_dtype(config.dtype, task)
    dtype = choose_dtype(config.dtype, device)
    fields = dict(cost_fields(checkpoint, device, link.rank))

    def record(stage: StageLayers | None) -> tuple[EncoderModel, Program]:
        encoder = load_encoder(checkpoint, dtype, device, link.rank, stage)
        return encoder, _record(checkpoint, encoder, config, task, dtype, device, link.rank)

    seconds = config.warmup_seconds if measures else 0.0
    cut = agree_on_cut(
        lambda shapes: record(shapes)[1],
        kernels,
        config,
        # heads of tasks differ
        fields | {"dtype": str(dtype), "task": task},
        use=BATCHES,
        seconds=seconds,
        link=link,
    )
    encoder, program = record(None if cut is None else cut.layers)
    parts: list[StageProgram] = []
    if cut is not None:
        parts = cut.parts(program)
        program = parts[link.stage.number].program
    if config.approximate_gelu:
        fields["gelu"] = "tanh"
    name = str(dtype).removeprefix("torch.")
    if config.dtype == "int8":
        cache = find_cache(config.cache_folder) if seconds else None
        calibrated = CalibratedEncoder(encoder, checkpoint)
        (program,), name = to_int8(calibrated, [program], cache), "int8"
        fields["int8"] = product_of(8).kernel
    # packed weights have no address
    weight_bytes = program.weight_bytes
    if device.type == "cpu":
        limit_primitives()
        program = choose_paths(
            program,
            kernels,
            config,
            fields,
            use=BATCHES,
            threads=1,
            seconds=seconds,
            # each stage has layers of its own to measure
            link=NO_OTHERS if parts else link,
        )
        (program,) = in_large_pages([program])
    sizes = encoder.vocab_size, encoder.type_vocab_size
    return EncoderProgram(program, *sizes, name, weight_bytes, fields, parts)


def _record(
    checkpoint: Checkpoint,
    encoder: EncoderModel,
    config: EngineConfig,
    task: Task,
    dtype: torch.dtype,
    device: torch.device,
    rank: Rank,
) -> Program:
    """Return the forward pass of an encoder with the head of a task."""
    ops = Recorder(
        for_gpu=device.type == "cuda",
        approximate_gelu=config.approximate_gelu,
        has_key_lengths=task == "token_embed" and checkpoint.has_unattended_tokens,
        rank=rank,
    )
    hidden = encoder.record(ops)
    layers = load_layers(checkpoint.folder, checkpoint.vector_layers(task), device)
    heads = load_heads(checkpoint, encoder, task, dtype, device, rank)
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
    return ops.finish(output)


@dataclass(frozen=True, slots=True)
class StepPrograms:
    """A loaded model that generates.

    Attributes:
        programs: the step of the decoder, then the encoder if there is one; they hold the weights.
        vocab_size: token ids are below this.
        dtype: data type of weights and activations.
        kv: size of the KV caches.
        weight_bytes: memory of the weights, in bytes.
        parts: the programs as parts of a stage; empty without stages.
    """

    programs: tuple[Program, ...]
    vocab_size: int
    dtype: str
    kv: KvSize
    weight_bytes: int
    parts: Sequence[StageProgram] = ()


def load_programs(
    checkpoint: Checkpoint,
    config: EngineConfig,
    device: torch.device,
    kernels: object,
    *,
    max_sequence_tokens: int,
    link: RankLink[Any] = NO_OTHERS,
) -> StepPrograms:
    """Return the programs of a checkpoint that generates; arguments as in `StepRunner`.

    Raises:
        CheckpointError: the checkpoint is incomplete.
        ConfigError: the device does not run the dtype, or `kv_bytes` allows no block.
    """
    has_sources = checkpoint.translate is not None
    dtype = choose_dtype(config.dtype, device)
    model: DecoderModel | EncoderDecoderModel
    load = load_encoder_decoder if has_sources else load_decoder
    fields = dict(cost_fields(checkpoint, device, link.rank))

    def record_shapes(shapes: StageLayers) -> Program:
        """Return the decoder's step, whose layers are timed; it finds no keys."""
        whole = load(checkpoint, dtype, device, stage=shapes)
        return record_steps(whole, KvSize(1, 1, 0, dtype))[0]

    cut = agree_on_cut(
        record_shapes,
        kernels,
        config,
        fields | {"dtype": str(dtype)},
        use=STEPS,
        seconds=config.warmup_seconds,
        link=link,
    )
    model = load(checkpoint, dtype, device, link.rank, None if cut is None else cut.layers)
    vocab_size = model.vocab_size
    kv = kv_size(
        config,
        device,
        dtype,
        model.attention_heads,
        # every stage has as many blocks as the one with the most layers
        num_layers=model.num_layers if cut is None else cut.most_layers,
        # a source and its target
        lengths=[max_sequence_tokens] * (2 if has_sources else 1),
        has_beams=has_sources,
        processes=config.num_processes,
    )
    kv = replace(kv, num_blocks=link.agree(lambda: kv.num_blocks))
    new_recorder = partial(
        Recorder,
        for_gpu=device.type == "cuda",
        approximate_gelu=config.approximate_gelu,
        rank=link.rank,
    )
    programs = record_steps(model, kv, new_recorder)
    parts: list[StageProgram] = []
    if cut is not None:
        parts = [cut.parts(program)[link.stage.number] for program in programs]
        programs = tuple(part.program for part in parts)
    name = str(dtype).removeprefix("torch.")
    if bits := BITS.get(config.dtype):
        calibrated = CalibratedDecoder(record_steps(model, CALIBRATION_KV), checkpoint)
        cache = find_cache(config.cache_folder) if config.warmup_seconds else None
        programs, name = to_int8(calibrated, programs, cache, bits), config.dtype
        fields["int8"] = product_of(bits).kernel
        del calibrated
    # packed weights replace those that it holds
    del model, cut
    weight_bytes = bytes_of([weight for program in programs for weight in program.weights])
    if device.type == "cpu":
        choose = partial(
            choose_paths,
            kernels=kernels,
            config=config,
            key=fields,
            use=STEPS,
            threads=torch.get_num_threads(),
            seconds=config.warmup_seconds,
            # each stage has layers of its own to measure
            link=NO_OTHERS if parts else link,
        )
        programs = in_large_pages(tuple(map(choose, programs)))
    return StepPrograms(programs, vocab_size, name, kv, weight_bytes, parts)


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
