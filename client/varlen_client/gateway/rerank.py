"""Ranks of documents: `/rerank` of Text Embeddings Inference, Cohere, Jina, vLLM and Infinity."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, TypeAlias

from fastapi import FastAPI
from pydantic import Field, StrictStr
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import (
    MAX_INPUTS,
    Fields,
    ListOf,
    RequestBody,
    check_repeated,
    usage,
)
from varlen_client.gateway.json_writing import json_response
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.text_fields import TextFields
from varlen_client.gateway.unserved_fields import RANKS
from varlen_client.tasks import RANK
from varlen_client.wire import query_and_documents


class Document(Fields):
    """A document in the form of an object."""

    noun = "document"

    text: StrictStr


_Documents: TypeAlias = ListOf[StrictStr | Document]


class RankBody(RequestBody, TextFields):
    """What all requests for ranks have."""

    unserved = RANKS

    query: StrictStr
    top_n: int | None = Field(default=None, ge=0)
    """0 is every document, as by vLLM."""
    raw_scores: bool = False
    use_activation: bool = True
    """vLLM's opposite of `raw_scores`."""


class RankDocumentsBody(RankBody):
    """A request to `/v1/rerank`, the form of Cohere, Jina and vLLM."""

    documents: _Documents = Field(min_length=1, max_length=MAX_INPUTS)
    return_documents: bool = True


class RankIndicesBody(RankDocumentsBody):
    """A request to `/v2/rerank` of Cohere or `/infinity/rerank`: by default without documents, which are cut."""

    return_documents: bool = False

    @property
    def is_cut_by_default(self) -> bool:
        """Whether texts are cut if nothing says it: Cohere and Infinity cut them."""
        return True


class RerankBody(RankBody):
    """A request to `/rerank`: `texts` as by TEI, or `documents` as in `/v1/rerank`."""

    texts: _Documents | None = Field(default=None, min_length=1, max_length=MAX_INPUTS)
    return_text: bool = False
    documents: _Documents | None = Field(default=None, min_length=1, max_length=MAX_INPUTS)
    return_documents: bool = True

    @property
    def is_cut_by_default(self) -> bool:
        """Whether texts are cut if nothing says it: in the form of TEI."""
        return self.texts is not None

    def check_form(self) -> None:
        """Raise InvalidRequest unless the request has one of the two forms."""
        if (self.texts is None) == (self.documents is None):
            found = "neither texts nor" if self.texts is None else "texts and"
            raise InvalidRequest(
                f"the request has {found} documents; send texts for an answer in the form of TEI,"
                " or documents for the form of Cohere"
            )
        other = "return_documents" if self.documents is None else "return_text"
        if other in self.model_fields_set:
            own, option = (
                ("texts", "return_text")
                if self.documents is None
                else ("documents", "return_documents")
            )
            raise InvalidRequest(f"the request has {own} and {other}; send {option}")


def add_rerank_routes(app: FastAPI, gateway: Gateway) -> None:
    """Add the routes of ranks."""

    @app.post("/rerank", tags=["Text Embeddings Inference", "Rerank"])
    async def rerank(body: RerankBody) -> Response:
        """Rank `texts` by a query as TEI does, or `documents` as `/v1/rerank` does."""
        return await rerank_as_tei(gateway, body)

    @app.post("/v1/rerank", tags=["Rerank"])
    async def rank_documents(body: RankDocumentsBody) -> Response:
        """Rank documents by a query, the best first; `top_n` keeps the first of them."""
        return await _results(gateway, body, body.documents, body.return_documents)

    @app.post("/v2/rerank", tags=["Cohere", "Rerank"])
    async def rank_as_cohere(body: RankIndicesBody) -> Response:
        """Rank documents as `/v1/rerank` does; without the documents, unless `return_documents` is true."""
        return await _results(gateway, body, body.documents, body.return_documents)

    @app.post("/infinity/rerank", tags=["Infinity"])
    async def rank_as_infinity(body: RankIndicesBody) -> Response:
        """Rank documents as `/v2/rerank` does; documents of the answer are strings."""
        return await _results(
            gateway, body, body.documents, body.return_documents, form=lambda text: text
        )


async def rerank_as_tei(gateway: Gateway, body: RerankBody) -> Response:
    """Return the answer of `/rerank`."""
    body.check_form()
    if body.documents is not None:
        return await _results(gateway, body, body.documents, body.return_documents)
    assert body.texts is not None
    texts = _texts(body.texts)
    _, ranks, _ = await _rank(gateway, body, texts)
    return json_response(
        [
            {"index": index, "score": score} | ({"text": texts[index]} if body.return_text else {})
            for index, score in ranks
        ]
    )


async def _rank(
    gateway: Gateway, body: RankBody, texts: list[str]
) -> tuple[str, list[tuple[int, float]], int | None]:
    """Return the model's name, the first `top_n` texts by number with scores, and the tokens."""
    check_repeated("query", body.query, len(texts))
    name, ranking, tokens = await gateway.answer(
        body.model,
        RANK,
        query_and_documents(body.query, texts),
        text_fields=body,
        activation="sigmoid" if body.use_activation and not body.raw_scores else "none",
    )
    best_first = ranking.best_first[: body.top_n or None].tolist()
    return name, [(index, float(ranking.scores[index])) for index in best_first], tokens


async def _results(
    gateway: Gateway,
    body: RankBody,
    documents: _Documents,
    return_documents: bool,
    *,
    form: Callable[[str], Any] = lambda text: {"text": text},
) -> Response:
    """Return the answer in Cohere's form; `form` is the form of its documents."""
    texts = _texts(documents)
    name, ranks, tokens = await _rank(gateway, body, texts)
    results = [
        {"index": index, "relevance_score": score}
        | ({"document": form(texts[index])} if return_documents else {})
        for index, score in ranks
    ]
    answer: dict[str, Any] = {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": name,
        "results": results,
    }
    return json_response(answer if tokens is None else {**answer, "usage": usage(tokens)})


def _texts(documents: _Documents) -> list[str]:
    return [each if isinstance(each, str) else each.text for each in documents]
