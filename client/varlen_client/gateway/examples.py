"""An example body of each route, and a request of each task.

The bodies are in the OpenAPI description and on the page `/docs`. The page `/` and `varlen serve` try a model by the
request of its task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

_TEXTS = ["a cat sits on the mat", "a kitten rests on a rug"]
_QUERY = "Where does the cat sleep?"
_DOCUMENTS = ["The cat sleeps on the mat.", "Paris is the capital of France."]
_IDS = [101, 1037, 4937, 102]

_EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "/": {"inputs": _TEXTS},
    "/v1/embeddings": {"input": _TEXTS},
    "/v1/embed": {"texts": _TEXTS, "input_type": "search_document"},
    "/v2/embed": {"texts": _TEXTS, "input_type": "search_document", "embedding_types": ["float"]},
    "/infinity/embeddings": {"input": _TEXTS},
    "/v2/models/{name}/infer": {
        "inputs": [{"name": "input_text", "datatype": "BYTES", "shape": [2], "data": _TEXTS}]
    },
    "/embed": {"inputs": _TEXTS},
    "/embed_sparse": {"inputs": _TEXTS},
    "/embed_all": {"inputs": _TEXTS},
    "/similarity": {"inputs": {"source_sentence": _TEXTS[0], "sentences": _TEXTS[1:]}},
    "/rerank": {"query": _QUERY, "texts": _DOCUMENTS},
    "/v1/rerank": {"query": _QUERY, "documents": _DOCUMENTS},
    "/v2/rerank": {"query": _QUERY, "documents": _DOCUMENTS},
    "/infinity/rerank": {"query": _QUERY, "documents": _DOCUMENTS},
    "/score": {"text_1": _QUERY, "text_2": _DOCUMENTS},
    "/v1/score": {"text_1": _QUERY, "text_2": _DOCUMENTS},
    "/predict": {"inputs": _TEXTS[0]},
    "/classify": {"input": _TEXTS},
    "/pooling": {"input": _TEXTS},
    "/v1/completions": {"prompt": "The list of", "max_tokens": 40},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "What is a list?"}],
        "max_tokens": 40,
    },
    "/tokenize": {"inputs": _TEXTS},
    "/detokenize": {"tokens": _IDS},
    "/decode": {"ids": _IDS},
}
# The route of each task that has one, with a body that fits the task better than the route's.
_TRIED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "embed": ("/v1/embeddings", {}),
    "sparse_embed": ("/embed_sparse", {"inputs": _TEXTS[0]}),
    "token_embed": ("/embed_all", {"inputs": _TEXTS[0]}),
    "hidden": ("/embed_all", {"inputs": _TEXTS[0]}),
    "classify": ("/predict", {"inputs": "I like this very much."}),
    "rerank": ("/v1/rerank", {}),
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
EXAMPLES_BY_TASK: Mapping[str, Example] = {
    task: Example(path, {**_EXAMPLES[path], **own}) for task, (path, own) in _TRIED.items()
}


def add_examples(app: FastAPI) -> None:
    """Add its example to each route that has a body."""
    for route in app.routes:
        if isinstance(route, APIRoute) and "POST" in (route.methods or ()):
            content = {"application/json": {"example": _EXAMPLES[route.path]}}
            route.openapi_extra = {"requestBody": {"content": content}}
