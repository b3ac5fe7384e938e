"""Bodies of applications that have a client of their own, before the gateway.

Both post with requests. Sources, of 2025 and 2026: rag/llm/embedding_model.py and rerank_model.py of
infiniflow/ragflow, and dify_plugin/interfaces/model/openai_compatible of langgenius/dify-plugin-sdks.
"""

from __future__ import annotations

import json
from typing import Any

from .table import MAX_TOKENS, PROMPT, QUERY, TEXTS, Addresses, call

_TIMEOUT_SECONDS = 60


def _post(url: str, body: dict[str, Any]) -> Any:
    import requests

    headers = {"Authorization": "Bearer none", "Content-Type": "application/json"}
    response = requests.post(url, headers=headers, data=json.dumps(body), timeout=_TIMEOUT_SECONDS)
    assert response.ok, response.text
    return response.json()


def _ranks(answer: Any) -> Any:
    return [[each["index"], each["relevance_score"]] for each in answer["results"]]


def _vectors(answer: Any) -> Any:
    assert answer["usage"]["total_tokens"] > 0
    return [each["embedding"] for each in answer["data"]]


@call("openai", "vectors")
def ragflow_openai_embeddings(at: Addresses) -> Any:
    from openai import OpenAI

    with OpenAI(base_url=f"{at.gateway['minilm']}/v1", api_key="none") as client:
        answer = client.embeddings.create(
            model="minilm",
            input=TEXTS,
            encoding_format="float",
            extra_body={"drop_params": True},
        )
    return [each.embedding for each in answer.data]


@call("requests", "vectors")
def ragflow_jina_embeddings(at: Addresses) -> Any:
    body = {"model": "minilm", "input": TEXTS, "encoding_type": "float"}
    return _vectors(_post(f"{at.gateway['minilm']}/v1/embeddings", body))


@call("requests", "ranks")
def ragflow_xinference_rerank(at: Addresses) -> Any:
    body = {
        "model": "ranking",
        "query": QUERY,
        "return_documents": "true",
        "return_len": "true",
        "documents": TEXTS,
    }
    answer = _post(f"{at.gateway['ranking']}/v1/rerank", body)
    assert [each["document"]["text"] for each in answer["results"]] == [
        TEXTS[each["index"]] for each in answer["results"]
    ]
    return _ranks(answer)


@call("requests", "ranks")
def ragflow_siliconflow_rerank(at: Addresses) -> Any:
    body = {
        "model": "ranking",
        "query": QUERY,
        "documents": TEXTS,
        "top_n": len(TEXTS),
        "return_documents": False,
        "max_chunks_per_doc": 1024,
        "overlap_tokens": 80,
    }
    return _ranks(_post(f"{at.gateway['ranking']}/v1/rerank", body))


@call("requests", "vectors")
def dify_embeddings(at: Addresses) -> Any:
    body = {"input": TEXTS, "model": "minilm", "user": "abc-123", "encoding_format": "float"}
    return _vectors(_post(f"{at.gateway['minilm']}/v1/embeddings", body))


@call("requests", "ranks")
def dify_rerank(at: Addresses) -> Any:
    body = {
        "model": "ranking",
        "query": QUERY,
        "documents": TEXTS,
        "top_n": None,
        "return_documents": True,
    }
    return _ranks(_post(f"{at.gateway['ranking']}/v1/rerank", body))


@call("requests", "chat")
def dify_chat(at: Addresses) -> Any:
    body = {
        "model": "gpt2",
        "stream": False,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "enable_thinking": False,
        "messages": [{"role": "user", "content": PROMPT}],
        "user": "abc-123",
    }
    answer = _post(f"{at.gateway['gpt2']}/v1/chat/completions", body)
    return answer["choices"][0]["message"]["content"]
