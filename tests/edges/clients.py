"""Bodies as clients of the originals send them: served, ignored or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.edges.case import Edge, Refused, Right, Same

TEXTS = ["the cat sleeps", "a river runs to the sea"]
QUERY = "where is the cat?"
_RAGFLOW = "infiniflow/ragflow, rag/llm, 2025"
_DIFY = "langgenius/dify-plugin-sdks, interfaces/model/openai_compatible, 2026"
_VLLM = "vLLM 0.15, entrypoints/pooling: extra fields are ignored, values are read by pydantic"
_TEI = "text-embeddings-inference 1.9, router/src/http/types.rs: serde ignores unknown fields"
_VOYAGE = "Voyage AI API reference, 2026"
_JINA = "Jina AI API reference, 2026"

# A body of each route that reads rows, with its role.
_BODIES: Mapping[str, tuple[dict[str, Any], str]] = {
    "/v1/embeddings": ({"input": TEXTS}, "embedder"),
    "/infinity/embeddings": ({"input": TEXTS}, "embedder"),
    "/v1/embed": ({"texts": TEXTS}, "embedder"),
    "/v2/embed": ({"texts": TEXTS, "input_type": "search_document"}, "embedder"),
    "/rerank": ({"query": QUERY, "texts": TEXTS}, "ranker"),
    "/v1/rerank": ({"query": QUERY, "documents": TEXTS}, "ranker"),
    "/v2/rerank": ({"query": QUERY, "documents": TEXTS}, "ranker"),
    "/infinity/rerank": ({"query": QUERY, "documents": TEXTS}, "ranker"),
    "/v1/score": ({"text_1": QUERY, "text_2": TEXTS}, "ranker"),
    "/score": ({"text_1": QUERY, "text_2": TEXTS}, "ranker"),
    "/classify": ({"input": TEXTS}, "classifier"),
    "/pooling": ({"input": TEXTS}, "embedder"),
    "/embed": ({"inputs": TEXTS}, "embedder"),
    "/embed_sparse": ({"inputs": TEXTS}, "sparse"),
    "/embed_all": ({"inputs": TEXTS}, "tokens"),
    "/similarity": ({"inputs": {"source_sentence": QUERY, "sentences": TEXTS}}, "embedder"),
    "/predict": ({"inputs": [[text] for text in TEXTS]}, "classifier"),
    "/": ({"inputs": TEXTS}, "embedder"),
    "/tokenize": ({"inputs": TEXTS}, "embedder"),
}


def _row(name: str, route: str, fields: dict[str, Any], right: Right | None, source: str) -> Edge:
    """Return the case of a body with other fields, which by default change nothing."""
    body, role = _BODIES[route]
    return Edge(
        name=name,
        route=route,
        body=body | fields,
        right=right or Same(body),
        source=source,
        role=role,
    )


def _refused(*words: str) -> Refused:
    return Refused(400, words)


_UNKNOWN = [
    _row(
        f"an unknown field of {route} changes nothing",
        route,
        {"drop_params": True, "extra": {"id": 1}},
        None,
        "vLLM, TEI and Infinity ignore it",
    )
    for route in _BODIES
]

_IGNORED = [
    _row(
        "RAGFlow: drop_params",
        "/v1/embeddings",
        {"encoding_format": "float", "drop_params": True},
        None,
        _RAGFLOW,
    ),
    _row(
        "RAGFlow: encoding_type of Jina",
        "/v1/embeddings",
        {"encoding_type": "float"},
        None,
        _RAGFLOW,
    ),
    _row(
        "RAGFlow: return_documents as a text",
        "/v1/rerank",
        {"return_documents": "true", "return_len": "true"},
        None,
        _RAGFLOW,
    ),
    _row(
        "RAGFlow: fields of SiliconFlow",
        "/v1/rerank",
        {"top_n": 2, "max_chunks_per_doc": 1024, "overlap_tokens": 80},
        None,
        _RAGFLOW,
    ),
    _row(
        "Dify: user and format",
        "/v1/embeddings",
        {"user": "abc-123", "encoding_format": "float"},
        None,
        _DIFY,
    ),
    _row(
        "Dify: top_n is null", "/v1/rerank", {"top_n": None, "return_documents": True}, None, _DIFY
    ),
    _row(
        "Voyage: fields that ask for nothing",
        "/v1/embeddings",
        {"input_type": None, "output_dtype": "float", "truncation": True},
        None,
        _VOYAGE,
    ),
    _row(
        "Jina: fields that ask for nothing",
        "/v1/embeddings",
        {"embedding_type": "float", "late_chunking": False, "normalized": True},
        None,
        _JINA,
    ),
    _row(
        "Jina: the task of queries",
        "/v1/embeddings",
        {"task": "retrieval.query"},
        Same({"input": TEXTS, "input_type": "query"}),
        _JINA,
    ),
    _row(
        "vLLM: documents as objects with an id",
        "/v1/rerank",
        {"documents": [{"text": text, "id": 7} for text in TEXTS]},
        None,
        "Cohere API v1, documents",
    ),
    _row(
        "vLLM: priority and request_id",
        "/v1/score",
        {"priority": 0, "request_id": "a"},
        None,
        _VLLM,
    ),
    _row("vLLM: top_n 0 is every document", "/v1/rerank", {"top_n": 0}, None, _VLLM),
    _row(
        "vLLM: use_activation false of ranks",
        "/v1/rerank",
        {"use_activation": False},
        Same({"query": QUERY, "documents": TEXTS, "raw_scores": True}),
        _VLLM,
    ),
    _row(
        "vLLM: data_1 and data_2",
        "/score",
        {"text_1": None, "text_2": None, "data_1": QUERY, "data_2": TEXTS},
        None,
        _VLLM,
    ),
    _row(
        "vLLM: queries and items",
        "/v1/score",
        {"text_1": None, "text_2": None, "queries": QUERY, "items": TEXTS},
        None,
        _VLLM,
    ),
    _row("TEI: an unknown parameter", "/embed", {"parameters": {"clean_up": True}}, None, _TEI),
    _row(
        "langchain-cohere: truncate is null",
        "/v1/embed",
        {"truncate": None},
        None,
        "langchain-cohere 0.6.0",
    ),
    _row(
        "OpenAI: user of any type",
        "/v1/embeddings",
        {"user": 5},
        None,
        "a field that is ignored has no wrong value",
    ),
]

_READ = [
    _row("the text true is a boolean", "/embed", {"normalize": "true"}, None, _VLLM),
    _row("the text 2 is an integer", "/v1/rerank", {"top_n": "2"}, None, _VLLM),
    _row("2.0 is an integer", "/v1/rerank", {"top_n": 2.0}, None, _VLLM),
    _row("1 is true", "/v1/rerank", {"return_documents": 1}, None, _VLLM),
    _row(
        "null is a field that is not there",
        "/embed",
        {"normalize": None, "prompt_name": None},
        None,
        _TEI,
    ),
    _row("2.5 is no integer", "/v1/rerank", {"top_n": 2.5}, _refused("top_n is 2.5"), _VLLM),
    _row(
        "maybe is no boolean",
        "/embed",
        {"normalize": "maybe"},
        _refused("normalize is 'maybe'"),
        _VLLM,
    ),
    _row(
        "0 dimensions are refused",
        "/v1/embeddings",
        {"dimensions": 0},
        _refused("dimensions is 0"),
        "OpenAI API reference: from 1",
    ),
]

_UNSERVED = [
    _row(
        "int8 vectors of Voyage",
        "/v1/embeddings",
        {"output_dtype": "int8"},
        _refused("output_dtype is not supported: vectors are float"),
        _VOYAGE,
    ),
    _row(
        "binary vectors of Jina",
        "/v1/embeddings",
        {"embedding_type": "binary"},
        _refused("embedding_type is not supported"),
        _JINA,
    ),
    _row(
        "int8 vectors of Cohere",
        "/v2/embed",
        {"embedding_types": ["int8"]},
        _refused("embedding_types"),
        "Cohere API v2, embed",
    ),
    _row(
        "images of Cohere",
        "/v2/embed",
        {"texts": None, "images": ["data:"]},
        _refused("images is not supported"),
        "Cohere API v2, embed",
    ),
    _row(
        "late chunking of Jina at a path of vLLM",
        "/pooling",
        {"late_chunking": True},
        _refused("late_chunking is not supported: write to /v1/embeddings"),
        _JINA,
    ),
    _row(
        "a task of Jina without a prompt",
        "/v1/embeddings",
        {"task": "text-matching"},
        _refused("task is 'text-matching'"),
        _JINA,
    ),
    _row(
        "top_k of Voyage's ranks",
        "/v1/rerank",
        {"top_k": 1},
        _refused("top_k is not supported: write top_n"),
        _VOYAGE,
    ),
    _row(
        "an instruction of a reranker in two names",
        "/v1/rerank",
        {"instruction": "rank", "instruct": "rank"},
        _refused("the request has instruction and instruct"),
        "Qwen3-Reranker behind Alibaba's API",
    ),
    _row(
        "rank_fields of Cohere",
        "/v1/rerank",
        {"rank_fields": ["title"]},
        _refused("rank_fields is not supported"),
        "Cohere API v1, rerank",
    ),
    _row(
        "max_tokens_per_doc of Cohere",
        "/v2/rerank",
        {"max_tokens_per_doc": 16},
        _refused("max_tokens_per_doc is not supported"),
        "Cohere API v2, rerank",
    ),
    _row(
        "labels of zero-shot classification",
        "/predict",
        {"parameters": {"candidate_labels": []}},
        _refused("candidate_labels has 0 labels"),
        "Hugging Face inference endpoints",
    ),
    _row(
        "the dtype of vLLM's base64",
        "/v1/embeddings",
        {"embed_dtype": "float16"},
        _refused("embed_dtype is not supported"),
        _VLLM,
    ),
    _row(
        "texts without special tokens",
        "/v1/embeddings",
        {"add_special_tokens": False},
        _refused("add_special_tokens is not supported"),
        _VLLM,
    ),
    _row(
        "another task of vLLM's pooling",
        "/pooling",
        {"task": "classify"},
        _refused("has the task embed: leave task out"),
        _VLLM,
    ),
]

_KSERVE_BODY = {
    "inputs": [{"name": "input_text", "datatype": "BYTES", "shape": [2], "data": TEXTS}]
}
_KSERVE = [
    Edge(
        name="a misspelt parameter of KServe is refused with the nearest name",
        route="/v2/models/embedder/infer",
        body=_KSERVE_BODY | {"parameters": {"normalise": True}},
        right=_refused("parameters.normalise", "write normalize"),
        source="a parameter of ours, which no other server has",
    ),
    Edge(
        name="an unknown field of KServe changes nothing",
        route="/v2/models/embedder/infer",
        body=_KSERVE_BODY | {"trace": True},
        right=Same(_KSERVE_BODY),
        source="tritonserver 2.51 ignores it",
    ),
]

# Ids of OpenAI's cl100k_base for "the cat", as LangChain sends them by default, and of MiniLM for it.
_TOKEN_IDS = [
    _row(
        "ids of OpenAI's tokenizer are refused",
        "/v1/embeddings",
        {"input": [[1820, 8415]]},
        _refused("row 0", "check_embedding_ctx_length=False"),
        "sentence-transformers: cosine 0.125 to the text's vector",
    ),
    _row(
        "ids of OpenAI's tokenizer are refused by TEI's route",
        "/embed",
        {"inputs": [1820, 8415]},
        _refused("row 0", "special tokens"),
        "sentence-transformers: cosine 0.125 to the text's vector",
    ),
    _row(
        "ids without special tokens are refused",
        "/v1/embeddings",
        {"input": [1996, 4937]},
        _refused("row 0", "special tokens"),
        "sentence-transformers tokenizes with them",
    ),
    Edge(
        name="ids of the model's tokenizer are its text",
        route="/v1/embeddings",
        body={"input": [[101, 1996, 4937, 102]]},
        right=Same({"input": ["the cat"]}),
        source="vocab.txt of MiniLM",
        needs_weights=True,
    ),
]

EDGES = (*_UNKNOWN, *_IGNORED, *_READ, *_UNSERVED, *_KSERVE, *_TOKEN_IDS)
