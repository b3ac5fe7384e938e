"""Labels and scores of texts and pairs: `classify`, `predict`, `rerank` and `zero_shot`."""

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
from varlen_client.tasks.zero_shot import (
    DEFAULT_TEMPLATE,
    Entailment,
    LabelScore,
    hypotheses,
    label_scores,
    parse_labels,
    read_entailment,
)
from varlen_client.wire import Floats, Inputs, Pairs, query_and_documents

Activation: TypeAlias = Literal["auto", "softmax", "sigmoid", "none"]

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


# Its rows are pairs of a text and a hypothesis; see zero_shot.py.
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


class LabelMethods:
    """Methods for labels and scores of texts and pairs."""

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
