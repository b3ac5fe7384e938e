"""Scores of classifiers: `/rerank` and `/predict` of Text Embeddings Inference."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from fastapi import FastAPI
from pydantic import Field, StrictStr
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import MAX_INPUTS, RequestBody, json_response
from varlen_client.gateway.embeddings import Direction, truncation
from varlen_client.gateway.models import Gateway
from varlen_client.wire import Pairs

_Row: TypeAlias = list[StrictStr]


class ScoreBody(RequestBody):
    """What both requests have."""

    raw_scores: bool = False
    truncate: bool = False
    truncation_direction: Direction = "right"


class RerankBody(ScoreBody):
    """A request to `/rerank`."""

    query: StrictStr
    texts: list[StrictStr] = Field(min_length=1, max_length=MAX_INPUTS)
    return_text: bool = False


class PredictBody(ScoreBody):
    """A request to `/predict`: a text, a pair, or a batch of either."""

    inputs: StrictStr | _Row | list[_Row]


def add_score_routes(app: FastAPI, gateway: Gateway) -> None:
    """Add the routes of scores."""

    @app.post("/rerank", tags=["Text Embeddings Inference"])
    async def rerank(body: RerankBody) -> Response:
        """Rank texts by a query, the best first."""
        model = await gateway.models.get(body.model)
        scores, tokens = await model.client.rerank_and_count(
            body.query,
            body.texts,
            activation=None if body.raw_scores else "sigmoid",
            timeout=gateway.settings.timeout_seconds,
            **truncation(truncate=body.truncate, direction=body.truncation_direction),
        )
        gateway.metrics.count_tokens(tokens or 0)
        ranks = [
            {"index": int(index), "score": float(scores[index])}
            | ({"text": body.texts[index]} if body.return_text else {})
            for index in np.argsort(-scores, kind="stable")
        ]
        return json_response(ranks)

    @app.post("/predict", tags=["Text Embeddings Inference"])
    async def predict(body: PredictBody) -> Response:
        """Classify texts; the answer has all labels with their scores, the best first."""
        rows, is_batch = _rows(body.inputs)
        model = await gateway.models.get(body.model)
        found, tokens = await model.client.predict_and_count(
            rows,
            activation="none" if body.raw_scores else "auto",
            timeout=gateway.settings.timeout_seconds,
            **truncation(truncate=body.truncate, direction=body.truncation_direction),
        )
        gateway.metrics.count_tokens(tokens or 0)
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
