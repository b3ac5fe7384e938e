"""Labels and scores: `classify`, `predict`, `rerank`, `zero_shot` and `fill_mask`.

Zero-shot classification takes labels of a request. Each text is a premise, and each label a hypothesis such as "This
example is sports."; a model of natural language inference says whether the text entails it. The pairs of a text run in
the server's batches without padding. Source: ZeroShotClassificationPipeline of transformers, whose answers these are;
Yin et al. 2019, arXiv:1909.00161.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import Unpack

from varlen_client.errors import InvalidRequest
from varlen_client.tasks.answers import RowAnswers, RowOutput, read_matrix, text_of
from varlen_client.tasks.command import Command, Flag, shown_score
from varlen_client.tasks.row_task import Asked, Options, Outputs, RowOptions, RowTask, method
from varlen_client.wire import Floats, Inputs, Pairs, check_not_a_string, query_and_documents

Activation: TypeAlias = Literal["auto", "softmax", "sigmoid", "none"]

DEFAULT_TEMPLATE = "This example is {}."
MAX_LABELS = 512
MAX_TEMPLATE_CHARACTERS = 4096

ACTIVATION = Flag(Activation | None, "Makes scores of logits; auto: as the checkpoint says.")
TOP_K = Flag(int | None, "Show only the best; default: all.", min=1)


class RerankOptions(RowOptions, total=False):
    """Options of scores.

    activation: makes scores of logits: "sigmoid", "softmax", "none", or "auto", which lets the checkpoint decide.
    instruction: task in words, for a reranker that reads one; by default the checkpoint's.
    """

    activation: Activation | None
    instruction: str | None


class PredictOptions(RerankOptions, total=False):
    """Options of labels.

    top_k: return only the best labels of each row; by default all.
    """

    top_k: int | None


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


@dataclass(frozen=True, slots=True)
class Ranking:
    """The scores of documents and their order.

    Attributes:
        scores: [documents] fp32, in the order of the documents.
        best_first: [documents], indices of the documents in the order of their logits, the largest first. Scores of
            different logits may be equal.
    """

    scores: Floats
    best_first: npt.NDArray[np.int64]


def _label_outputs(options: Options) -> Outputs:
    top_k = options.get("top_k")
    if top_k is not None and top_k < 1:
        raise InvalidRequest(f"top_k is {top_k}; allowed: whole numbers from 1")
    return RowOutput("scores"), RowOutput("labels", dtype=np.object_), RowOutput("logits")


def _rank_output(options: Options) -> Outputs:
    # servers of every version have logits; a ColBERT model has only scores, which are no probabilities
    name = "logits" if options.get("activation") is None else "scores"
    return (RowOutput(name, other="scores"),)


def _read_labels(answers: RowAnswers) -> list[list[LabelScore]]:
    """Return the labels of each row with their scores, the best `top_k` first."""
    # [rows, labels] each
    scores, labels, logits = (answers.joined(output) for output in answers.outputs[:3])
    order = np.argsort(-logits, axis=1, kind="stable")[:, : answers.options.get("top_k")]
    return [
        [LabelScore(text_of(labels[row, at]), float(scores[row, at])) for at in best]
        for row, best in enumerate(order)
    ]


def _read_column(answers: RowAnswers) -> Floats:
    """Return the first output, whose width is 1, as [rows]."""
    return read_matrix(answers)[:, 0]


def _read_ranking(answers: RowAnswers) -> Ranking:
    """Return the scores and their order, by the logits if the model has them."""
    scores = answers.joined(answers.outputs[0])[:, 0]
    others = [output for output in answers.outputs if output.name == "logits"]
    logits = answers.joined(others[0])[:, 0] if others else scores
    return Ranking(scores, np.argsort(-logits, kind="stable"))


def read_entailment(answers: RowAnswers) -> Entailment:
    """Return the logits of all pairs, and the names of the model's labels."""
    logits, labels = (answers.joined(output) for output in answers.outputs[:2])
    names = labels[0] if len(labels) else []
    return Entailment(logits, [text_of(name).lower() for name in names])


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


def _softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    found: npt.NDArray[np.float64] = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return found


# Its rows are pairs of a text and a hypothesis.
ENTAILMENT: RowTask[Entailment] = RowTask(
    "zero_shot",
    RowOptions,
    (RowOutput("logits"), RowOutput("labels", dtype=np.object_)),
    read_entailment,
    takes_pairs=True,
)
CLASSIFY: RowTask[Floats] = RowTask(
    "classify", RowOptions, (RowOutput("logits"),), read_matrix, takes_pairs=True
)
PREDICT: RowTask[list[list[LabelScore]]] = RowTask(
    "predict",
    PredictOptions,
    _label_outputs,
    _read_labels,
    takes_pairs=True,
    not_sent=["top_k"],
    command=Command(
        task="classify",
        words=("labels texts", "labels of texts", "a classifier"),
        summary="Print the labels and scores of texts, the best first.",
        synonyms="predict",
        texts="Texts to classify.",
        file="Classify each line of this UTF-8 file; - is stdin.",
        json="Print one JSON object per line.",
        progress="classifying",
        flags={"activation": ACTIVATION, "top_k": TOP_K},
        fields=lambda labels: {"labels": [asdict(each) for each in labels]},
        lines=lambda labels: [
            ", ".join(f"{each.label} {shown_score(each.score)}" for each in labels)
        ],
    ),
)
# Its rows are pairs of the query and a document, and its model has one label.
RERANK: RowTask[Floats] = RowTask(
    "rerank", RerankOptions, _rank_output, _read_column, needs_width=1, takes_pairs=True
)
# The same rows; the answer says the order of the documents too.
RANK: RowTask[Ranking] = RowTask(
    "rerank",
    RerankOptions,
    (RowOutput("scores"), RowOutput("logits", other="scores")),
    _read_ranking,
    needs_width=1,
    takes_pairs=True,
    command=Command(
        task="rerank",
        words=("ranks documents", "scores of documents", "a reranker"),
        summary="Print documents and scores, the most relevant first.",
        synonyms="rank score",
    ),
)


class MaskOptions(RowOptions, total=False):
    """Options of filled masks.

    top_k: tokens of a mask; by default 5.
    """

    top_k: int | None


@dataclass(frozen=True, slots=True)
class FilledToken:
    """A token that may take the place of a mask.

    Attributes:
        token_id, text: number and text of the token.
        score: probability of the token.
    """

    token_id: int
    text: str
    score: float


def _read_filled_masks(answers: RowAnswers) -> list[list[list[FilledToken]]]:
    """Return the tokens of each mask of each row."""
    return [
        [
            [
                FilledToken(token_id, text_of(text), score)
                for token_id, text, score in zip(ids, texts, values, strict=True)
            ]
            for ids, texts, values in zip(
                token_ids[row, :count].tolist(),
                tokens[row, :count].tolist(),
                scores[row, :count].tolist(),
                strict=True,
            )
        ]
        for token_ids, tokens, scores, counts in answers.each(
            "token_ids", "tokens", "scores", "num_masks"
        )
        for row, count in enumerate(counts[:, 0].tolist())
    ]


FILL_MASK: RowTask[list[list[list[FilledToken]]]] = RowTask(
    "fill_mask",
    MaskOptions,
    (
        RowOutput("token_ids", 2, np.int32),
        RowOutput("scores", 2),
        RowOutput("tokens", 2, np.object_),
        RowOutput("num_masks", dtype=np.int32),
    ),
    _read_filled_masks,
    command=Command(
        task="fill_mask",
        words=("fills masks", "tokens for masks", "a masked language model"),
        summary="Print the most likely tokens of each mask.",
        details="A line per mask, the likeliest token first.",
        texts='Texts with masks: "Paris is the [MASK] of France."',
        file="Fill the lines of this UTF-8 file; - is stdin.",
        progress="filling",
        flags={"top_k": Flag(int | None, "Tokens of each mask; default: 5.", min=1)},
        fields=lambda masks: {"masks": [[asdict(token) for token in mask] for mask in masks]},
        lines=lambda masks: [
            ", ".join(f"{each.text} {shown_score(each.score)}" for each in mask) for mask in masks
        ],
    ),
)


class LabelMethods:
    """Methods for labels and scores, and for masks."""

    @method
    def classify(self, inputs: Inputs | Pairs, **options: Unpack[RowOptions]) -> Asked[Floats]:
        """Return the logits of each row, [rows, labels] fp32.

        A row is a text, a pair of texts or a list of token ids. Errors are the same as in `embed`.
        """
        return CLASSIFY.of(inputs, options)

    @method
    def predict(
        self, inputs: Inputs | Pairs, **options: Unpack[PredictOptions]
    ) -> Asked[list[list[LabelScore]]]:
        """Return the labels of each row with their scores, the best first.

        Inputs are the same as in `classify`, errors as in `embed`; see `PredictOptions`.
        """
        return PREDICT.of(inputs, options)

    @method
    def rerank(
        self, query: str, documents: Sequence[str], **options: Unpack[RerankOptions]
    ) -> Asked[Floats]:
        """Return one score per document, [documents] fp32; a higher score is more relevant.

        The score is the raw logit, unless there is an `activation`: "sigmoid" makes it 0 to 1, "auto"
        lets the checkpoint decide. The score of a ColBERT model is MaxSim, without an activation. Errors are
        the same as in `embed`; InvalidRequest also when the model has more than one label.
        """
        return RERANK.of(query_and_documents(query, documents), options)

    @method
    def zero_shot(
        self,
        texts: Sequence[str],
        labels: Sequence[str],
        *,
        hypothesis_template: str = DEFAULT_TEMPLATE,
        multi_label: bool = False,
        **options: Unpack[RowOptions],
    ) -> Asked[list[list[LabelScore]]]:
        """Return these labels with their scores for each text, the best first.

        For models of natural language inference, which serve `classify`. Errors are the same as in `embed`.

        Args:
            labels: candidate labels, at most 512.
            hypothesis_template: sentence about the text with {} where the label stands.
            multi_label: whether several labels may hold; otherwise the scores of a text add up to 1.
        """
        labels = parse_labels(labels)
        pairs = hypotheses(texts, labels, hypothesis_template)

        def read(answers: RowAnswers) -> list[list[LabelScore]]:
            found = read_entailment(answers)
            return label_scores(found, labels, multi_label=multi_label) if pairs else []

        task = RowTask("zero_shot", RowOptions, ENTAILMENT.outputs, read, takes_pairs=True)
        return task.of(pairs, options)

    @method
    def fill_mask(
        self, inputs: Inputs, **options: Unpack[MaskOptions]
    ) -> Asked[list[list[list[FilledToken]]]]:
        """Return the most likely tokens of each mask of each row, the most likely first.

        Args:
            inputs: texts or lists of token ids with 1 to 8 masks, such as "Paris is the [MASK] of France.".
        """
        return FILL_MASK.of(inputs, options)
