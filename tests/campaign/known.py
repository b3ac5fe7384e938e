"""Inputs of every length with their answers, computed in this process before anything is attacked."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.closeness import encoder_roundings, relative_error
from varlen import Encoder, Generator
from varlen.tasks import Task

Floats = npt.NDArray[np.float32]

# Greedy, so that an answer has one form; the last token is not left to chance either.
GREEDY: Mapping[str, Any] = {"temperature": 0, "ignore_eos": True}
MAX_TOKENS = 24
# Sampled with a seed, so that these have one form too; the first sample is the answer without `n`.
SEEDED: Mapping[str, Any] = {"temperature": 0.8, "top_k": 8, "seed": 11, "ignore_eos": True}
NUM_SAMPLES, SAMPLE_TOKENS = 3, 120
BEAMS: Mapping[str, Any] = {"num_beams": 3, "max_tokens": 16}

_WORDS = "the cat sat by a river and wrote about tensors queues batches, tokens; numbers 42 ünï 漢字".split()
_MONTHS = "January March May July August October December".split()
_PROMPTS = (
    "def run(self):|The module|Return a new|import|class Queue|x = [1, 2|If the|é|# a comment|"
)
_LONG_TEXT_WORDS = 9000


@dataclass(frozen=True, slots=True)
class Vectors:
    """Inputs of an encoder and their answers.

    Attributes:
        texts, ids: inputs; `ids` are rows of token ids.
        of_texts, of_ids: the answer of each; an answer per token is `[tokens, features]`.
        error: largest difference that rounding explains, relative to the largest magnitude.
    """

    texts: list[str]
    ids: list[list[int]]
    of_texts: list[Floats]
    of_ids: list[Floats]
    error: float

    def is_right(self, answer: npt.ArrayLike, expected: Floats) -> bool:
        """Return whether an answer is the expected one up to rounding."""
        came = np.asarray(answer)
        if came.shape != expected.shape or not np.isfinite(came).all():
            return False
        bound = self.error * np.abs(expected).max(initial=0)
        return bool((np.abs(came - expected) <= bound).all())


@dataclass(frozen=True, slots=True)
class Known:
    """What the models of a campaign answer.

    Attributes:
        encoders: vectors by model.
        continuations: ids of the `MAX_TOKENS` tokens behind each prompt.
        samples: ids of the `SAMPLE_TOKENS` tokens of each sample behind each prompt, with `SEEDED`.
        translations: translations of texts, with `BEAMS`.
    """

    encoders: Mapping[str, Vectors]
    continuations: Mapping[str, tuple[int, ...]]
    samples: Mapping[str, Sequence[tuple[int, ...]]]
    translations: Mapping[str, str]


def encoder_answers(
    folder: Path, draw: random.Random, *, task: Task, texts: int, longest: int, vocabulary: int
) -> Vectors:
    """Return inputs of an encoder and its answers in fp32.

    Args:
        folder: folder of the checkpoint.
        draw: chooses the inputs.
        task: embed or hidden.
        texts: number of texts, and of rows of ids.
        longest: row of token ids.
        vocabulary: number of token ids.
    """
    words = [
        " ".join(draw.choices(_WORDS, k=draw.choice((1, 3, 3, 9, 9, 30)))) for _ in range(texts)
    ]
    if task == "embed":
        words[-1] = "tensor " * _LONG_TEXT_WORDS
    rows = [
        [draw.randrange(vocabulary) for _ in range(length)]
        # short ones mostly, as in life, and some at the limits
        for length in (1, longest, longest // 2, *(draw.randint(2, 24) for _ in range(texts - 3)))
    ]
    with Encoder.from_pretrained(folder, task=task, device="cpu", dtype="fp32") as encoder:
        run = encoder.embed if task == "embed" else encoder.hidden
        of_texts, of_ids = list(run(words, truncate=True)), list(run(rows))
    return Vectors(words, rows, of_texts, of_ids, relative_error(encoder_roundings(folder)))


def continuations(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the greedy continuation of some prompts."""
    with Generator.from_pretrained(folder, device="cpu", dtype="fp32") as generator:
        answers = generator.generate(_prompts(), max_tokens=MAX_TOKENS, **GREEDY)
    return {prompt: each.token_ids for prompt, each in zip(_prompts(), answers, strict=True)}


def samples(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    """Return samples of the continuation of some prompts."""
    with Generator.from_pretrained(folder, device="cpu", dtype="fp32") as generator:
        return {
            prompt: [
                each.token_ids
                for each in generator.generate(
                    [prompt], n=NUM_SAMPLES, max_tokens=SAMPLE_TOKENS, **SEEDED
                )
            ]
            for prompt in _prompts()
        }


def translations(folder: Path, draw: random.Random) -> dict[str, str]:
    """Return the best translation of some dates."""
    texts = [
        f"{draw.randint(1, 28)} {draw.choice(_MONTHS)} {draw.randint(1950, 2049)}"
        for _ in range(12)
    ]
    with Generator.from_pretrained(folder, device="cpu", dtype="fp32") as generator:
        answers = generator.generate(texts, **BEAMS)
    return {text: answer.text for text, answer in zip(texts, answers, strict=True)}


def _prompts() -> list[str]:
    return [prompt for prompt in _PROMPTS.split("|") if prompt]
