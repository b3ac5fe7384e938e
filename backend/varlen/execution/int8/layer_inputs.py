"""Codes and errors of linear layers, from their inputs.

The model runs over a few texts in one batch. As soon as a layer has run, its codes are chosen in another thread.

The nearest codes make the smallest error of each weight. The error of a layer's output is smaller if later columns
correct the error of earlier ones, which they can where the inputs of both go together.
Source: LDLQ, Chee et al. 2023, arXiv:2307.13304, section 3; the same codes as GPTQ, Frantar et al. 2022,
arXiv:2210.17323, without an inverse. Columns with large inputs come first, as with GPTQ's `act_order`.

A model that generates answers with the logits of each token, in steps with small KV caches: a prompt is one. Where an
encoder reads source texts, the targets are what the model itself makes of them in fp32, by greedy search.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from varlen.execution.arenas import KvSize, caches_of, new_caches
from varlen.execution.cpu.runner import CpuRunner, tensors_of
from varlen.execution.device import choose_dtype
from varlen.execution.int8.calibration import (
    LayerCalibration,
    LayerKey,
    LogitQuality,
    QuantizedLayer,
    VectorQuality,
    WeightBits,
    compare_logits,
    compare_vectors,
    layer_key,
    linear_weights,
    product_of,
    weights_hash,
)
from varlen.execution.packing import (
    dims_of,
    largest_dims,
    prompt_arrays,
    source_arrays,
    source_dims,
    step_arrays,
    step_dims,
)
from varlen.memory.arena import Arena, alignment_of
from varlen.memory.planner import Layout
from varlen.models.blocks.heads import record_head
from varlen.models.checkpoint.generation_config import TargetTokens
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.registry import EncoderModel
from varlen.program.program import PackedBatch, Program
from varlen.program.recorder import Recorder
from varlen.request.generation import GenerationOptions
from varlen.request.request import (
    DEFAULT_OPTIONS,
    Float32Array,
    Int32Array,
    Prompt,
    Request,
    RequestOptions,
    Source,
)
from varlen.scheduling.batch import Chunk, GeneratedSequence, unanswered_sequences
from varlen_kernels import cpu
from varlen_kernels.cpu import every_op
from varlen_kernels.cpu.calls.calls import run_function
from varlen_kernels.functions import CHOOSE_CODES
from varlen_kernels.reference.linear_int8 import (
    OUTLIERS,
    SMALLEST_SCALE,
    WeightCodes,
    largest_code,
    nearest_scale,
)

# Runs the model with these kernels.
Run = Callable[[object], None]
# Gets a stage of the work, and how much of it is done, of how much in all.
OnProgress = Callable[[str, int, int], object]

# Sums of products of columns that are held at a time, in elements of fp32: 256 MiB.
_MOST_SUMS = 2**26
# Most columns whose errors are corrected together.
_TOGETHER = 512
# Rows of a batch on which the error of a layer is measured.
_ERROR_ROWS = 512
# Part of the mean of the gram matrix's diagonal, added to the diagonal: inputs of calibration are a sample.
_DAMPING = 0.01
# Output features at a time, which bounds the memory.
_FEATURES = 4096
# Candidates for the scale of codes of 4 bits, by the scale of the nearest codes: smaller ones cut the largest weights.
_SCALES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)

# The difference of a widened weight from a scale times its code, by the largest weight: a few roundings of fp32.
_ROUNDINGS = 2.0**-21
# Features by which most other weights are told.
_SAMPLE = 64
_CPU = torch.device("cpu")
# Longest text and longest target, in tokens; texts that are translated together.
_LONGEST = 64
_LONGEST_TARGET = 32
_TEXTS_TOGETHER = 48
# Logits of a batch that measures: 64 MiB.
_MOST_LOGITS = 2**24
# Most rows of logits of a batch that calibrates.
_LOGIT_ROWS = 1024
# Tokens of a block; blocks of a text, and of its source.
_BLOCK_TOKENS = 16
_BLOCKS = _LONGEST // _BLOCK_TOKENS

_OPTIONS = RequestOptions(generation=GenerationOptions())


class _Layer:
    """A linear layer while its inputs are observed; `left` inputs follow."""

    def __init__(self, weight: Tensor, bias: Tensor | None, inputs: int) -> None:
        self.left = inputs
        self._weight, self._bias = weight, bias
        self._largest = weight.new_zeros(len(weight))
        self._grams: list[Tensor] = []
        self._rows: list[tuple[Tensor, Tensor]] = []

    def keep_rows(self, x: Tensor, exact: Tensor) -> None:
        """Copy rows of an input and of its output, which measure the error."""
        step = -(-len(x) // _ERROR_ROWS)
        self._rows.append((x[::step].clone(), exact[::step].to(torch.float32, copy=True)))

    def add(self, x: Tensor) -> None:
        """Add an input to the sums of products of two columns, in fp32."""
        self._largest = torch.maximum(self._largest, x.abs().amax(0))
        x = x.float()
        parts = x.tensor_split(-(-x.shape[1] // _TOGETHER), 1)
        self._grams = self._grams or [x.new_zeros(part.shape[1], part.shape[1]) for part in parts]
        for gram, part in zip(self._grams, parts, strict=True):
            gram.addmm_(part.t(), part)

    @torch.inference_mode()
    def calibrate(self, x: Tensor, bits: WeightBits) -> LayerCalibration:
        """Return the calibration of the layer, given its last input."""
        self.add(x)
        # the columns with the largest values
        outliers = self._largest.topk(OUTLIERS).indices.sort().values
        chosen = stored_codes(self._weight, outliers, bits)
        chosen = chosen or rounded_codes(self._weight, outliers, self._grams, bits)
        self._grams = []
        product = product_of(bits)
        operand = product.quantize(self._weight, self._bias, outliers, chosen)
        layer = QuantizedLayer(product.kernel, operand)
        return LayerCalibration(self._error(layer), outliers, *chosen, layer)

    def _error(self, layer: QuantizedLayer) -> float:
        """Return the error of a layer in int8, relative to its output."""
        lost = total = 0.0
        for x, exact in self._rows:
            # the logits of tokens that are never chosen
            never = exact.isneginf()
            lost += float((layer.run(x).float() - exact).masked_fill_(never, 0).square_().sum())
            total += float(exact.masked_fill(never, 0).square_().sum())
        return float((lost / max(total, 1e-30)) ** 0.5)


def calibrate_layers(
    programs: Sequence[Program],
    served: Sequence[Program],
    run: Run,
    bits: WeightBits = 8,
    on_progress: OnProgress = lambda *_: None,
    *,
    batches: int = 1,
    cores: int = 1,
) -> dict[LayerKey, LayerCalibration]:
    """Return outliers, codes and error of each layer, for inputs of these texts.

    A layer gets the inputs that it has without int8, so errors of earlier layers do not count.

    Args:
        programs, served: see `CalibratedModel`; weights in fp32 get codes.
        run: runs `served` over texts.
        batches: number of batches of the texts.
        cores: number of threads that choose codes.
    """
    weights = dict(zip(linear_weights(served), linear_weights(programs).items(), strict=True))
    ops = (op for program in served for op in program.ops if op.kernel == "linear")
    uses = Counter(layer_key(*op.operands[1:]) for op in ops)
    free, found = Semaphore(cores), dict[LayerKey, Future[LayerCalibration]]()
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as threads:

        def linear(
            x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
        ) -> Tensor:
            result: Tensor = cpu.linear(x, weight, bias, out=out)
            key = layer_key(weight, bias)
            if (layer := layers.get(key)) is not None:
                layer.keep_rows(x, result)
                layer.left -= 1
                if layer.left:
                    layer.add(x)
                else:
                    # which bounds the memory of inputs
                    free.acquire()
                    found[key] = threads.submit(layer.calibrate, x.clone(), bits)
                    found[key].add_done_callback(lambda _: free.release())
                    del layers[key]
                    on_progress("choosing codes of layers", len(found), len(weights))
            return result

        kernels = SimpleNamespace(**{**vars(every_op), "linear": linear})
        columns = {key: len(weight) for key, (_, (weight, _)) in weights.items()}
        for group in _groups(columns) if batches > 1 else [[*weights]]:
            layers = {key: _Layer(*weights[key][1], batches * uses[key]) for key in group}
            run(kernels)
        return {exact: found[key].result() for key, (exact, _) in weights.items()}


def _groups(columns: Mapping[LayerKey, int]) -> list[list[LayerKey]]:
    """Divide layers, by columns of their inputs, into groups whose sums fit into memory."""
    groups: list[list[LayerKey]] = []
    room = 0
    for key, number in columns.items():
        size = number * min(number, _TOGETHER)
        if not groups or size > room:
            groups.append([])
            room = _MOST_SUMS
        groups[-1].append(key)
        room -= size
    return groups


def rounded_codes(
    weight: Tensor, outliers: Tensor, grams: Sequence[Tensor], bits: WeightBits = 8
) -> WeightCodes:
    """Return codes for `quantize_weight`.

    Args:
        weight: `[hidden, features]` fp32.
        outliers: `[OUTLIERS]` int64, columns of the input that get no codes.
        grams: gram matrix of each part of the columns of the input, whose errors are corrected together. Columns of one
            that is not finite get the nearest codes.
    """
    is_kept = torch.ones(len(weight), dtype=torch.bool).index_fill(0, outliers, value=False)
    scale = nearest_scale(weight, outliers, bits)
    codes = torch.zeros(weight.shape[::-1], dtype=torch.int8)
    if bits == 4:
        # too few for the largest weights of a feature and for the others
        sizes = torch.cat([gram.diagonal() for gram in grams]) * is_kept
        for part in _features(weight):
            scale[part] = _best_scale(weight[:, part], scale[part], sizes, bits)
    first = 0
    for gram in grams:
        columns = is_kept[first : first + len(gram)].nonzero()[:, 0]
        columns = columns[gram.diagonal()[columns].argsort(descending=True)]
        shares = _shares(gram, columns)
        run_function(
            CHOOSE_CODES,
            (weight.t(), scale, (columns + first).int(), shares, codes),
            (largest_code(bits),),
        )
        first += len(gram)
    return WeightCodes(scale, codes.t())


def stored_codes(weight: Tensor, outliers: Tensor, bits: WeightBits = 8) -> WeightCodes | None:
    """Return the codes that a weight was widened from; None for other weights.

    A quantized checkpoint with a scale for each output and no zero points has them: each feature is a scale times whole
    numbers, and the largest number uses all bits, or nearly all.

    Args:
        weight: `[hidden, features]` fp32.
        outliers: `[OUTLIERS]` int64, columns of the input that get code 0.
    """
    most = largest_code(bits)
    scale, codes = weight.new_empty(weight.shape[1]), torch.empty_like(weight, dtype=torch.int8)
    # a few features tell at once that most weights are none
    for part in (slice(_SAMPLE), *_features(weight)):
        exact = weight[:, part]
        largest = exact.abs().amax(0).clamp_min_(SMALLEST_SCALE)
        candidates = torch.stack([largest / code for code in (most + 1, most, most - 1)])
        lost, best = torch.stack(
            [((exact / each).round_() * each - exact).abs_().amax(0) for each in candidates]
        ).min(0)
        scale[part] = candidates.gather(0, best[None])[0]
        found = (exact / scale[part]).round_()
        if found.max() > most or (lost > _ROUNDINGS * largest).any():
            return None
        codes[:, part] = found.to(torch.int8)
    return WeightCodes(scale, codes.index_fill_(0, outliers, 0))


def _features(weight: Tensor) -> Iterator[slice]:
    for first in range(0, weight.shape[1], _FEATURES):
        yield slice(first, first + _FEATURES)


def _best_scale(weight: Tensor, scale: Tensor, sizes: Tensor, bits: WeightBits) -> Tensor:
    """Return the scale of each feature whose nearest codes have the smallest error.

    Args:
        weight, scale: `[hidden, features]` and `[features]` fp32.
        sizes: `[hidden]`, mean squares of the columns of the input, in any unit.
    """
    largest = largest_code(bits)
    candidates = [scale * factor for factor in _SCALES]
    errors = [
        sizes @ ((weight / each).round_().clamp_(-largest, largest) * each - weight).square_()
        for each in candidates
    ]
    best = torch.stack(errors).argmin(0, keepdim=True)
    return torch.stack(candidates).gather(0, best)[0]


def _shares(gram: Tensor, columns: Tensor) -> Tensor:
    """Return the share of each earlier column's error that a column corrects, `[columns, columns]` fp32.

    The gram matrix, its columns in this order, is U D U' with a diagonal D and an upper triangle U of diagonal 1. This
    is U', or 0 if it is not finite.
    """
    # from the last column to the first, the lower triangle becomes the upper one
    backwards = columns.flip(0)
    gram = gram[backwards][:, backwards]
    # eigenvalues are at most 100 * columns times the smallest one, which fp32 holds
    gram.diagonal().add_(_DAMPING * gram.diagonal().mean() + torch.finfo(torch.float32).tiny)
    lower, failed = torch.linalg.cholesky_ex(gram)
    return torch.zeros_like(gram) if failed else lower.div_(lower.diagonal().clone()).flip(0, 1).t()


def calibration_kv(dtype: torch.dtype) -> KvSize:
    """Return KV caches for the texts of a step."""
    return KvSize(2 * _BLOCKS * _TEXTS_TOGETHER, _BLOCK_TOKENS, 0, dtype)


def _in_both(
    record: Callable[[torch.dtype], tuple[Program, ...]],
) -> tuple[tuple[Program, ...], str, tuple[Program, ...]]:
    """Return programs in fp32, the hash of their weights, and programs as they are served."""

    def exact() -> tuple[tuple[Program, ...], str]:
        programs = record(torch.float32)
        return programs, weights_hash(programs)

    dtype = choose_dtype("int8", _CPU)
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(exact)
        served = None if dtype == torch.float32 else record(dtype)
        programs, weights = found.result()
    return programs, weights, served or programs


class CalibratedDecoder:
    """A model that generates, with logits of each token; see `CalibratedModel`."""

    name: str
    most_texts, seen_tokens = _TEXTS_TOGETHER, _LONGEST * _TEXTS_TOGETHER
    enough_tokens = 640

    def __init__(
        self, record: Callable[[torch.dtype], tuple[Program, ...]], checkpoint: Checkpoint
    ) -> None:
        """Record the programs of `record_steps` on the CPU, with `calibration_kv`."""
        self.programs, self.weights, self.served = _in_both(record)
        self.checkpoint = checkpoint
        self.name = "decoder" if checkpoint.translate is None else "encoder and decoder"
        self.longest = min(checkpoint.max_sequence_tokens, _LONGEST)
        self.measured_tokens = _MOST_LOGITS // checkpoint.vocab_size

    def prompts(self, texts: Sequence[Int32Array]) -> list[Prompt]:
        if self.checkpoint.translate is None:
            return [Prompt(text) for text in texts]
        steps, tokens = (
            _Steps(self.programs, cpu, _TEXTS_TOGETHER),
            self.checkpoint.translate.tokens,
        )
        length = min(self.longest, _LONGEST_TARGET)
        return [
            prompt
            for first in range(0, len(texts), _TEXTS_TOGETHER)
            for prompt in _translate(steps, texts[first : first + _TEXTS_TOGETHER], tokens, length)
        ]

    def run(
        self, programs: Sequence[Program], kernels: object, prompts: Sequence[Prompt]
    ) -> Iterator[Tensor]:
        """Yield the logits of each prompt, `[tokens, vocabulary]`."""
        logits = _logits(programs, kernels, prompts, 1)
        yield from torch.split(logits, [len(prompt.token_ids) for prompt in prompts])

    def observe(self, kernels: object, prompts: Sequence[Prompt]) -> None:
        tokens = sum(len(prompt.token_ids) for prompt in prompts)
        _logits(self.served, kernels, prompts, -(-tokens // _LOGIT_ROWS))

    def compare(
        self, answers: Iterator[Tensor], expected: Iterator[Tensor], prompts: Sequence[Prompt]
    ) -> LogitQuality:
        token_ids = (torch.from_numpy(prompt.token_ids) for prompt in prompts)
        return compare_logits(zip(answers, expected, token_ids, strict=True))


def _logits(
    programs: Sequence[Program], kernels: object, prompts: Sequence[Prompt], every: int
) -> Tensor:
    """Return the logits of one token in `every`, `[rows, vocabulary]`."""
    chunks = [
        _chunk(prompt, 0, prompt.token_ids, place, encodes=True)
        for place, prompt in enumerate(prompts)
    ]
    tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return _Steps(programs, kernels, tokens).logits(chunks, every)


class _Steps:
    """Runs steps of up to `_TEXTS_TOGETHER` texts."""

    def __init__(self, programs: Sequence[Program], kernels: object, logit_rows: int) -> None:
        caches = caches_of(programs[0].states, new_caches(programs[0].states, _CPU))
        # the sources of a step are encoded together
        tokens = _LONGEST * _TEXTS_TOGETHER if len(programs) > 1 else logit_rows
        largest = {"tokens": tokens, "sequences": _TEXTS_TOGETHER, "logit_rows": logit_rows}
        arenas = [
            Arena(Layout(program.buffers, alignment_of(_CPU)), largest, _CPU)
            for program in programs
        ]
        self._decoder, *self._encoders = [
            CpuRunner(program, kernels, arena, caches, of_steps=True)
            for program, arena in zip(programs, arenas, strict=True)
        ]

    def logits(self, chunks: Sequence[Chunk], every: int = 1) -> Tensor:
        """Return the logits of one token in `every`, `[rows, vocabulary]`."""
        sources = source_arrays(chunks, _BLOCK_TOKENS)
        for encoder in self._encoders if sources else ():
            encoder.run(sources, source_dims(sources), [])
        inputs = dict(step_arrays(chunks, _BLOCK_TOKENS))
        inputs["logit_rows"] = np.arange(0, len(inputs["token_ids"]), every, dtype=np.int32)
        (logits,) = self._decoder.run(inputs, step_dims(inputs))
        return logits


def _translate(
    steps: _Steps, sources: Sequence[Int32Array], tokens: TargetTokens, length: int
) -> list[Prompt]:
    """Return source texts with their most probable targets of this length, token by token."""
    start = np.array([tokens.start], np.int32)
    prompts = [Prompt(start, payload=Source(source)) for source in sources]
    targets = np.full((len(prompts), length), tokens.start, np.int32)
    for position in range(length):
        chunks = [
            _chunk(prompt, position, target[position : position + 1], place, encodes=not position)
            for place, (prompt, target) in enumerate(zip(prompts, targets, strict=True))
        ]
        logits = steps.logits(chunks)
        is_forced = position == 0 and tokens.forced_first is not None
        if position + 1 < length:
            targets[:, position + 1] = tokens.forced_first if is_forced else logits.argmax(1)
    return [
        Prompt(_cut(target, tokens.eos), payload=prompt.payload)
        for prompt, target in zip(prompts, targets, strict=True)
    ]


def _cut(target: Int32Array, eos: Sequence[int]) -> Int32Array:
    """Return a target up to its first end token; the start may be one."""
    ends = np.flatnonzero(np.isin(target[1:], eos))
    return target[: ends[0] + 2] if len(ends) else target


def _chunk(
    prompt: Prompt, start: int, token_ids: Int32Array, place: int, *, encodes: bool
) -> Chunk:
    """Return tokens of the prompt at a place of a step as a chunk."""
    (sequence,) = unanswered_sequences(Request((prompt,), _OPTIONS))
    assert isinstance(sequence, GeneratedSequence)
    blocks = range(2 * _BLOCKS * place, 2 * _BLOCKS * (place + 1))
    held = -(-(start + len(token_ids)) // _BLOCK_TOKENS)
    own, sources = array("i", blocks[:held]), tuple(blocks[_BLOCKS:])
    chunk = Chunk(sequence, start, tuple(token_ids.tolist()), own, ())
    source_ids = prompt.payload_tokens(Source)
    if source_ids is None:
        return chunk
    source = tuple(source_ids.tolist())
    return chunk._replace(source_block_ids=sources, encodes=source if encodes else ())


class CalibratedEncoder:
    """An encoder with one vector per text, whatever the task is."""

    name: str = "encoder"
    most_texts = seen_tokens = enough_tokens = 8192
    measured_tokens = 512

    def __init__(self, load: Callable[[torch.dtype], EncoderModel], checkpoint: Checkpoint) -> None:
        """Record the encoder, which `load` returns on the CPU; any thread may call it."""
        self.checkpoint = checkpoint
        self.longest = checkpoint.max_sequence_tokens

        def record(dtype: torch.dtype) -> tuple[Program, ...]:
            encoder, ops = load(dtype), Recorder()
            hidden = encoder.record(ops)
            head = record_head(ops, "embed", encoder.heads, hidden, checkpoint.pooling)
            return (ops.finish(head),)

        self.programs, self.weights, self.served = _in_both(record)

    def prompts(self, texts: Sequence[Int32Array]) -> list[Prompt]:
        return [Prompt(text) for text in texts]

    def run(
        self, programs: Sequence[Program], kernels: object, prompts: Sequence[Prompt]
    ) -> Iterator[Float32Array]:
        """Yield the vector of each prompt, `[hidden]`."""
        (program,) = programs
        lengths = [prompt.num_tokens for prompt in prompts]
        dims = dims_of(lengths)
        layout = Layout(program.buffers, alignment_of(_CPU))
        arena = Arena(layout, largest_dims(dims["tokens"], len(prompts)), _CPU)
        names = [value.name for value in program.inputs]
        arrays = prompt_arrays(names, prompts, [DEFAULT_OPTIONS] * len(prompts))
        batch = PackedBatch(tensors_of(arrays), dims)
        (output,) = program.run(batch, kernels, arena.allocate(dims))
        yield from output.numpy()

    def observe(self, kernels: object, prompts: Sequence[Prompt]) -> None:
        deque(self.run(self.served, kernels, prompts), 0)

    def compare(
        self,
        answers: Iterator[Float32Array],
        expected: Iterator[Float32Array],
        prompts: Sequence[Prompt],  # noqa: ARG002  # part of the protocol
    ) -> VectorQuality:
        return compare_vectors(np.stack([*answers]), np.stack([*expected]))
