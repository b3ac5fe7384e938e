"""Scores of classifiers: `/v1/rerank`, and `/rerank` and `/predict` of Text Embeddings Inference."""

from __future__ import annotations

import uuid
from typing import Any, TypeAlias

import numpy as np
from fastapi import FastAPI
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictInt, StrictStr
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import MAX_INPUTS, RequestBody, json_response, usage
from varlen_client.gateway.embeddings import Direction, text_options
from varlen_client.gateway.models import Gateway
from varlen_client.tasks import PREDICT, RERANK
from varlen_client.wire import Pairs, query_and_documents

_Row: TypeAlias = list[StrictStr]


class ScoreBody(RequestBody):
    """What all these requests have."""

    raw_scores: bool = False
    truncate: bool = False
    truncation_direction: Direction = "right"

    def options(self) -> dict[str, Any]:
        """Return the client's arguments for the truncation of texts."""
        return text_options(None, truncate=self.truncate, side=self.truncation_direction)


class RerankBody(ScoreBody):
    """A request to `/rerank`."""

    query: StrictStr
    texts: list[StrictStr] = Field(
        min_length=1, max_length=MAX_INPUTS, validation_alias=AliasChoices("texts", "documents")
    )
    return_text: bool = False


class PredictBody(ScoreBody):
    """A request to `/predict`: a text, a pair, or a batch of either."""

    inputs: StrictStr | _Row | list[_Row]


class Document(BaseModel):
    """A document of `/v1/rerank` in the form of an object."""

    model_config = ConfigDict(extra="forbid")

    text: StrictStr


class RankDocumentsBody(ScoreBody):
    """A request to `/v1/rerank`, the form of Cohere, Jina and vLLM."""

    query: StrictStr
    documents: list[StrictStr | Document] = Field(min_length=1, max_length=MAX_INPUTS)
    top_n: StrictInt | None = Field(None, ge=1)
    return_documents: bool = True


def add_score_routes(app: FastAPI, gateway: Gateway) -> None:
    """Add the routes of scores."""

    async def rank(
        body: RerankBody | RankDocumentsBody, texts: list[str]
    ) -> tuple[str, list[tuple[int, float]], int | None]:
        """Return the model's name, texts by number with scores, best first, and the tokens."""
        name, scores, tokens = await gateway.answer(
            body.model,
            RERANK,
            query_and_documents(body.query, texts),
            activation=None if body.raw_scores else "sigmoid",
            **body.options(),
        )
        best_first = np.argsort(-scores, kind="stable").tolist()
        return name, [(index, float(scores[index])) for index in best_first], tokens

    @app.post("/rerank", tags=["Text Embeddings Inference"])
    async def rerank(body: RerankBody) -> Response:
        """Rank texts by a query, the best first."""
        _, ranks, _ = await rank(body, body.texts)
        return json_response(
            [
                {"index": index, "score": score}
                | ({"text": body.texts[index]} if body.return_text else {})
                for index, score in ranks
            ]
        )

    @app.post("/v1/rerank", tags=["Rerank"])
    @app.post("/v2/rerank", tags=["Rerank"])
    async def rank_documents(body: RankDocumentsBody) -> Response:
        """Rank documents by a query, the best first; `top_n` keeps the first of them."""
        texts = [each if isinstance(each, str) else each.text for each in body.documents]
        name, ranks, tokens = await rank(body, texts)
        results = [
            {"index": index, "relevance_score": score}
            | ({"document": {"text": texts[index]}} if body.return_documents else {})
            for index, score in ranks[: body.top_n]
        ]
        answer: dict[str, Any] = {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": name,
            "results": results,
        }
        return json_response(answer if tokens is None else {**answer, "usage": usage(tokens)})

    @app.post("/predict", tags=["Text Embeddings Inference"])
    async def predict(body: PredictBody) -> Response:
        """Classify texts; the answer has all labels with their scores, the best first."""
        rows, is_batch = _rows(body.inputs)
        _, found, _ = await gateway.answer(
            body.model,
            PREDICT,
            rows,
            activation="none" if body.raw_scores else "auto",
            **body.options(),
        )
        answer = [[{"score": each.score, "label": each.label} for each in row] for row in found]
        return json_response(answer if is_batch else answer[0])


def _rows(inputs: str | _Row | list[_Row]) -> tuple[list[str] | Pairs, bool]:
    """Return the texts or pairs of a request, and whether they are a batch.

    Raises:
        InvalidRequest: there are more than MAX_INPUTS rows, a row has neither one nor two texts, or only some rows
            are pairs.
    """
    if isinstance(inputs, str):
        return [inputs], False
    is_batch = bool(inputs) and isinstance(inputs[0], list)
    batch: list[_Row] = inputs if is_batch else [inputs]  # type: ignore[assignment,list-item]
    if len(batch) > MAX_INPUTS:
        raise InvalidRequest(f"inputs has {len(batch)} rows; allowed: 1 to {MAX_INPUTS}")
    sizes = {len(row) for row in batch}
    if sizes == {1}:
        return [row[0] for row in batch], is_batch
    if sizes == {2}:
        return [(row[0], row[1]) for row in batch], is_batch
    raise InvalidRequest(
        f"inputs has rows of {sorted(sizes)} texts; allowed: one text in each row, or two"
    )
