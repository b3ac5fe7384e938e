"""A model in int8: calibrated at load, or earlier by `varlen quantize`."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch

from varlen.costs.store import digest_of
from varlen.errors import CheckpointError, ConfigError
from varlen.execution.cpu.linear_paths import torch_threads
from varlen.execution.device import checkpoint_hash
from varlen.execution.int8.calibration import (
    Calibration,
    LayerCalibration,
    LayerKey,
    Quality,
    QuantizedLayer,
    WeightBits,
    file_name,
    linear_weights,
    product_of,
    use_int8,
)
from varlen.execution.int8.calibration_texts import TEXTS
from varlen.execution.int8.layer_inputs import OnProgress, calibrate_layers
from varlen.intake.tokenization import Tokenizer
from varlen.models.checkpoint.files import has_file
from varlen.models.checkpoint.weights import locate_weights
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import Program
from varlen.request.request import Int32Array, Prompt
from varlen_kernels import cpu
from varlen_kernels.cache_files import CacheFolder
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.reference.linear_int8 import WeightCodes

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

# By the bits of a weight's codes: a layer with a larger error stays as it is. Errors of usual layers are between 0.004
# and 0.03, and between 0.05 and 0.15 with 4 bits.
MAX_LAYER_ERROR: Mapping[WeightBits, float] = {8: 0.05, 4: 0.25}
# A text in two calibrates, the other measures quality, which needs several.
LEAST_TEXTS = 8
# Open files as paths: safetensors takes nothing else.
_DESCRIPTORS = Path("/proc/self/fd")
# Pause between lines of progress.
_LOG_SECONDS = 10.0
# Batches that run ahead.
_AHEAD = 2
# Lengths of prompts of random tokens, which reach columns that texts of one language do not.
_RANDOM_TOKENS = (32, 64, 128, 256) * 2


class CalibratedModel(Protocol[_Answer]):
    """A model on the CPU, as calibration runs and measures it.

    Attributes:
        weights: hash of the weights of `programs`.
        served: the same programs in the dtype of what stays beside int8.
        longest: longest text, in tokens; longer ones are cut.
        most_texts: largest batch, in texts.
        seen_tokens, measured_tokens: most tokens of a batch that calibrates, and that measures quality.
        enough_tokens: tokens that tell the quality to a load.
    """

    name: str
    checkpoint: Checkpoint
    programs: tuple[Program, ...]
    weights: str
    served: tuple[Program, ...]
    longest: int
    most_texts: int
    seen_tokens: int
    measured_tokens: int
    enough_tokens: int

    def prompts(self, texts: Sequence[Int32Array]) -> list[Prompt]:
        """Return what the model runs for texts of these token ids."""

    def run(
        self, programs: Sequence[Program], kernels: object, prompts: Sequence[Prompt]
    ) -> Iterator[_Answer]:
        """Yield the answers of one batch."""

    def observe(self, kernels: object, prompts: Sequence[Prompt]) -> None:
        """Run `served` over a batch."""

    def compare(
        self, answers: Iterator[_Answer], expected: Iterator[_Answer], prompts: Sequence[Prompt]
    ) -> Quality:
        """Return the quality of answers."""


def to_int8(
    model: CalibratedModel[_Answer],
    programs: Sequence[Program],
    cache: Path | None = None,
    bits: WeightBits = 8,
    cores: int = 0,
) -> tuple[Program, ...]:
    """Return programs with the layers of a model in int8.

    Args:
        programs: programs of the model in the dtype of `model.served`, whose linear layers come first.
        cache: folder of measured calibrations; None measures at each load.
        cores: see `calibrate`.

    Raises:
        CheckpointError: the stored calibration is damaged.
        ConfigError: ops cannot be compiled here.
    """
    check_int8(bits)
    calibration, source = _calibration(model, cache, bits, cores)
    found = dict(zip(linear_weights(model.programs), calibration.layers, strict=True))
    layers = _quantized(model.programs, found, bits)
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
        _log.warning("int%d: the products of experts are not in int%d", bits, bits)
    if not calibration.quality.is_high:
        _log.warning(
            "int%d changes the answers of this checkpoint: %s; use fp32 or bf16 where that matters",
            bits,
            calibration.quality,
        )
    return _use_int8(model, programs, layers)


def calibrate(
    model: CalibratedModel[_Answer],
    texts: Sequence[str],
    bits: WeightBits = 8,
    on_progress: OnProgress = lambda *_: None,
    cores: int = 0,
    *,
    is_load: bool = False,
) -> Calibration:
    """Return the calibration of a model on this CPU.

    Args:
        texts: LEAST_TEXTS or more; every second one measures the quality.
        cores: cores to use; 0 is torch's number of threads.
        is_load: whether only `enough_tokens` measure it.
    """
    cores = cores or torch.get_num_threads()
    # each core has work of its own: threads of one product would wait for each other
    with torch_threads(1), torch.inference_mode():
        known, random = _token_ids(model, texts), _random_ids(model)
        # a tokenizer that knows few tokens of the texts leaves random ones
        has_texts = len(known) >= LEAST_TEXTS
        seen = _batches(model.prompts([*known[::2], *random]), model.most_texts, model.seen_tokens)
        held_out = model.prompts(known[1::2] if has_texts else random)
        if is_load:
            held_out, *_ = _batches(held_out, len(held_out), model.enough_tokens)
        measured = _batches(held_out, model.most_texts, model.measured_tokens)

        def run_seen(kernels: object) -> None:
            for batch in seen:
                model.observe(kernels, batch)

        def answers(programs: Sequence[Program]) -> Iterator[_Answer]:
            return _ahead([partial(model.run, programs, cpu, batch) for batch in measured])

        expected = answers(model.programs)
        found = calibrate_layers(
            model.programs,
            model.served,
            run_seen,
            bits,
            on_progress,
            batches=len(seen),
            cores=cores,
        )
        programs = _use_int8(model, model.served, _quantized(model.programs, found, bits))

        def reported() -> Iterator[_Answer]:
            for done, answer in enumerate(answers(programs), 1):
                on_progress("measuring the quality", done, len(held_out))
                yield answer

        quality = model.compare(reported(), expected, held_out)
        levels = product_of(bits).levels
        return Calibration(*_hashes_of(model), bits, levels, tuple(found.values()), quality)


def _batches(prompts: Sequence[Prompt], texts: int, tokens: int) -> list[list[Prompt]]:
    """Divide prompts into batches of at most `texts` and `tokens`, or one longer prompt."""
    batches: list[list[Prompt]] = []
    room = 0
    for prompt in prompts:
        if not batches or prompt.num_tokens > room or len(batches[-1]) == texts:
            batches.append([])
            room = tokens
        batches[-1].append(prompt)
        room -= prompt.num_tokens
    return batches


def _ahead(runs: Sequence[Callable[[], Iterator[_Answer]]]) -> Iterator[_Answer]:
    """Return the answers of runs; threads make the next ones meanwhile."""

    @torch.inference_mode()
    def answers(run: Callable[[], Iterator[_Answer]]) -> list[_Answer]:
        return [*run()]

    threads = ThreadPoolExecutor(_AHEAD, initializer=torch.set_num_threads, initargs=(1,))
    left = iter(runs)
    found = deque(threads.submit(answers, each) for each in islice(left, _AHEAD))

    def made() -> Iterator[_Answer]:
        with threads:
            while found:
                following = found.popleft().result()
                found.extend(threads.submit(answers, each) for each in islice(left, 1))
                yield from following

    return made()


def _hashes_of(model: CalibratedModel[_Answer]) -> tuple[str, str]:
    return checkpoint_hash(model.checkpoint.folder), model.weights


def check_int8(bits: WeightBits = 8) -> None:
    """Raise ConfigError if ops cannot be compiled here."""
    if not has_compiled_ops():
        raise ConfigError(
            f'dtype is "int{bits}", whose ops are compiled, and they cannot be here;'
            " allowed: auto, fp32, bf16"
        )


class _LoggedProgress:
    """Logs the progress of a calibration."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _LOG_SECONDS

    def __call__(self, stage: str, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            _log.info("calibrating: %s, %d of %d", stage, done, total)
            self._next = time.monotonic() + _LOG_SECONDS


def _token_ids(model: CalibratedModel[_Answer], texts: Sequence[str]) -> list[Int32Array]:
    tokenizer = Tokenizer(model.checkpoint.folder, model.longest)
    ids = [text.token_ids for text in tokenizer.encode(texts, truncate=True)]
    return [each for each in ids if len(each) and each.max() < model.checkpoint.vocab_size]


def _random_ids(model: CalibratedModel[_Answer]) -> list[Int32Array]:
    draw, most = np.random.default_rng(0), model.checkpoint.vocab_size
    lengths = (min(tokens, model.longest) for tokens in _RANDOM_TOKENS)
    return [draw.integers(0, most, length, dtype=np.int32) for length in lengths]


def _use_int8(
    model: CalibratedModel[_Answer],
    programs: Sequence[Program],
    layers: Mapping[LayerKey, QuantizedLayer],
) -> tuple[Program, ...]:
    """Return programs with layers by their keys in `model.programs`."""
    # a program may have a head behind the model
    pairs = zip(linear_weights(model.programs), linear_weights(programs), strict=False)
    placed = {key: layers[of_model] for of_model, key in pairs if of_model in layers}
    return tuple(use_int8(program, placed) for program in programs)


def _calibration(
    model: CalibratedModel[_Answer], cache: Path | None, bits: WeightBits, cores: int
) -> tuple[Calibration, str]:
    """Return the calibration of a model, and where it comes from."""
    hashes = _hashes_of(model)
    if stored := _stored(model, hashes, bits):
        return stored, "stored with the checkpoint"
    digest = digest_of({"hashes": " ".join(hashes), "levels": str(product_of(bits).levels)})
    name = f"int{bits}-{digest[:32]}.safetensors"
    if cache is not None:
        cached = _cached(CacheFolder(cache), name)
        if cached is not None and _fits(cached, model, bits):
            return cached, "from the cache"
    began = time.monotonic()
    measured = calibrate(model, TEXTS, bits, _LoggedProgress(), cores, is_load=True)
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
    """Return the calibration stored with a checkpoint, or None if none fits."""
    name = file_name(bits)
    if not has_file(model.checkpoint.folder, name):
        return None
    path = locate_weights(model.checkpoint.folder, name)
    stored = Calibration.load(path.parent, path.name)
    if stored is None:
        return None
    key = (*hashes, product_of(bits).levels)
    if (stored.checkpoint, stored.weights, stored.levels) != key or not _fits(stored, model, bits):
        _log.warning(
            "the stored calibration is of another checkpoint, task or CPU; measuring it again"
        )
        return None
    return stored


def _fits(calibration: Calibration, model: CalibratedModel[_Answer], bits: WeightBits) -> bool:
    """Return whether a calibration has the layers of a model."""
    weights = linear_weights(model.programs).values()
    if calibration.bits != bits or len(calibration.layers) != len(weights):
        return False
    return all(
        layer.codes.shape == weight.shape
        and layer.scale.shape == weight.shape[1:]
        and layer.outliers[-1] < len(weight)
        for layer, (weight, _) in zip(calibration.layers, weights, strict=True)
    )


def _quantized(
    programs: Sequence[Program], layers: Mapping[LayerKey, LayerCalibration], bits: WeightBits
) -> dict[LayerKey, QuantizedLayer]:
    product, weights = product_of(bits), linear_weights(programs)

    def packed(key: LayerKey, layer: LayerCalibration) -> QuantizedLayer:
        chosen = WeightCodes(layer.scale, layer.codes)
        operand = product.quantize(*weights[key], layer.outliers, chosen)
        return QuantizedLayer(product.kernel, operand)

    return {
        key: layer.packed or packed(key, layer)
        for key, layer in layers.items()
        if layer.error <= MAX_LAYER_ERROR[bits]
    }
