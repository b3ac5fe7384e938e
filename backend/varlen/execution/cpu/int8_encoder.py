"""An encoder in int8: calibrated at load, or earlier by `varlen_tools.quantize`."""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from varlen.costs.store import digest_of
from varlen.errors import CheckpointError, ConfigError
from varlen.execution.cpu.calibration import (
    Calibration,
    LayerCalibration,
    compare,
    find_outliers,
    measure_errors,
    run_prompts,
    weights_hash,
)
from varlen.execution.cpu.calibration_texts import TEXTS
from varlen.execution.cpu.quantization import LayerKey, linear_weights, quantize_layers, use_int8
from varlen.execution.fingerprint import checkpoint_hash
from varlen.intake.tokenization import Tokenizer
from varlen.models.blocks.heads import record_head
from varlen.models.blocks.model_types import EncoderModel
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import Program
from varlen.program.recorder import Recorder
from varlen.request.request import SHORTEST_PROMPT, Prompt
from varlen_kernels import cpu
from varlen_kernels.cpu.compiled_ops import compiling, has_numba

_log = logging.getLogger(__name__)

# A layer whose error is larger stays in fp32. Errors of usual layers are between 0.004 and 0.03.
MAX_LAYER_ERROR = 0.05
# A lower mean cosine to fp32 is worth a warning.
LEAST_COSINE = 0.99
# A text in two calibrates, the other measures quality, which needs several.
LEAST_TEXTS = 8
# Random tokens reach columns that texts of one language do not.
_RANDOM_PROMPTS = 8
_RANDOM_TOKENS = 32


def to_int8(
    program: Program, encoder: EncoderModel, checkpoint: Checkpoint, cache: Path | None = None
) -> Program:
    """Return a program with the encoder's linear layers in int8; heads stay in fp32.

    Args:
        program: program of the encoder and a head, in fp32 on the CPU.
        encoder: the encoder that it was recorded from.
        checkpoint: its checkpoint, whose folder may have a stored calibration.
        cache: folder of measured calibrations; None measures at each load.

    Raises:
        CheckpointError: the stored calibration is damaged.
        ConfigError: see `check_int8`.
    """
    check_int8()
    calibration, source = _calibration(encoder, checkpoint, cache)
    layers = quantize_layers(program, _outliers(_embedding(encoder, checkpoint), calibration))
    _log.info(
        "int8: %d of %d linear layers of the encoder, activations from 0 to %d; %s, %s",
        len(layers),
        len(calibration.layers),
        calibration.levels,
        calibration.quality,
        source,
    )
    # NaN is not at least anything
    if not calibration.quality.cosine_mean >= LEAST_COSINE:
        _log.warning(
            "int8 changes the vectors of this checkpoint: %s; use fp32 or bf16 where that matters",
            calibration.quality,
        )
    return use_int8(program, layers)


def calibrate(encoder: EncoderModel, checkpoint: Checkpoint, texts: Sequence[str]) -> Calibration:
    """Return the calibration of an encoder on this CPU.

    Args:
        encoder: encoder in fp32 on the CPU.
        checkpoint: its checkpoint.
        texts: LEAST_TEXTS or more texts; every second one measures the quality.
    """
    program = _embedding(encoder, checkpoint)
    with compiling():
        run_prompts(program, cpu, [SHORTEST_PROMPT])
    tokenizer = Tokenizer(checkpoint.folder, checkpoint.max_sequence_tokens)
    prompts = [
        Prompt(text.token_ids)
        for text in tokenizer.encode(texts, truncate=True)
        if len(text.token_ids) and text.token_ids.max() < encoder.vocab_size
    ]
    shape = _RANDOM_PROMPTS, min(_RANDOM_TOKENS, checkpoint.max_sequence_tokens)
    random_ids = np.random.default_rng(0).integers(0, encoder.vocab_size, shape, dtype=np.int32)
    random = [Prompt(ids) for ids in random_ids]
    # a tokenizer that knows few tokens of the texts leaves random ones
    has_texts = len(prompts) >= LEAST_TEXTS
    seen, held_out = [*prompts[::2], *random], prompts[1::2] if has_texts else random

    outliers = find_outliers(program, seen)
    layers = quantize_layers(program, outliers)
    errors = measure_errors(program, seen, layers)
    used = {key: layer for key, layer in layers.items() if errors[key] <= MAX_LAYER_ERROR}
    vectors = run_prompts(use_int8(program, used), cpu, held_out)
    return Calibration(
        checkpoint_hash(checkpoint.folder),
        weights_hash(program),
        _levels(),
        tuple(LayerCalibration(tuple(outliers[key].tolist()), errors[key]) for key in layers),
        compare(vectors, run_prompts(program, cpu, held_out)),
    )


def check_int8() -> None:
    """Raise ConfigError if numba or an exact product of codes is missing."""
    if not has_numba():
        raise ConfigError(
            'dtype is "int8", whose ops numba compiles, and it cannot be used here;'
            " allowed: auto, fp32, bf16"
        )
    # numba loads in half a second
    from varlen_kernels.cpu.int8_products import NoInt8ProductError, choose_product

    try:
        choose_product()
    except NoInt8ProductError as error:
        raise ConfigError(
            f'dtype is "int8", which cannot be used here: {error}; allowed: auto, fp32, bf16'
        ) from None


def int8_product() -> str:
    """Return the name of the op that runs int8 layers on this CPU."""
    from varlen_kernels.cpu.int8_products import choose_product

    return choose_product().kernel


def _calibration(
    encoder: EncoderModel, checkpoint: Checkpoint, cache: Path | None
) -> tuple[Calibration, str]:
    """Return the calibration of an encoder, and where it comes from.

    Raises:
        CheckpointError: the stored calibration is damaged.
    """
    program = _embedding(encoder, checkpoint)
    hashes = checkpoint_hash(checkpoint.folder), weights_hash(program)
    if stored := _stored(program, checkpoint, hashes):
        return stored, "stored with the checkpoint"
    name = f"int8-{digest_of({'hashes': ' '.join(hashes), 'levels': str(_levels())})[:32]}.json"
    if cache is not None:
        with suppress(CheckpointError):
            # a damaged file is measured and written again
            cached = Calibration.load(cache, name)
            if cached is not None and _fits(cached, program):
                return cached, "from the cache"
    began = time.monotonic()
    measured = calibrate(encoder, checkpoint, TEXTS)
    if cache is not None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            measured.save(cache, name)
        except OSError as error:
            _log.warning("the calibration is not stored, and the next load measures it: %s", error)
    return measured, f"measured in {time.monotonic() - began:.1f} s"


def _stored(
    program: Program, checkpoint: Checkpoint, hashes: tuple[str, str]
) -> Calibration | None:
    """Return the calibration stored with a checkpoint, or None if none fits.

    Args:
        program: the encoder, see `_embedding`.
        checkpoint: its checkpoint.
        hashes: its architecture and its weights.

    Raises:
        CheckpointError: it is damaged.
    """
    stored = Calibration.load(checkpoint.folder)
    if stored is None:
        return None
    if (stored.checkpoint, stored.weights) != hashes:
        _log.warning("the stored calibration is of another checkpoint; measuring it again")
        return None
    if stored.levels != _levels():
        _log.info(
            "the stored calibration is of a CPU with activations from 0 to %d, this one needs %d;"
            " measuring it again",
            stored.levels,
            _levels(),
        )
        return None
    if not _fits(stored, program):
        raise CheckpointError(
            "int8.json does not fit the checkpoint's layers; remove it, or write it again with"
            " `python -m varlen_tools.quantize`"
        )
    return stored


def _fits(calibration: Calibration, program: Program) -> bool:
    """Return whether a calibration has as many layers as an encoder, and no columns beyond."""
    weights = linear_weights(program).values()
    return len(calibration.layers) == len(weights) and all(
        layer.outliers[-1] < len(weight)
        for layer, (weight, _) in zip(calibration.layers, weights, strict=True)
    )


def _outliers(program: Program, calibration: Calibration) -> dict[LayerKey, torch.Tensor]:
    """Return the outliers of the layers that run in int8."""
    return {
        key: torch.tensor(layer.outliers)
        for key, layer in zip(linear_weights(program), calibration.layers, strict=True)
        if layer.error <= MAX_LAYER_ERROR
    }


def _embedding(encoder: EncoderModel, checkpoint: Checkpoint) -> Program:
    """Return the encoder with one vector per sequence, whatever the task of the model is."""
    ops = Recorder()
    hidden = encoder.record(ops)
    return ops.finish(record_head(ops, "embed", encoder.heads, hidden, checkpoint.pooling))


def _levels() -> int:
    # numba loads in half a second
    from varlen_kernels.cpu.int8_products import choose_product

    return choose_product().levels
