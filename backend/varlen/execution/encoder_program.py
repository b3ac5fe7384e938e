"""The forward pass of an encoder and its head, as one device runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from varlen.config import EngineConfig
from varlen.costs.store import find_cache
from varlen.execution.cpu.int8_encoder import CalibratedEncoder
from varlen.execution.cpu.int8_model import to_int8
from varlen.execution.cpu.linear_paths import BATCHES, choose_paths
from varlen.execution.cpu.quantization import product_of
from varlen.execution.cpu.runner import limit_primitives
from varlen.execution.cpu.stage_cut import agree_on_cut
from varlen.execution.cpu.weight_pages import in_large_pages
from varlen.execution.device import check_task_dtype, choose_dtype
from varlen.execution.fingerprint import cost_fields
from varlen.execution.rank_link import NO_OTHERS, RankLink
from varlen.models.blocks.heads import record_head
from varlen.models.blocks.model_types import EncoderModel
from varlen.models.checkpoint.stage_layers import StageLayers
from varlen.models.checkpoint.vector_layers import load_layers
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_encoder, load_heads
from varlen.program.program import Program
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
