"""Zero-shot classification: labels of a request, judged by a model of natural language inference.

Each text is a premise, and each label a hypothesis such as "This example is sports."; the model says whether the text
entails it. The pairs of a text run in the server's batches without padding.

Source: ZeroShotClassificationPipeline of transformers, whose answers these are; Yin et al. 2019, arXiv:1909.00161.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from varlen_client.errors import InvalidRequest
from varlen_client.tasks.answers import RowAnswers
from varlen_client.wire import Floats, Pairs, check_not_a_string

DEFAULT_TEMPLATE = "This example is {}."
MAX_LABELS = 512
MAX_TEMPLATE_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label of a classifier and its score for a row."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Entailment:
    """Logits of an NLI model.

    Attributes:
        logits: [pairs, labels].
        names: names of these labels, in lower case.
    """

    logits: Floats
    names: Sequence[str]


def read_entailment(answers: RowAnswers) -> Entailment:
    """Return the logits of all pairs, and the names of the model's labels."""
    logits, labels = (answers.joined(output) for output in answers.outputs[:2])
    names = labels[0] if len(labels) else []
    return Entailment(logits, [name.decode(errors="replace").lower() for name in names])


def parse_labels(labels: str | Sequence[str]) -> list[str]:
    """Return candidate labels; a text has commas between them, and blank parts are dropped.

    Raises:
        InvalidRequest: there is none, or there are too many.
    """
    if isinstance(labels, str):
        labels = [each.strip() for each in labels.split(",") if each.strip()]
    if not 1 <= len(labels) <= MAX_LABELS:
        raise InvalidRequest(
            f"candidate_labels has {len(labels)} labels; allowed: 1 to {MAX_LABELS}"
        )
    return list(labels)


def hypotheses(texts: Sequence[str], labels: Sequence[str], template: str) -> Pairs:
    """Return the pairs of each text with the hypothesis of each label.

    Raises:
        InvalidRequest: the texts are a single string; or the template is too long, or has no place for the label, or
            other braces.
    """
    check_not_a_string(texts)
    rest = template.replace("{}", "", 1)
    if len(template) > MAX_TEMPLATE_CHARACTERS or "{}" not in template or set(rest) & set("{}"):
        raise InvalidRequest(
            f"hypothesis_template is {template[:80]!r}; allowed: a text of at most {MAX_TEMPLATE_CHARACTERS} characters"
            " with {} once, where the label stands, and no other braces"
        )
    filled = [template.replace("{}", label) for label in labels]
    return [(text, hypothesis) for text in texts for hypothesis in filled]


def label_scores(
    found: Entailment, labels: Sequence[str], *, multi_label: bool
) -> list[list[LabelScore]]:
    """Return the labels of each text with their scores, the best first.

    Args:
        labels: candidate labels.
        multi_label: whether several labels may hold: each score is then entailment beside contradiction. Otherwise
            the scores of a text add up to 1.

    Raises:
        InvalidRequest: no label of the model is entailment.
    """
    entailment = next(
        (index for index, name in enumerate(found.names) if name.startswith("entail")), None
    )
    if entailment is None or len(found.names) < 2:
        raise InvalidRequest(
            f"the model has the labels {', '.join(found.names)}; zero-shot classification needs a model of natural"
            " language inference, with a label whose name begins with entail"
        )
    logits = found.logits.reshape(-1, len(labels), len(found.names)).astype(np.float64)
    if multi_label or len(labels) == 1:
        contradiction = -1 if entailment == 0 else 0
        scores = _softmax(logits[..., [contradiction, entailment]])[..., 1]
    else:
        scores = _softmax(logits[..., entailment])
    # as the pipeline orders equal scores
    best_first = np.argsort(scores, axis=1)[:, ::-1]
    rounded = scores.astype(np.float32)
    return [
        [LabelScore(labels[at], float(row[at])) for at in order]
        for row, order in zip(rounded, best_first, strict=True)
    ]


def _softmax(
    logits: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    found: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = exponentials / exponentials.sum(
        axis=-1, keepdims=True
    )
    return found
