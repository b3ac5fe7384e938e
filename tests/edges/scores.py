"""Edge cases of scores: their order, and cosines to the last digit."""

from __future__ import annotations

from typing import Any

from tests.edges.case import Edge, Holds, Same

_DOCUMENTS = [
    "the cat sits on the mat",
    "a cat",
    ".",
    "stocks fell on Monday",
    "the cat sits on the mat",
    "zebra",
]


def _is_one(answer: Any) -> None:
    values = [each["score"] for each in answer["data"]] if isinstance(answer, dict) else answer
    assert all(abs(value - 1) < 1e-12 for value in values), values


EDGES = (
    Edge(
        name="texts are ranked by their logits, as without an activation",
        route="/rerank",
        body={"query": "cat", "texts": _DOCUMENTS},
        right=Same(
            {"query": "cat", "texts": _DOCUMENTS, "raw_scores": True}, without=frozenset({"score"})
        ),
        source="sigmoid is monotone",
        role="ranker",
    ),
    Edge(
        name="documents are ranked by their logits, as without an activation",
        route="/v1/rerank",
        body={"query": "cat", "documents": _DOCUMENTS},
        right=Same(
            {"query": "cat", "documents": _DOCUMENTS, "raw_scores": True},
            without=frozenset({"relevance_score"}),
        ),
        source="sigmoid is monotone",
        role="ranker",
    ),
    Edge(
        name="a text and itself have the cosine 1",
        route="/v1/score",
        body={"text_1": "the cat", "text_2": ["the cat", "the cat"]},
        right=Holds(_is_one),
        source="definition of the cosine",
    ),
    Edge(
        name="a sentence and itself have the similarity 1",
        route="/similarity",
        body={"inputs": {"source_sentence": "the cat", "sentences": ["the cat"]}},
        right=Holds(_is_one),
        source="definition of the cosine",
    ),
)
