"""Compares answers: largest difference and least cosine, and what is allowed in each dtype."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from varlen.config import DType
from varlen.request.request import Float32Array

# In fp32, the largest difference that rounding explains, relative to the largest value.
FP32_DIFFERENCE = 1e-3
# In other dtypes, the least cosine of vectors, and the largest difference of logits.
LEAST_COSINE: Mapping[DType, float] = {"bf16": 0.995, "fp16": 0.999, "int8": 0.98, "fp8": 0.98}
LARGEST_DIFFERENCE: Mapping[DType, float] = {"bf16": 0.05, "fp16": 0.01, "int8": 0.2, "fp8": 0.2}
# In every dtype, the largest difference of a score that rounding explains, relative to the score: the libraries compute
# them in fp32. Smaller scores than the least normal number are equal.
SCORE_DIFFERENCE = 1e-5
_LEAST_SCORE = 2.0**-126
# What is compared, where it is the tokenizer.
TOKENIZATION = "token ids"
_NAMES: Mapping[str, DType] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "int8": "int8",
    "fp8": "fp8",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Answers of two programs to the same inputs.

    Attributes:
        what: name of the answers, such as vectors in bf16.
        original: library and version of the other program; empty if none was asked.
        agrees: whether the difference is one of rounding; None if that could not be judged.
        difference: the largest one, relative to the largest value.
        cosine: the least one, of vectors.
        remark: the first input that differs, or why there is no comparison.
        missing: the library that would have made the answers, if it is not installed.
    """

    what: str
    original: str
    count: int
    agrees: bool | None
    difference: float | None = None
    cosine: float | None = None
    remark: str = ""
    missing: str = ""


def without_library(what: str, library: str, instead: str = "") -> Comparison:
    """Return an entry for answers that were not compared, since a library is not installed."""
    remark = f"{library} is not installed" + (f": {instead}" if instead else "")
    return Comparison(what, "", 0, None, remark=remark, missing=library)


def short_dtype(name: str) -> DType:
    """Return the name of a dtype in settings, given torch's."""
    return _NAMES[name]


def compare_values(
    what: str,
    original: str,
    *,
    actual: Sequence[Float32Array],
    expected: Sequence[Float32Array],
    dtype: DType,
) -> Comparison:
    """Return the comparison of one array per input.

    Args:
        actual, expected: per input `[features]`, or `[tokens, features]`.
        dtype: dtype of `actual`, in the words of the settings.
    """
    what = f"{what} in {dtype}"
    pairs = list(zip(actual, expected, strict=True))
    fault = _fault(pairs, original)
    if fault is not None:
        agrees, remark = fault
        return Comparison(what, original, len(pairs), agrees, remark=remark)
    largest = float(max(np.abs(theirs).max() for _, theirs in pairs)) or 1.0
    differences = [float(np.abs(ours - theirs).max()) / largest for ours, theirs in pairs]
    cosine = float(np.min([_least_cosine(*pair) for pair in pairs]))
    # the cosine of few numbers says little
    has_cosine = pairs[0][1].shape[-1] > 2
    worst = int(np.argmax(differences))
    if dtype == "fp32":
        agrees = differences[worst] <= FP32_DIFFERENCE
    elif has_cosine:
        agrees = cosine >= LEAST_COSINE[dtype]
    else:
        agrees = differences[worst] <= LARGEST_DIFFERENCE[dtype]
    return Comparison(
        what,
        original,
        len(pairs),
        agrees,
        differences[worst],
        cosine if has_cosine else None,
        "" if agrees else f"input {worst} differs most",
    )


def compare_scores(
    original: str,
    *,
    logits: Sequence[tuple[Float32Array, Float32Array]],
    actual: Sequence[Float32Array],
    expected: Sequence[Float32Array],
    dtype: DType,
    is_relative: bool = True,
) -> Comparison:
    """Return the comparison of the scores of a classifier.

    They may differ by what the difference of their logits explains. Differences are relative to each score, since small
    scores order documents too.

    Args:
        logits: per input, the logits of both programs.
        actual, expected: per input, the scores that each program makes of its own logits, of the same shape.
        is_relative: false for scores that are the logits.
    """
    worst, most, agrees = 0, 0.0, True
    for index, (pair, ours, theirs) in enumerate(zip(logits, actual, expected, strict=True)):
        # no activation has a steeper relative slope than 1 in each logit, or 2 in the largest change of all
        explained = np.expm1(2 * np.abs(np.subtract(*pair, dtype=np.float64)).max())
        difference = np.abs(np.subtract(ours, theirs, dtype=np.float64))
        if is_relative:
            difference /= np.maximum(theirs, _LEAST_SCORE, dtype=np.float64)
        if difference.max() > explained + SCORE_DIFFERENCE:
            agrees = False
        if difference.max() > most:
            worst, most = index, float(difference.max())
    remark = "" if agrees else f"input {worst} differs by more than its logits explain"
    return Comparison(f"scores in {dtype}", original, len(actual), agrees, most, None, remark)


def _fault(
    pairs: Sequence[tuple[Float32Array, Float32Array]], original: str
) -> tuple[bool | None, str] | None:
    """Return result and remark for values that have no difference: other shapes, NaN, infinity."""
    for index, (ours, theirs) in enumerate(pairs):
        if ours.shape != theirs.shape:
            return False, f"input {index} has the shape {ours.shape}, and there {theirs.shape}"
    # a difference to NaN is not above any limit
    for index, (ours, theirs) in enumerate(pairs):
        for values, agrees, owner in ((theirs, None, original), (ours, False, "varlen")):
            if not np.isfinite(values).all():
                return agrees, f"input {index} has NaN or infinite values in {owner}"
    return None


def compare_ids(
    what: str,
    original: str,
    *,
    actual: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
) -> Comparison:
    """Return the comparison of one list of token ids per input."""
    pairs = list(zip(actual, expected, strict=True))
    for index, (ours, theirs) in enumerate(pairs):
        if list(ours) != list(theirs):
            remark = f"input {index} has {list(ours)[:8]} ..., and there {list(theirs)[:8]} ..."
            return Comparison(what, original, len(pairs), False, remark=remark)
    return Comparison(what, original, len(pairs), True)


def _least_cosine(ours: Float32Array, theirs: Float32Array) -> float:
    ours, theirs = np.atleast_2d(ours).astype(np.float64), np.atleast_2d(theirs).astype(np.float64)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return float(((ours * theirs).sum(axis=1) / np.maximum(lengths, 1e-30)).min())
