"""Scores of pairs of texts: `/rerank` of five interfaces, and vLLM's `/v1/score`."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field, StrictStr
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import (
    MAX_INPUTS,
    Fields,
    InstructionFields,
    ListOf,
    OpenAIBody,
    RequestBody,
    check_repeated,
    given_options,
)
from varlen_client.gateway.json_io import json_response, listed, usage_of
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.unserved_fields import RANKS
from varlen_client.tasks.labels import RANK, RERANK
from varlen_client.tasks.vectors import EMBED
from varlen_client.wire import Floats, ModelInfo, query_and_documents

_OneOrMore: TypeAlias = StrictStr | ListOf[StrictStr]
# Task of models that score by MaxSim.
_LATE = "token_embed"
# The names of each side of a pair.
_SIDES = (("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2"))


class Document(Fields):
    """A document in the form of an object."""

    noun = "document"

    text: StrictStr


_Documents: TypeAlias = ListOf[StrictStr | Document]


class RankBody(RequestBody, InstructionFields):
    """What all requests for ranks have."""

    unserved = RANKS

    query: StrictStr
    top_n: int | None = Field(default=None, ge=0)
    """0 is every document, as by vLLM."""
    raw_scores: bool = False
    use_activation: bool = True
    """vLLM's opposite of `raw_scores`."""

    async def rank(
        self, gateway: Gateway, documents: _Documents
    ) -> tuple[str, list[tuple[int, float, str]], int | None]:
        """Return the model's name, the first `top_n` texts with numbers and scores, and the tokens."""
        texts = [each if isinstance(each, str) else each.text for each in documents]
        instruction = self.instruction_option()
        asked = "".join([self.query, *instruction.values()])
        check_repeated("query", asked, len(texts))
        activation = "sigmoid" if self.use_activation and not self.raw_scores else "none"
        info = await gateway.info(self.model)
        if info.known_task == _LATE:
            _check_no_activation(info, "use_activation" in self.model_fields_set and activation)
        else:
            instruction = {**instruction, "activation": activation}
        name, ranking, tokens = await gateway.answer(
            self.model,
            RANK,
            query_and_documents(self.query, texts),
            text_fields=self,
            **instruction,
        )
        best_first = ranking.best_first[: self.top_n or None].tolist()
        found = [(index, float(ranking.scores[index]), texts[index]) for index in best_first]
        return name, found, tokens


class RankDocumentsBody(RankBody):
    """A request to `/v1/rerank`, the form of Cohere, Jina and vLLM."""

    documents: _Documents = Field(min_length=1, max_length=MAX_INPUTS)
    return_documents: bool = True


class RankIndicesBody(RankDocumentsBody):
    """A request to `/v2/rerank` of Cohere or `/infinity/rerank`: by default without documents, which are cut."""

    is_cut_by_default = True

    return_documents: bool = False


class RerankBody(RankBody):
    """A request to `/rerank`: `texts` as by TEI, or `documents` as in `/v1/rerank`."""

    texts: _Documents | None = Field(default=None, min_length=1, max_length=MAX_INPUTS)
    return_text: bool = False
    documents: _Documents | None = Field(default=None, min_length=1, max_length=MAX_INPUTS)
    return_documents: bool = True

    @property
    def is_cut_by_default(self) -> bool:  # type: ignore[override]  # a form of its own decides
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
        own, option, other = (
            ("texts", "return_text", "return_documents")
            if self.documents is None
            else ("documents", "return_documents", "return_text")
        )
        if other in self.model_fields_set:
            raise InvalidRequest(f"the request has {own} and {other}; send {option}")


async def rerank(gateway: Gateway, body: RerankBody) -> Response:
    """Rank `texts` by a query as TEI does, or `documents` as `/v1/rerank` does."""
    body.check_form()
    if body.documents is not None:
        return await _results(gateway, body, body.documents, body.return_documents)
    _, ranks, _ = await body.rank(gateway, body.texts or [])
    return json_response(
        [
            {"index": index, "score": score} | ({"text": text} if body.return_text else {})
            for index, score, text in ranks
        ]
    )


async def rank_documents(gateway: Gateway, body: RankDocumentsBody) -> Response:
    """Rank documents by a query, the best first; `top_n` keeps the first of them."""
    return await _results(gateway, body, body.documents, body.return_documents)


async def rank_as_cohere(gateway: Gateway, body: RankIndicesBody) -> Response:
    """Rank documents as `/v1/rerank` does; without the documents, unless `return_documents` is true."""
    return await _results(gateway, body, body.documents, body.return_documents)


async def rank_as_infinity(gateway: Gateway, body: RankIndicesBody) -> Response:
    """Rank documents as `/v2/rerank` does; documents of the answer are strings."""
    return await _results(gateway, body, body.documents, body.return_documents, form=str)


async def _results(
    gateway: Gateway,
    body: RankBody,
    documents: _Documents,
    return_documents: bool,
    *,
    form: Callable[[str], Any] = lambda text: {"text": text},
) -> Response:
    """Return the answer in Cohere's form; `form` is the form of its documents."""
    name, ranks, tokens = await body.rank(gateway, documents)
    results = [
        {"index": index, "relevance_score": score}
        | ({"document": form(text)} if return_documents else {})
        for index, score, text in ranks
    ]
    answer = {"id": f"rerank-{uuid.uuid4().hex}", "model": name, "results": results}
    return json_response(answer | usage_of(tokens))


class ScoreBody(OpenAIBody, InstructionFields):
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

    def _side(self, *names: str) -> tuple[str, list[str]]:
        """Return the name of a side that the request has, and its texts."""
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else f"no {names[0]}"
            raise InvalidRequest(f"the request has {found}; send {names[0]}")
        texts = getattr(self, given[0])
        return given[0], [texts] if isinstance(texts, str) else texts


async def score(gateway: Gateway, body: ScoreBody) -> Response:
    """Score pairs of texts: with a reranker, by cosines of embeddings, or by MaxSim."""
    first, second = body.sides()
    info = await gateway.info(body.model)
    salt = given_options(cache_salt=body.cache_salt)
    instruction = body.instruction_option()
    scores: npt.NDArray[np.floating[Any]]
    if "sentence_embedding" in info.outputs and not info.labels_texts:
        if body.use_activation is not None:
            raise InvalidRequest(
                f"model {info.name!r} gives embeddings, whose cosine has no activation;"
                " leave use_activation out"
            )
        if instruction:
            raise InvalidRequest(
                f"model {info.name!r} gives embeddings, whose documents have no instruction; write to /v1/embeddings"
                " for the queries"
            )
        rows = {text: row for row, text in enumerate(dict.fromkeys([*first, *second]))}
        name, vectors, tokens = await gateway.answer(
            body.model, EMBED, list(rows), text_fields=body, normalize=True, **salt
        )
        scores = cosines(*(vectors[[rows[text] for text in side]] for side in (first, second)))
    else:
        pairs = list(zip(first, second, strict=True))
        activation = None if body.use_activation is False else "sigmoid"
        if info.known_task == _LATE:
            _check_no_activation(info, body.use_activation and activation)
            activation = None
        name, scores, tokens = await gateway.answer(
            body.model,
            RERANK,
            pairs,
            text_fields=body,
            activation=activation,
            **salt,
            **instruction,
        )
    data = (
        {"index": index, "object": "score", "score": value}
        for index, value in enumerate(scores.tolist())
    )
    return listed(name, data, tokens, prefix="score")


def _check_no_activation(info: ModelInfo, activation: object) -> None:
    """Raise InvalidRequest if an activation of MaxSim is asked for."""
    if activation == "sigmoid":
        raise InvalidRequest(
            f"model {info.name!r} scores by MaxSim, a sum of products without an activation; leave use_activation out"
        )


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
