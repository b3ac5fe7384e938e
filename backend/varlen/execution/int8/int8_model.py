"""A model in int8: calibrated at load, or earlier by `varlen quantize`.

An encoder, as its calibration runs it, has a vector for each text; `int8_decoder` has models that generate.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch

from varlen.costs.store import digest_of
from varlen.errors import CheckpointError, ConfigError
from varlen.execution.device import checkpoint_hash
from varlen.execution.int8.calibration import (
    Calibration,
    LayerCalibration,
    Quality,
    VectorQuality,
    compare_vectors,
    file_name,
    weights_hash,
)
from varlen.execution.int8.calibration_texts import TEXTS
from varlen.execution.int8.layer_inputs import OnProgress, choose_codes, measure_errors
from varlen.execution.int8.quantization import (
    LayerCodes,
    LayerKey,
    QuantizedLayer,
    WeightBits,
    linear_weights,
    product_of,
    quantize_layers,
    use_int8,
)
from varlen.execution.packing import dims_of, largest_dims, prompt_arrays, tensors_of
from varlen.intake.tokenization import Tokenizer
from varlen.memory.arena import Arena, Layout, alignment_of
from varlen.models.blocks.heads import record_head
from varlen.models.blocks.model_types import EncoderModel
from varlen.models.checkpoint.files import has_file
from varlen.models.checkpoint.weights import locate_weights
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import PackedBatch, Program
from varlen.program.recorder import Recorder
from varlen.request.request import DEFAULT_OPTIONS, Float32Array, Int32Array, Prompt
from varlen_kernels import cpu
from varlen_kernels.cache_files import CacheFolder
from varlen_kernels.cpu.calls.calls import has_compiled_ops
from varlen_kernels.reference.linear_int8 import WeightCodes

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

# By the bits of a weight's codes: a layer whose error is larger stays in fp32. Errors of usual layers are between 0.004
# and 0.03, and between 0.05 and 0.15 with 4 bits.
MAX_LAYER_ERROR: Mapping[WeightBits, float] = {8: 0.05, 4: 0.25}
# A text in two calibrates, the other measures quality, which needs several.
LEAST_TEXTS = 8
# Open files as paths: safetensors takes nothing else.
_DESCRIPTORS = Path("/proc/self/fd")
# Pause between lines of progress.
_LOG_SECONDS = 10.0
# Lengths of prompts of random tokens, which reach columns that texts of one language do not.
_RANDOM_TOKENS = (32, 64, 128, 256) * 2


class CalibratedModel(Protocol[_Answer]):
    """A model in fp32 on the CPU, as calibration runs and measures it.

    Attributes:
        programs: programs with the layers that may run in int8.
        longest: longest text, in tokens; longer ones are cut.
    """

    name: str
    checkpoint: Checkpoint
    programs: tuple[Program, ...]
    longest: int

    def prompts(self, texts: Sequence[Int32Array]) -> list[Prompt]:
        """Return what the model runs for texts of these token ids."""

    def run(
        self, programs: Sequence[Program], kernels: object, prompts: Sequence[Prompt]
    ) -> Iterator[_Answer]:
        """Run prompts one by one and yield the answers.

        Args:
            programs: its programs, or their form in int8.
        """

    def compare(
        self, answers: Iterator[_Answer], expected: Iterator[_Answer], prompts: Sequence[Prompt]
    ) -> Quality:
        """Return the quality of answers."""


def to_int8(
    model: CalibratedModel[_Answer],
    programs: Sequence[Program],
    cache: Path | None = None,
    bits: WeightBits = 8,
) -> tuple[Program, ...]:
    """Return programs with the layers of a model in int8; others stay in fp32.

    Args:
        model: the model that they were recorded from, in fp32 on the CPU.
        cache: folder of measured calibrations; None measures at each load.

    Raises:
        CheckpointError: the stored calibration is damaged.
        ConfigError: see `check_int8`.
    """
    check_int8(bits)
    calibration, source = _calibration(model, cache, bits)
    layers = quantize_layers(programs, _codes(model, calibration), bits)
    _log.info(
        "int%d: %d of %d linear layers of the %s, activations from 0 to %d; %s, %s",
        bits,
        len(layers),
        len(calibration.layers),
        model.name,
        calibration.levels,
        calibration.quality,
        source,
    )
    if any(op.kernel == "linear_groups" for program in programs for op in program.ops):
        _log.warning("int%d: the products of experts stay in fp32", bits)
    if not calibration.quality.is_high:
        _log.warning(
            "int%d changes the answers of this checkpoint: %s; use fp32 or bf16 where that matters",
            bits,
            calibration.quality,
        )
    return _use_int8(programs, layers)


@torch.inference_mode()
def calibrate(
    model: CalibratedModel[_Answer],
    texts: Sequence[str],
    bits: WeightBits = 8,
    on_progress: OnProgress = lambda *_: None,
) -> Calibration:
    """Return the calibration of a model on this CPU.

    Args:
        texts: LEAST_TEXTS or more texts; every second one measures the quality.
    """
    known, random = _token_ids(model, texts), _random_ids(model)
    # a tokenizer that knows few tokens of the texts leaves random ones
    has_texts = len(known) >= LEAST_TEXTS
    seen = model.prompts([*known[::2], *random])
    held_out = model.prompts(known[1::2] if has_texts else random)

    def run(
        stage: str, programs: Sequence[Program], kernels: object, prompts: Sequence[Prompt]
    ) -> Iterator[_Answer]:
        for done, answer in enumerate(model.run(programs, kernels, prompts), 1):
            on_progress(stage, done, len(prompts))
            yield answer

    def run_seen(stage: str, kernels: object) -> None:
        deque(run(stage, model.programs, kernels, seen), 0)

    codes = choose_codes(model.programs, partial(run_seen, "running texts"), bits, on_progress)
    layers = quantize_layers(model.programs, codes, bits)
    errors = measure_errors(layers, partial(run_seen, "measuring errors of layers"))
    used = {key: layer for key, layer in layers.items() if errors[key] <= MAX_LAYER_ERROR[bits]}
    answers = partial(run, "measuring the quality", kernels=cpu, prompts=held_out)
    return Calibration(
        checkpoint_hash(model.checkpoint.folder),
        weights_hash(model.programs),
        bits,
        product_of(bits).levels,
        tuple(
            LayerCalibration(errors[key], outliers, *chosen)
            for key, (outliers, chosen) in codes.items()
        ),
        model.compare(answers(_use_int8(model.programs, used)), answers(model.programs), held_out),
    )


def check_int8(bits: WeightBits = 8) -> None:
    """Raise ConfigError if compiled ops or an exact product of codes is missing."""
    if not has_compiled_ops():
        raise ConfigError(
            f'dtype is "int{bits}", whose ops are compiled, and they cannot be here;'
            " allowed: auto, fp32, bf16"
        )
    from varlen_kernels.cpu.int8_products import NoInt8ProductError

    try:
        product_of(bits)
    except NoInt8ProductError as error:
        raise ConfigError(
            f'dtype is "int{bits}", which cannot be used here: {error}; allowed: auto, fp32, bf16'
        ) from None


class _LoggedProgress:
    """Logs the progress of a calibration, which takes minutes for a large model."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _LOG_SECONDS

    def __call__(self, stage: str, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            _log.info("calibrating: %s, %d of %d", stage, done, total)
            self._next = time.monotonic() + _LOG_SECONDS


def _token_ids(model: CalibratedModel[_Answer], texts: Sequence[str]) -> list[Int32Array]:
    """Return the token ids of the texts that the model knows."""
    tokenizer = Tokenizer(model.checkpoint.folder, model.longest)
    ids = [text.token_ids for text in tokenizer.encode(texts, truncate=True)]
    return [each for each in ids if len(each) and each.max() < model.checkpoint.vocab_size]


def _random_ids(model: CalibratedModel[_Answer]) -> list[Int32Array]:
    draw, most = np.random.default_rng(0), model.checkpoint.vocab_size
    lengths = (min(tokens, model.longest) for tokens in _RANDOM_TOKENS)
    return [draw.integers(0, most, length, dtype=np.int32) for length in lengths]


def _use_int8(
    programs: Sequence[Program], layers: dict[LayerKey, QuantizedLayer]
) -> tuple[Program, ...]:
    return tuple(use_int8(program, layers) for program in programs)


def _calibration(
    model: CalibratedModel[_Answer], cache: Path | None, bits: WeightBits
) -> tuple[Calibration, str]:
    """Return the calibration of a model, and where it comes from.

    Raises:
        CheckpointError: the stored calibration is damaged.
    """
    hashes = checkpoint_hash(model.checkpoint.folder), weights_hash(model.programs)
    if stored := _stored(model, hashes, bits):
        return stored, "stored with the checkpoint"
    digest = digest_of({"hashes": " ".join(hashes), "levels": str(product_of(bits).levels)})
    name = f"int{bits}-{digest[:32]}.safetensors"
    if cache is not None:
        cached = _cached(CacheFolder(cache), name)
        if cached is not None and _fits(cached, model, bits):
            return cached, "from the cache"
    began = time.monotonic()
    measured = calibrate(model, TEXTS, bits, _LoggedProgress())
    if cache is not None:
        try:
            with CacheFolder(cache).writing(name) as path:
                measured.write(path)
        except OSError as error:
            _log.warning("the calibration is not stored, and the next load measures it: %s", error)
    return measured, f"measured in {time.monotonic() - began:.1f} s"


def _cached(cache: CacheFolder, name: str) -> Calibration | None:
    try:
        with cache.reading(name) as file:
            return Calibration.load(_DESCRIPTORS, str(file))
    except FileNotFoundError:
        return None
    except (CheckpointError, OSError) as error:
        _log.warning("the calibration in the cache is not used, and is measured again: %s", error)
        return None


def _stored(
    model: CalibratedModel[_Answer], hashes: tuple[str, str], bits: WeightBits
) -> Calibration | None:
    """Return the calibration stored with a checkpoint, or None if none fits.

    Args:
        hashes: its architecture and its weights.

    Raises:
        CheckpointError: it is damaged.
    """
    name, levels = file_name(bits), product_of(bits).levels
    if not has_file(model.checkpoint.folder, name):
        return None
    path = locate_weights(model.checkpoint.folder, name)
    stored = Calibration.load(path.parent, path.name)
    if stored is None:
        return None
    if (stored.checkpoint, stored.weights) != hashes:
        _log.warning("the stored calibration is of another checkpoint or task; measuring it again")
        return None
    if stored.levels != levels:
        _log.info(
            "the stored calibration is of a CPU with activations from 0 to %d, this one needs %d;"
            " measuring it again",
            stored.levels,
            levels,
        )
        return None
    if not _fits(stored, model, bits):
        raise CheckpointError(
            f"{name} does not fit the checkpoint's layers; remove it, or write it again with"
            " `varlen quantize`"
        )
    return stored


def _fits(calibration: Calibration, model: CalibratedModel[_Answer], bits: WeightBits) -> bool:
    """Return whether a calibration has the layers of a model, and no columns beyond."""
    weights = linear_weights(model.programs).values()
    if calibration.bits != bits or len(calibration.layers) != len(weights):
        return False
    return all(
        layer.codes.shape == weight.shape
        and layer.scale.shape == weight.shape[1:]
        and layer.outliers[-1] < len(weight)
        for layer, (weight, _) in zip(calibration.layers, weights, strict=True)
    )


def _codes(model: CalibratedModel[_Answer], calibration: Calibration) -> dict[LayerKey, LayerCodes]:
    return {
        key: LayerCodes(layer.outliers, WeightCodes(layer.scale, layer.codes))
        for key, layer in zip(linear_weights(model.programs), calibration.layers, strict=True)
        if layer.error <= MAX_LAYER_ERROR[calibration.bits]
    }


_CPU = torch.device("cpu")


class CalibratedEncoder:
    """An encoder with one vector per text, whatever the task is; see `CalibratedModel`."""

    name: str = "encoder"

    def __init__(self, encoder: EncoderModel, checkpoint: Checkpoint) -> None:
        """Record the encoder.

        Args:
            encoder: encoder in fp32 on the CPU.
        """
        self.checkpoint = checkpoint
        self.longest = checkpoint.max_sequence_tokens
        ops = Recorder()
        hidden = encoder.record(ops)
        head = record_head(ops, "embed", encoder.heads, hidden, checkpoint.pooling)
        self.programs: tuple[Program, ...] = (ops.finish(head),)

    def prompts(self, texts: Sequence[Int32Array]) -> list[Prompt]:
        return [Prompt(text) for text in texts]

    def run(
        self, programs: Sequence[Program], kernels: object, prompts: Sequence[Prompt]
    ) -> Iterator[Float32Array]:
        """Yield the vector of each prompt, `[hidden]`; see `CalibratedModel`."""
        (program,) = programs
        longest = max(prompt.num_tokens for prompt in prompts)
        layout = Layout(program.buffers, alignment_of(_CPU))
        arena = Arena(layout, {**largest_dims(longest), "sequences": 1}, _CPU)
        names = [value.name for value in program.inputs]
        for prompt in prompts:
            dims = dims_of([prompt.num_tokens])
            arrays = prompt_arrays(names, [prompt], [DEFAULT_OPTIONS])
            batch = PackedBatch(tensors_of(arrays), dims)
            (output,) = program.run(batch, kernels, arena.allocate(dims))
            yield output[0].numpy()

    def compare(
        self,
        answers: Iterator[Float32Array],
        expected: Iterator[Float32Array],
        prompts: Sequence[Prompt],  # noqa: ARG002  # part of the protocol
    ) -> VectorQuality:
        return compare_vectors(np.stack([*answers]), np.stack([*expected]))
