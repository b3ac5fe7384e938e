"""Loads a model as a server would, and compares it with the original library."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np

from varlen import Encoder, Generator
from varlen.config import NO_LIMIT, DType, EngineConfig
from varlen.errors import ConfigError, RequestError
from varlen.execution.model_info import ModelInfo, generation_limit, sequence_limit
from varlen.in_process.encoder import Inputs
from varlen.intake.found import FOUND
from varlen.intake.tokenization import Text, Tokenizer
from varlen.models.checkpoint.lora_folder import adapter_folders
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Float32Array
from varlen.request.vectors import SparseVector, scores_of
from varlen.service.costs import save_int8_price
from varlen.service.generation import GeneratorParts
from varlen.service.one_shot import EncoderParts
from varlen.service.service import Service
from varlen.tasks import TASKS, Task
from varlen.telemetry.metrics import Stats
from varlen_tools.doctor.comparison import (
    NEW_TOKENS,
    TOKENIZATION,
    Comparison,
    Transformers,
    activated,
    compare_ids,
    compare_scores,
    compare_values,
    has_library,
    named,
    pair_scores,
    readable_folder,
    sentence_vectors,
    short_dtype,
    stores_activation,
    token_vectors,
    without_library,
)
from varlen_tools.messages import first_line
from varlen_tools.sample_texts import TEXTS

_LENGTHS = (16, 128, 512)
# Longest text that is compared, in tokens: a longer one takes the original library too long.
LONGEST = 512
# Texts of a task of many steps.
_PROMPTS = 4
# Tokens of one measured call, and how long calls are repeated.
_CALL_TOKENS = 4096
_SECONDS = 1.0
_MEGABYTE = 1e6
# Tasks whose inputs are no rows of token ids.
_OWN_INPUTS: frozenset[Task] = frozenset(("fill_mask", *FOUND))
_LABELS = ("person", "place", "number")
_NO_SPANS = Comparison(
    "spans",
    "",
    0,
    None,
    remark="neither transformers nor sentence-transformers has this model; its library is gliner or gliner2",
)
# Adapters that are compared; each takes a model of its own in transformers.
_MAX_ADAPTERS = 8
# Enough for the sequences that are compared.
_KV_BYTES = 1 << 30


# Compares the answers of a model with the adapter of a name, given the model in transformers.
_CompareAdapter: TypeAlias = Callable[
    [Checkpoint, EngineConfig, Transformers, str, str], Comparison
]


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of texts of one length."""

    what: str
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Examination:
    """A model that was loaded, run and compared.

    Attributes:
        memory: name and size of each need, in words.
        int8: speed and quality of int8 in a line; empty if it is not measured.
    """

    memory: tuple[tuple[str, str], ...]
    comparisons: tuple[Comparison, ...]
    speeds: tuple[Speed, ...]
    int8: str = ""


def examine(checkpoint: Checkpoint, config: EngineConfig, *, has_speed: bool) -> Examination:
    """Load a checkpoint and compare it.

    Raises:
        VarlenError: the checkpoint or a setting is refused.
    """
    config = _unlimited(checkpoint, config)
    is_iterative = TASKS[config.task or checkpoint.task].is_iterative
    examine_task = _examine_steps if is_iterative else _examine_one_step
    return examine_task(checkpoint, config, has_speed)


def measure_int8(checkpoint: Checkpoint, config: EngineConfig) -> str:
    """Return speed and quality of int8 here in a line, which may be empty.

    It is empty for models that generate, on a GPU, and where the model is int8 or cannot be.

    Raises:
        VarlenError: the checkpoint or a setting is refused.
    """
    config = _unlimited(checkpoint, config)
    task = config.task or checkpoint.task
    if TASKS[task].is_iterative or task in _OWN_INPUTS:
        return ""
    limit = min(LONGEST, sequence_limit(checkpoint, config))
    config = replace(config, max_sequence_tokens=limit)
    service = Service.load(EncoderParts, checkpoint.folder, config, Stats())
    info = service.model.info
    with Encoder(service) as encoder:
        if info.device != "cpu" or short_dtype(info.dtype) not in ("fp32", "bf16"):
            return ""
        speeds = tuple(_encoder_speeds(encoder, checkpoint.vocab_size, limit))
        return _int8_price(checkpoint, config, encoder, info, speeds)


def _unlimited(checkpoint: Checkpoint, config: EngineConfig) -> EngineConfig:
    """Return settings without limits beside the model's, cache and measurements at load."""
    return replace(
        config,
        task=config.task or checkpoint.task,
        warmup_seconds=0,
        response_cache_bytes=0,
        max_queued_requests=NO_LIMIT,
        max_queued_tokens=NO_LIMIT,
        max_text_bytes=NO_LIMIT,
    )


def _examine_one_step(checkpoint: Checkpoint, config: EngineConfig, has_speed: bool) -> Examination:
    limit = min(LONGEST, sequence_limit(checkpoint, config))
    config = replace(config, max_sequence_tokens=limit)
    task = _comparable_task(config.task or checkpoint.task, checkpoint)
    inputs = sample_inputs(task, limit)
    vocab_size = checkpoint.vocab_size
    service = Service.load(EncoderParts, checkpoint.folder, config, Stats())
    info, dtype = service.model.info, short_dtype(service.model.info.dtype)
    speeds: tuple[Speed, ...] = ()
    int8 = ""
    answers: dict[DType, list[Float32Array]] = {}
    with Encoder(service) as encoder:
        if has_speed and config.task not in _OWN_INPUTS:
            speeds = tuple(_encoder_speeds(encoder, vocab_size, limit))
            if info.device == "cpu" and dtype in ("fp32", "bf16"):
                int8 = _int8_price(checkpoint, config, encoder, info, speeds)
        if task == "extract":
            encoder.extract([str(each) for each in inputs], _LABELS, truncate=True)
            return Examination(_memory(info), (_NO_SPANS,), speeds)
        if task == config.task:
            answers[dtype] = _answers(encoder, inputs, vocab_size)
    dtypes: set[DType] = {"fp32", dtype}
    for each in dtypes - answers.keys():
        settings = replace(config, dtype=each, task=task)
        with Encoder(Service.load(EncoderParts, checkpoint.folder, settings, Stats())) as encoder:
            answers[each] = _answers(encoder, inputs, vocab_size)
    comparisons = (
        *_compare(checkpoint, task, inputs, limit, answers),
        *_not_compared(config, task, checkpoint),
        *_compare_adapters(checkpoint, config, partial(_adapted_answers, limit=limit)),
    )
    return Examination(_memory(info), comparisons, speeds, int8)


def _int8_price(
    checkpoint: Checkpoint,
    config: EngineConfig,
    encoder: Encoder,
    info: ModelInfo,
    speeds: Sequence[Speed],
) -> str:
    """Return what int8 gives here; empty if it cannot run. A line is stored."""
    limit, vocab_size = config.max_sequence_tokens or LONGEST, checkpoint.vocab_size
    inputs = sample_inputs(encoder.task, limit)
    settings = replace(config, dtype="int8")
    try:
        service = Service.load(EncoderParts, checkpoint.folder, settings, Stats())
    except ConfigError:
        # no product of codes is exact on this CPU
        return ""
    with Encoder(service) as fast:
        pairs = zip(_encoder_speeds(fast, vocab_size, limit), speeds, strict=True)
        gains = [ours.tokens_per_second / usual.tokens_per_second for ours, usual in pairs]
        answers = [_answers(each, inputs, vocab_size) for each in (fast, encoder)]
    quality = agreement(*answers, has_labels=TASKS[encoder.task].has_labels)
    gain = float(np.exp(np.log(gains).mean()))
    remedy = ": set dtype: int8" if gain > 1 else ""
    price = f"int8: {gain:.1f} times as fast here, {quality}{remedy}"
    save_int8_price(price, info, checkpoint, config)
    return price


def agreement(
    answers: Sequence[Float32Array], expected: Sequence[Float32Array], *, has_labels: bool
) -> str:
    """Return how far answers agree, in words: cosines, a rank correlation, or equal labels.

    Args:
        answers, expected: vectors, or logits of each label; of a text or of each of its tokens.
        has_labels: whether they are logits; logits of one label are ranked.
    """
    ours, theirs = (
        np.concatenate([each.reshape(-1, each.shape[-1]) for each in rows]).astype(np.float64)
        for rows in (answers, expected)
    )
    if has_labels and ours.shape[1] > 1:
        return f"the same label for {(ours.argmax(1) == theirs.argmax(1)).mean():.1%}"
    if has_labels:
        first, second = np.triu_indices(len(ours), 1)
        orders = [np.sign(each[first, 0] - each[second, 0]) for each in (ours, theirs)]
        return f"Kendall's tau {float((orders[0] * orders[1]).mean()):.3f}"
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    cosines = (ours * theirs).sum(1) / np.maximum(norms, 1e-30)
    return f"mean cosine {cosines.mean():.4f}"


def _memory(info: ModelInfo) -> tuple[tuple[str, str], ...]:
    dtype = short_dtype(info.dtype)
    return (
        ("weights", f"{info.weight_bytes / _MEGABYTE:.1f} MB in {dtype}, shared by all workers"),
        (
            "intermediates",
            f"up to {info.arena_bytes / _MEGABYTE:.1f} MB for a batch of {info.max_batch_tokens} tokens,"
            f" in each of {info.workers} workers on {info.device_name}",
        ),
    )


def _not_compared(config: EngineConfig, compared: Task, checkpoint: Checkpoint) -> list[Comparison]:
    task = config.task or checkpoint.task
    if not has_library("transformers"):
        return [without_library(TASKS[task].answers, "transformers")]
    if task == compared:
        return []
    what, instead = TASKS[task].answers, f"{TASKS[compared].answers} are compared instead"
    if _needs_sentences(task, checkpoint):
        return [without_library(what, "sentence-transformers", instead)]
    return [Comparison(what, "", 0, None, remark=instead)]


def _comparable_task(task: Task, checkpoint: Checkpoint) -> Task:
    if _needs_sentences(task, checkpoint):
        return task if has_library("sentence-transformers") else "hidden"
    if TASKS[task].has_labels or task == "extract":
        return task
    return "hidden"


def _needs_sentences(task: Task, checkpoint: Checkpoint) -> bool:
    return TASKS[task].takes_prompts or checkpoint.logit_score is not None


def _answers(encoder: Encoder, inputs: Inputs, vocab_size: int) -> list[Float32Array]:
    """Return the answer of each input.

    For `sparse_embed`, it is the weights of all terms. For `token_embed`, texts are queries first, then documents.
    """
    if encoder.task == "token_embed":
        roles = ("query", "document") if isinstance(inputs[0], str) else (None,)
        return [
            vectors
            for role in roles
            for vectors in encoder.token_embed(inputs, prompt_name=role, truncate=True)
        ]
    if encoder.task == "sparse_embed":
        return [_dense(each, vocab_size) for each in encoder.sparse_embed(inputs, truncate=True)]
    # any other task has the name of its method
    name = "classify" if encoder.task == "rerank" else encoder.task
    method: Callable[..., Iterable[Float32Array]] = getattr(encoder, name)
    return list(method(inputs, truncate=True))


def _dense(vector: SparseVector, size: int) -> Float32Array:
    weights = np.zeros(size, dtype=np.float32)
    weights[vector.indices] = vector.values
    return weights


def _compare(
    checkpoint: Checkpoint,
    task: Task,
    inputs: Sequence[Text],
    limit: int,
    answers: dict[DType, list[Float32Array]],
) -> Iterator[Comparison]:
    if not has_library("transformers"):
        return
    what = TASKS[task].answers
    # what they call chats is tokenized with their answers
    is_chat = task == "rerank" and checkpoint.logit_score is not None
    is_of_sentences = is_chat or TASKS[task].takes_prompts
    library = named("sentence-transformers" if is_of_sentences else "transformers")
    with readable_folder(checkpoint) as folder:
        try:
            original = Transformers(folder, checkpoint)
            if not is_chat:
                yield _compare_tokens(checkpoint, original, inputs, limit)
            original.check_comparable(task)
            if is_of_sentences:
                expected = _sentence_answers(folder, task, inputs, limit)
            else:
                expected = original.values(task, inputs, limit)
        except Exception as error:
            yield Comparison(what, library, 0, None, remark=first_line(error))
            return
        comparisons = [
            compare_values(what, library, actual=actual, expected=expected, dtype=dtype)
            for dtype, actual in sorted(answers.items(), key=lambda item: item[0] != "fp32")
        ]
        yield from comparisons
        # scores of other shapes, of NaN or infinity cannot be judged
        has_differences = all(each.difference is not None for each in comparisons)
        if TASKS[task].has_labels and has_differences:
            yield from _compare_scores(checkpoint, task, original, folder, answers, expected)


def _compare_scores(
    checkpoint: Checkpoint,
    task: Task,
    original: Transformers,
    folder: Path,
    answers: dict[DType, list[Float32Array]],
    logits: list[Float32Array],
) -> Iterator[Comparison]:
    """Yield the comparison of what each program makes of its logits, in each dtype.

    CrossEncoder makes the scores if the checkpoint ranks or stores an activation, else a pipeline of transformers.
    """
    function = checkpoint.labels.function
    is_pair = checkpoint.num_labels == 1 or stores_activation(checkpoint)
    name = "sentence-transformers" if is_pair and task != "token_classify" else "transformers"
    if not has_library(name):
        yield without_library("scores", name)
        return
    try:
        expected = (
            activated(folder, logits)
            if name == "sentence-transformers"
            else original.scores(task, logits)
        )
    except Exception as error:
        yield Comparison("scores", named(name), 0, None, remark=first_line(error))
        return
    for dtype, ours in sorted(answers.items(), key=lambda item: item[0] != "fp32"):
        yield compare_scores(
            named(name),
            logits=list(zip(ours, logits, strict=True)),
            actual=[scores_of(each, function) for each in ours],
            expected=expected,
            dtype=dtype,
            is_relative=function != "none",
        )


def _sentence_answers(
    folder: Path, task: Task, inputs: Sequence[Text], limit: int
) -> list[Float32Array]:
    if task == "rerank":
        return pair_scores(folder, inputs, limit)
    texts = [text for text in inputs if isinstance(text, str)]
    if task == "token_embed":
        return token_vectors(folder, texts, limit)
    return sentence_vectors(folder, texts, limit, is_sparse=task == "sparse_embed")


def _compare_tokens(
    checkpoint: Checkpoint, original: Transformers, inputs: Sequence[Text], limit: int
) -> Comparison:
    tokenizer = Tokenizer(checkpoint.weights_folder, limit, side=checkpoint.truncation_side)
    ours = tokenizer.encode(inputs, truncate=True)
    return compare_ids(
        TOKENIZATION,
        named("transformers"),
        actual=[each.token_ids.tolist() for each in ours],
        expected=original.token_ids(inputs, limit),
    )


def _encoder_speeds(encoder: Encoder, vocab_size: int, limit: int) -> Iterator[Speed]:
    rng = np.random.default_rng(0)
    for length in sorted({min(length, limit) for length in _LENGTHS}):
        rows = [rng.integers(0, vocab_size, length) for _ in range(max(1, _CALL_TOKENS // length))]
        # compiles and packs what this length needs
        _answers(encoder, rows, vocab_size)
        began, calls = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < _SECONDS:
            _answers(encoder, rows, vocab_size)
            calls += 1
        yield Speed(f"texts of {length} tokens", calls * len(rows) * length / passed)


def _examine_steps(checkpoint: Checkpoint, config: EngineConfig, has_speed: bool) -> Examination:
    limit = min(LONGEST, generation_limit(checkpoint, config))
    config = replace(config, max_sequence_tokens=limit, kv_bytes=_KV_BYTES)
    prompts = sample_prompts()
    service = Service.load(GeneratorParts, checkpoint.folder, config, Stats())
    info = service.model.runner.info
    dtype = short_dtype(info.dtype)
    memory = (
        ("weights", f"{info.weight_bytes / _MEGABYTE:.1f} MB in {dtype}"),
        (
            "KV cache",
            f"{info.block_bytes / info.block_size:.0f} bytes per token",
        ),
    )
    speeds: tuple[Speed, ...] = ()
    answers: dict[DType, list[list[int]]] = {}
    with Generator(service) as generator:
        answers[dtype] = _generated(checkpoint, generator, prompts)
        if has_speed:
            began = time.perf_counter()
            timed = _generated(checkpoint, generator, prompts * 2)
            rate = sum(map(len, timed)) / (time.perf_counter() - began)
            speeds = (Speed(f"{len(timed)} answers at a time, tokens generated in {dtype}", rate),)
    if dtype != "fp32":
        service = Service.load(
            GeneratorParts, checkpoint.folder, replace(config, dtype="fp32"), Stats()
        )
        with Generator(service) as generator:
            answers["fp32"] = _generated(checkpoint, generator, prompts)
    comparisons = (
        *_compare_generated(checkpoint, prompts, answers),
        *_compare_adapters(checkpoint, config, _adapted_generation),
    )
    return Examination(memory, comparisons, speeds)


def _generated(checkpoint: Checkpoint, generator: Generator, prompts: list[str]) -> list[list[int]]:
    greedy = {} if checkpoint.translate else {"temperature": 0.0}
    made = generator.generate(prompts, max_tokens=NEW_TOKENS, **greedy)
    return [list(each.token_ids) for each in made]


def _compare_adapters(
    checkpoint: Checkpoint, config: EngineConfig, compare: _CompareAdapter
) -> Iterator[Comparison]:
    folders = adapter_folders(checkpoint.folder, config.adapters)
    missing = next((each for each in ("transformers", "peft") if not has_library(each)), None)
    for number, (name, folder) in enumerate(folders.items()):
        what = f'adapter "{name}"'
        if missing is not None:
            yield without_library(what, missing)
        elif number >= _MAX_ADAPTERS:
            remark = f"only the first {_MAX_ADAPTERS} adapters are compared"
            yield Comparison(what, "", 0, None, remark=remark)
        else:
            yield _compare_adapter(checkpoint, config, what, name, folder, compare)


def _compare_adapter(
    checkpoint: Checkpoint,
    config: EngineConfig,
    what: str,
    name: str,
    folder: Path,
    compare: _CompareAdapter,
) -> Comparison:
    with readable_folder(checkpoint) as readable:
        try:
            original = Transformers(readable, checkpoint)
            original.set_adapter(folder)
            return compare(checkpoint, replace(config, dtype="fp32"), original, name, what)
        except RequestError as error:
            # it is damaged, or of a kind that is not served
            return Comparison(what, "", 0, False, remark=first_line(error))
        except Exception as error:
            return Comparison(what, named("peft"), 0, None, remark=first_line(error))


def _adapted_answers(
    checkpoint: Checkpoint,
    config: EngineConfig,
    original: Transformers,
    name: str,
    what: str,
    *,
    limit: int,
) -> Comparison:
    task: Task = config.task or checkpoint.task
    if not TASKS[task].has_labels or checkpoint.logit_score is not None:
        task = "hidden"
    inputs = sample_inputs(task, limit)
    service = Service.load(EncoderParts, checkpoint.folder, replace(config, task=task), Stats())
    with Encoder(service) as encoder:
        actual = _answers(encoder.with_adapter(name), inputs, checkpoint.vocab_size)
    expected = original.values(task, inputs, limit)
    what = f"{TASKS[task].answers} with the {what}"
    return compare_values(what, named("peft"), actual=actual, expected=expected, dtype="fp32")


def _adapted_generation(
    checkpoint: Checkpoint, config: EngineConfig, original: Transformers, name: str, what: str
) -> Comparison:
    prompts = sample_prompts()
    service = Service.load(GeneratorParts, checkpoint.folder, config, Stats())
    with Generator(service) as generator:
        made = _generated(checkpoint, generator.with_adapter(name), prompts)
    return compare_ids(
        f"answers of up to {NEW_TOKENS} tokens with the {what}",
        named("peft"),
        actual=_without_ends(checkpoint, made),
        expected=_without_ends(checkpoint, original.generated(prompts)),
    )


def _without_ends(checkpoint: Checkpoint, rows: list[list[int]]) -> list[list[int]]:
    ends = set(checkpoint.eos_token_ids)
    if checkpoint.translate is not None:
        tokens = checkpoint.translate.tokens
        ends = {*tokens.eos, *(() if tokens.pad is None else (tokens.pad,))}
    return [[token for token in row if token not in ends] for row in rows]


def _compare_generated(
    checkpoint: Checkpoint, prompts: list[str], answers: dict[DType, list[list[int]]]
) -> Iterator[Comparison]:
    kind = "translations" if checkpoint.translate else "greedy answers"
    what = f"{kind} of up to {NEW_TOKENS} tokens"
    if not has_library("transformers"):
        yield without_library(what, "transformers")
        return
    name = named("transformers")
    stripped = partial(_without_ends, checkpoint)
    with readable_folder(checkpoint) as folder:
        try:
            expected = stripped(Transformers(folder, checkpoint).generated(prompts))
        except Exception as error:
            yield Comparison(what, name, 0, None, remark=first_line(error))
            return
    for dtype, rows in sorted(answers.items(), key=lambda item: item[0] != "fp32"):
        made = compare_ids(f"{what} in {dtype}", name, actual=stripped(rows), expected=expected)
        yield made if dtype == "fp32" else _unjudged(made, stripped(rows), expected)


def _unjudged(made: Comparison, actual: list[list[int]], expected: list[list[int]]) -> Comparison:
    """Return a comparison without a result.

    Rounding may change a token, and then all that follow.
    """
    equal = sum(ours == theirs for ours, theirs in zip(actual, expected, strict=True))
    remark = f"rounding may change tokens; {equal} of {made.count} are equal"
    return replace(made, agrees=None, remark=remark)


def sample_inputs(task: Task, limit: int) -> list[Text]:
    """Return texts, pairs for `rerank`, both for `classify`; up to more than `limit` tokens."""
    words = " ".join(TEXTS).split()
    long = [" ".join(islice(cycle(words), count)) for count in (limit // 8, limit // 2, 2 * limit)]
    texts = [text for text in (*TEXTS, *long) if text]
    if task == "rerank":
        return list(pairwise(texts))
    if task == "classify":
        return [*texts, *pairwise(texts)]
    return list(texts)


def sample_prompts() -> list[str]:
    """Return the prompts of a task of many steps."""
    return [text for text in TEXTS if text][:_PROMPTS]
