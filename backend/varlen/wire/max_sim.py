"""Scores of pairs by late interaction (MaxSim).

Queries and documents pass the model, and their scores are computed here.

A pair is no sequence of the model: its query and its document are two. Equal texts of a request run once.
Source: Khattab, Zaharia 2020, arXiv:2004.12832.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError
from varlen.intake.checks import Intake
from varlen.intake.tokenization import Text
from varlen.request.request import Float32Array, Output, Request, TokenizationTask
from varlen.request.row_parameters import NO_PREFIX, RowParameters, TextPrefix

# Outputs of pairs.
SCORES, LENGTHS = "scores", "num_tokens"


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """Pairs of a request, as the texts that pass the model.

    Attributes:
        rows: numbers of query and document of each row.
    """

    queries: Sequence[str]
    documents: Sequence[str]
    rows: Sequence[tuple[int, int]]
    names: frozenset[str]

    @classmethod
    def of(
        cls, pairs: Sequence[Text], requested: Collection[str], given: RowParameters
    ) -> "ScoredPairs":
        """Return the texts of pairs.

        Raises:
            RequestError: the request names no scores, or a prompt: each side has its own.
        """
        if SCORES not in requested:
            raise RequestError(
                f"the request has text_pair, whose answer is {SCORES}; name that output, or send text alone"
            )
        if given.prefix.given:
            raise RequestError(
                f"the request has {given.prefix.given[0]} and text_pair; text is a query and text_pair a document:"
                " leave it out"
            )
        sides = [
            dict.fromkeys(cast("tuple[str, str]", pair)[at] for pair in pairs) for at in (0, 1)
        ]
        queries, documents = ({text: at for at, text in enumerate(side)} for side in sides)
        rows = [
            (queries[query], documents[document])
            for query, document in cast("Sequence[tuple[str, str]]", pairs)
        ]
        return cls(tuple(queries), tuple(documents), rows, frozenset(requested))

    def steps(self, given: RowParameters, intake: Intake) -> tuple[TokenizationTask, ...]:
        steps: list[TokenizationTask] = []
        for name, texts in (("query", self.queries), ("document", self.documents)):
            # a model without roles reads both sides alike
            prefix = TextPrefix(name) if name in intake.roles.named else NO_PREFIX
            steps += intake.text_steps(
                texts,
                truncate=given.is_cut,
                side=given.truncation_side,
                max_tokens=given.truncate_prompt_tokens,
                prefix=prefix,
            )
        return tuple(steps)


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    """Makes the response to a request for scores of pairs."""

    pairs: ScoredPairs
    num_tokens: Sequence[int]
    streams: bool = field(default=False, init=False)

    @classmethod
    def to(cls, request: Request, pairs: ScoredPairs) -> "ScoreAnswer":
        return cls(pairs, [prompt.num_tokens for prompt in request.prompts])

    @property
    def num_bytes(self) -> int:
        return 4 * len(self.pairs.rows) * len(self.pairs.names & {SCORES, LENGTHS})

    def tensors(self, outputs: Sequence[tuple[int, Output]]) -> Mapping[str, npt.NDArray[Any]]:
        vectors = [
            cast(Float32Array, output) for _, output in sorted(outputs, key=lambda each: each[0])
        ]
        first = len(self.pairs.queries)
        found: dict[str, npt.NDArray[Any]] = {
            SCORES: np.array(
                [
                    max_sim(vectors[query], vectors[first + document])
                    for query, document in self.pairs.rows
                ],
                np.float32,
            )[:, None]
        }
        if LENGTHS in self.pairs.names:
            lengths = [
                self.num_tokens[query] + self.num_tokens[first + document]
                for query, document in self.pairs.rows
            ]
            found[LENGTHS] = np.array(lengths, np.int32)[:, None]
        return found


def max_sim(query: Float32Array, document: Float32Array) -> float:
    """Return MaxSim: the sum of the largest product of each vector of the query.

    Args:
        query, document: `[vectors, features]`; 0 if one has no vector.
    """
    if not len(query) or not len(document):
        return 0.0
    return float((query @ document.T).max(axis=1).sum(dtype=np.float64))
