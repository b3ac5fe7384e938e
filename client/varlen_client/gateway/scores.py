"""`/v1/score` of vLLM: one score for each pair of texts."""

from __future__ import annotations

import time
import uuid
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI
from pydantic import StrictStr
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import (
    MAX_INPUTS,
    ListOf,
    OpenAIBody,
    check_repeated,
    usage,
)
from varlen_client.gateway.json_writing import json_response
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.text_fields import TextFields, given_options
from varlen_client.gateway.unserved_fields import RANKS
from varlen_client.tasks import EMBED, RERANK
from varlen_client.wire import Floats

_OneOrMore: TypeAlias = StrictStr | ListOf[StrictStr]

# The names of each side.
_SIDES = (("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2"))


class ScoreBody(OpenAIBody, TextFields):
    """A request to `/v1/score`: a text with one or several, or lists of equal length."""

    unserved = RANKS

    text_1: _OneOrMore | None = None
    text_2: _OneOrMore | None = None
    queries: _OneOrMore | None = None
    documents: _OneOrMore | None = None
    items: _OneOrMore | None = None
    data_1: _OneOrMore | None = None
    data_2: _OneOrMore | None = None
    use_activation: bool | None = None
    """false returns the logits of a reranker."""
    cache_salt: StrictStr | None = None

    def sides(self) -> tuple[list[str], list[str]]:
        """Return the texts of both sides, as many on each.

        Raises:
            InvalidRequest: a side is missing or has two names, or their numbers do not fit.
        """
        (one, first), (other, second) = (self._side(*names) for names in _SIDES)
        if len(first) not in (1, len(second)) or not 1 <= len(second) <= MAX_INPUTS:
            raise InvalidRequest(
                f"{one} has {len(first)} texts and {other} {len(second)}; allowed: one text in {one},"
                f" or as many as in {other}, which has 1 to {MAX_INPUTS}"
            )
        if len(first) < len(second):
            check_repeated(one, first[0], len(second))
            first = first * len(second)
        return first, second

    def salt(self) -> dict[str, str]:
        """Return the client's argument for the salt of the caches."""
        return given_options(cache_salt=self.cache_salt)

    def _side(self, *names: str) -> tuple[str, list[str]]:
        """Return the name of a side that the request has, and its texts."""
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else f"no {names[0]}"
            raise InvalidRequest(f"the request has {found}; send {names[0]}")
        texts = getattr(self, given[0])
        return given[0], [texts] if isinstance(texts, str) else texts


def cosines(left: Floats, right: Floats) -> npt.NDArray[np.float64]:
    """Return the cosine of each pair of vectors, [rows]; 0 with a vector of zeros.

    Computed in fp64, so that equal vectors have 1.0: their lengths in fp32 are not exactly 1.

    Args:
        left, right: [rows, features], or one vector that all of the other are compared with.
    """
    left, right = np.atleast_2d(left).astype(np.float64), np.atleast_2d(right).astype(np.float64)
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    products = np.einsum("rf,rf->r", *np.broadcast_arrays(left, right))
    found: npt.NDArray[np.float64] = np.clip(products / np.where(lengths == 0, 1, lengths), -1, 1)
    return found


def add_score_routes(app: FastAPI, gateway: Gateway) -> None:
    """Add the routes of scores."""

    async def compare(
        body: ScoreBody, first: list[str], second: list[str]
    ) -> tuple[str, npt.NDArray[np.floating[Any]], int | None]:
        """Return the model's name, the cosine of each pair, and the number of tokens."""
        texts = list(dict.fromkeys([*first, *second]))
        place = {text: index for index, text in enumerate(texts)}
        name, vectors, tokens = await gateway.answer(
            body.model, EMBED, texts, text_fields=body, normalize=True, **body.salt()
        )
        left, right = (vectors[[place[text] for text in side]] for side in (first, second))
        return name, cosines(left, right), tokens

    @app.post("/v1/score", tags=["vLLM"])
    @app.post("/score", tags=["vLLM"])
    async def score(body: ScoreBody) -> Response:
        """Score pairs of texts: with a reranker, or by the cosine of their embeddings."""
        first, second = body.sides()
        info = await gateway.info(body.model)
        if "sentence_embedding" in info.outputs:
            if body.use_activation is not None:
                raise InvalidRequest(
                    f"model {info.name!r} gives embeddings, whose cosine has no activation;"
                    " leave use_activation out"
                )
            name, scores, tokens = await compare(body, first, second)
        else:
            name, scores, tokens = await gateway.answer(
                body.model,
                RERANK,
                list(zip(first, second, strict=True)),
                text_fields=body,
                activation=None if body.use_activation is False else "sigmoid",
                **body.salt(),
            )
        answer: dict[str, Any] = {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": name,
            "data": [
                {"index": index, "object": "score", "score": value}
                for index, value in enumerate(scores.tolist())
            ],
        }
        return json_response(answer if tokens is None else {**answer, "usage": usage(tokens)})
