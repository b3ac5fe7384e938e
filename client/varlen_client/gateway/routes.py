"""The table of routes: path, function that answers, and an example body of each.

A function gets the gateway and the body in its form. The example bodies are in the OpenAPI description and on the page
`/docs`. The page `/` and `varlen serve` try a model by the request of its task.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from varlen_client.gateway import embeddings, ranks, responses, tei, tokens
from varlen_client.gateway.generation import chat_completions, completions
from varlen_client.gateway.models import Gateway

_TEXTS = ["a cat sits on the mat", "a kitten rests on a rug"]
_QUERY = "Where does the cat sleep?"
_DOCUMENTS = ["The cat sleeps on the mat.", "Paris is the capital of France."]
_IDS = [101, 1037, 4937, 102]


@dataclass(frozen=True, slots=True)
class Route:
    """A route with a body.

    Attributes:
        answer: function of the gateway and the body; its docstring describes the route.
        example: a body that it takes.
    """

    path: str
    answer: Callable[..., Awaitable[Response]]
    example: Mapping[str, Any]
    tags: Sequence[str]

    def add_to(self, app: FastAPI, gateway: Gateway) -> None:
        """Add the route to an application."""
        signature = inspect.signature(self.answer, eval_str=True)

        async def endpoint(**given: Any) -> Response:
            return await self.answer(gateway, **given)

        # what the function takes besides the gateway
        endpoint.__signature__ = signature.replace(  # type: ignore[attr-defined]  # inspect's own hook
            parameters=list(signature.parameters.values())[1:]
        )
        content = {"application/json": {"example": self.example}}
        app.add_api_route(
            self.path,
            endpoint,
            methods=["POST"],
            name=self.answer.__name__,
            description=inspect.getdoc(self.answer),
            tags=list(self.tags),
            openapi_extra={"requestBody": {"content": content}},
        )


_TEI, _VLLM = ["Text Embeddings Inference"], ["vLLM"]
_RANKED = {"query": _QUERY, "documents": _DOCUMENTS}
_SCORED = {"text_1": _QUERY, "text_2": _DOCUMENTS}
_LABELLED = {
    "text": "Ada Lovelace lives in London; write to ada@example.com.",
    "labels": ["person", "city", "email"],
}
_SEARCHED = {"texts": _TEXTS, "input_type": "search_document"}

ROUTES: Sequence[Route] = (
    Route("/v1/embeddings", embeddings.embeddings, {"input": _TEXTS}, ["OpenAI"]),
    Route("/infinity/embeddings", embeddings.embed_as_infinity, {"input": _TEXTS}, ["Infinity"]),
    Route("/v1/embed", embeddings.embed_v1, _SEARCHED, ["Cohere"]),
    Route(
        "/v2/embed",
        embeddings.embed_v2,
        {**_SEARCHED, "embedding_types": ["float"]},
        ["Cohere"],
    ),
    Route("/rerank", ranks.rerank, {"query": _QUERY, "texts": _DOCUMENTS}, [*_TEI, "Rerank"]),
    Route("/v1/rerank", ranks.rank_documents, _RANKED, ["Rerank"]),
    Route("/v2/rerank", ranks.rank_as_cohere, _RANKED, ["Cohere", "Rerank"]),
    Route("/infinity/rerank", ranks.rank_as_infinity, _RANKED, ["Infinity"]),
    Route("/score", ranks.score, _SCORED, _VLLM),
    Route("/v1/score", ranks.score, _SCORED, _VLLM),
    Route("/classify", embeddings.classify, {"input": _TEXTS}, _VLLM),
    Route("/v1/classify", embeddings.classify, {"input": _TEXTS}, ["Dynamo"]),
    Route("/pooling", embeddings.pooling, {"input": _TEXTS}, _VLLM),
    Route("/v1/extract", embeddings.extract, _LABELLED, ["NeMo Guardrails"]),
    Route("/embed", tei.embed, {"inputs": _TEXTS}, _TEI),
    Route("/embed_sparse", tei.embed_sparse, {"inputs": _TEXTS}, _TEI),
    Route("/embed_all", tei.embed_all, {"inputs": _TEXTS}, _TEI),
    Route(
        "/similarity",
        tei.similarity,
        {"inputs": {"source_sentence": _TEXTS[0], "sentences": _TEXTS[1:]}},
        _TEI,
    ),
    Route("/predict", tei.predict, {"inputs": _TEXTS[0]}, _TEI),
    Route("/", tei.root, {"inputs": _TEXTS}, _TEI),
    Route(
        "/v2/models/{name}/infer",
        embeddings.infer,
        {"inputs": [{"name": "input_text", "datatype": "BYTES", "shape": [2], "data": _TEXTS}]},
        ["KServe"],
    ),
    Route("/v1/completions", completions, {"prompt": "The list of", "max_tokens": 40}, ["OpenAI"]),
    Route(
        "/v1/chat/completions",
        chat_completions,
        {"messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 40},
        ["OpenAI"],
    ),
    Route(
        "/v1/responses",
        responses.responses,
        {"input": "What is a list?", "max_output_tokens": 40},
        ["OpenAI"],
    ),
    Route("/tokenize", tokens.tokenize, {"inputs": _TEXTS}, ["Tokenizer"]),
    Route("/detokenize", tokens.detokenize, {"tokens": _IDS}, ["Tokenizer"]),
    Route("/decode", tokens.decode, {"ids": _IDS}, _TEI),
)
# The route of each task that has one, with a body that fits the task better than the route's.
_TRIED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "embed": ("/v1/embeddings", {}),
    "sparse_embed": ("/embed_sparse", {"inputs": _TEXTS[0]}),
    "token_embed": ("/embed_all", {"inputs": _TEXTS[0]}),
    "hidden": ("/embed_all", {"inputs": _TEXTS[0]}),
    "classify": ("/predict", {"inputs": "I like this very much."}),
    "rerank": ("/v1/rerank", {}),
    "extract": ("/v1/extract", {}),
    "question_answer": ("/", {"inputs": {"question": _QUERY, "context": _DOCUMENTS[0]}}),
    "token_classify": ("/pooling", {"input": "Ada Lovelace lived in London."}),
    "generate": ("/v1/completions", {}),
    "chat": ("/v1/chat/completions", {}),
    "translate": ("/v1/completions", {"prompt": "the 3rd of March, 2021"}),
}


@dataclass(frozen=True, slots=True)
class Example:
    """A request for models of one task, without the model's name."""

    path: str
    body: Mapping[str, Any]


# By task, and of models that chat "chat"; tasks without a route have none.
_EXAMPLES = {route.path: route.example for route in ROUTES}
EXAMPLES_BY_TASK: Mapping[str, Example] = {
    task: Example(path, {**_EXAMPLES[path], **own}) for task, (path, own) in _TRIED.items()
}
