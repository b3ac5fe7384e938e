"""How close vectors and logits of a model in int8 are to fp32."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

# A lower mean cosine to fp32 is worth a warning, and so is a higher mean KL divergence.
LEAST_COSINE = 0.99
LARGEST_KL = 0.05


@dataclass(frozen=True, slots=True)
class VectorQuality:
    """How close int8 vectors are to fp32 vectors of the same texts.

    Attributes:
        cosine_mean, cosine_min: cosine of the two vectors of a text.
        spearman: rank correlation of the similarities of all pairs of texts.
    """

    texts: int
    cosine_mean: float
    cosine_min: float
    spearman: float

    def __str__(self) -> str:
        return (
            f"cosine to fp32 {self.cosine_mean:.4f} on average and {self.cosine_min:.4f} at least, Spearman"
            f" {self.spearman:.4f} ({self.texts} texts)"
        )

    @property
    def is_high(self) -> bool:
        """Whether int8 changes little; NaN is not high."""
        return self.cosine_mean >= LEAST_COSINE

    @property
    def rows(self) -> Mapping[str, str]:
        """Its numbers, by what they are."""
        return {
            "cosine to fp32, mean": f"{self.cosine_mean:.4f}",
            "cosine to fp32, least": f"{self.cosine_min:.4f}",
            "Spearman of similarities": f"{self.spearman:.4f}",
            "texts": str(self.texts),
        }


@dataclass(frozen=True, slots=True)
class LogitQuality:
    """How close int8 logits are to fp32 logits of the same tokens.

    Attributes:
        tokens: number of their tokens.
        kl_mean: Kullback-Leibler divergence of the int8 probabilities from fp32, in nats.
        same_best: part of the tokens with the same most probable next token.
        perplexity, fp32_perplexity: perplexity of the texts.
    """

    texts: int
    tokens: int
    kl_mean: float
    same_best: float
    perplexity: float
    fp32_perplexity: float

    def __str__(self) -> str:
        return (
            f"KL divergence from fp32 {self.kl_mean:.5f}, the same best token {self.same_best:.1%} of the time,"
            f" perplexity {self.perplexity:.2f} instead of {self.fp32_perplexity:.2f} ({self.texts} texts)"
        )

    @property
    def is_high(self) -> bool:
        return self.kl_mean <= LARGEST_KL

    @property
    def rows(self) -> Mapping[str, str]:
        return {
            "KL divergence from fp32, mean": f"{self.kl_mean:.5f}",
            "same best token": f"{self.same_best:.2%}",
            "perplexity": f"{self.perplexity:.3f}",
            "perplexity in fp32": f"{self.fp32_perplexity:.3f}",
            "texts": str(self.texts),
        }


Quality: TypeAlias = VectorQuality | LogitQuality


def read_quality(stored: Mapping[str, float]) -> Quality:
    """Return the quality with these fields.

    Raises:
        ValueError: the fields or a value are wrong.
    """
    for kind in (VectorQuality, LogitQuality):
        if stored.keys() == {field.name for field in fields(kind)}:
            quality: Quality = kind(**stored)  # type: ignore[arg-type]
            for number in asdict(quality).values():
                check_number(number)
            return quality
    raise ValueError(f"quality has the fields {sorted(stored)}")


def check_number(number: float) -> float:
    """Return a finite number.

    Raises:
        ValueError: it is none.
    """
    if type(number) not in (int, float) or not math.isfinite(number):
        raise ValueError(f"{number!r} is not a finite number")
    return float(number)


def compare_vectors(
    vectors: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]
) -> VectorQuality:
    """Return the quality of vectors, `[texts, hidden]`; at least three texts."""
    ours, theirs = _normalized(vectors), _normalized(expected)
    cosines = (ours * theirs).sum(1)
    pairs = np.triu_indices(len(ours), 1)
    similarities = [(each @ each.T)[pairs] for each in (ours, theirs)]
    ranks = np.stack([each.argsort().argsort() for each in similarities])
    return VectorQuality(
        len(ours),
        float(cosines.mean()),
        float(cosines.min()),
        float(np.corrcoef(ranks)[0, 1]),
    )


def compare_logits(texts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> LogitQuality:
    """Return the quality of logits.

    Args:
        texts: int8 logits and fp32 logits of each text, `[tokens, vocabulary]`, and its token ids, `[tokens]`.
    """
    count = tokens = followed = 0
    divergence = same = ours_lost = theirs_lost = 0.0
    for logits, expected, token_ids in texts:
        ours, theirs = logits.log_softmax(1), expected.log_softmax(1)
        # a token that is never chosen adds nothing
        terms = theirs.exp() * (theirs - ours)
        divergence += float(terms.masked_fill(theirs.isneginf(), 0).sum())
        same += int((ours.argmax(1) == theirs.argmax(1)).sum())
        following = token_ids[1:, None].long()
        ours_lost -= float(ours[:-1].gather(1, following).sum())
        theirs_lost -= float(theirs[:-1].gather(1, following).sum())
        count, tokens, followed = count + 1, tokens + len(ours), followed + len(following)
    return LogitQuality(
        count,
        tokens,
        divergence / max(tokens, 1),
        same / max(tokens, 1),
        float(np.exp(ours_lost / max(followed, 1))),
        float(np.exp(theirs_lost / max(followed, 1))),
    )


def _normalized(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    exact = vectors.astype(np.float64)
    normalized: npt.NDArray[np.float64] = exact / np.linalg.norm(exact, axis=1, keepdims=True)
    return normalized
