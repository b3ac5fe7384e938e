"""Clients of Cohere's interface, before the gateway."""

from __future__ import annotations

from typing import Any

from .table import QUERY, TEXTS, Addresses, call

_KEY = "none"


@call("cohere", "ranks")
def cohere_rerank_v2(at: Addresses) -> Any:
    from cohere import ClientV2

    client = ClientV2(_KEY, base_url=at.gateway["ranking"])
    return _ranks(client.rerank(model="ranking", query=QUERY, documents=TEXTS).results)


@call("cohere", "ranks")
def cohere_rerank_v1(at: Addresses) -> Any:
    from cohere import Client

    client = Client(_KEY, base_url=at.gateway["ranking"])
    return _ranks(client.rerank(model="ranking", query=QUERY, documents=TEXTS).results)


@call("cohere", "vectors")
def cohere_embed_v2(at: Addresses) -> Any:
    from cohere import ClientV2

    client = ClientV2(_KEY, base_url=at.gateway["minilm"])
    answer = client.embed(
        model="minilm", texts=TEXTS, input_type="search_document", embedding_types=["float"]
    )
    return answer.embeddings.float_


@call("cohere", "vectors")
def cohere_embed_v1(at: Addresses) -> Any:
    from cohere import Client

    client = Client(_KEY, base_url=at.gateway["minilm"])
    return client.embed(model="minilm", texts=TEXTS, input_type="search_document").embeddings


@call("langchain-cohere", "vectors")
def langchain_cohere_embeddings(at: Addresses) -> Any:
    from langchain_cohere import CohereEmbeddings

    embeddings = CohereEmbeddings(
        model="minilm", cohere_api_key=_KEY, base_url=at.gateway["minilm"]
    )
    return embeddings.embed_documents(TEXTS)


@call("langchain-cohere", "ranks")
def langchain_cohere_rerank(at: Addresses) -> Any:
    from langchain_cohere import CohereRerank

    reranker = CohereRerank(
        model="ranking", cohere_api_key=_KEY, base_url=at.gateway["ranking"], top_n=len(TEXTS)
    )
    return _ranks(reranker.rerank(TEXTS, QUERY))


@call("langchain-nvidia-ai-endpoints", "ranks", refused="404")
def langchain_nvidia_rerank(at: Addresses) -> Any:
    from langchain_core.documents import Document
    from langchain_nvidia_ai_endpoints import NVIDIARerank

    reranker = NVIDIARerank(
        model="ranking", base_url=f"{at.gateway['ranking']}/v1", api_key=_KEY, top_n=len(TEXTS)
    )
    found = reranker.compress_documents([Document(text) for text in TEXTS], QUERY)
    return [[TEXTS.index(each.page_content), each.metadata["relevance_score"]] for each in found]


@call("llama-index-postprocessor-cohere-rerank", "ranks")
def llama_index_cohere_rerank(at: Addresses) -> Any:
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.postprocessor.cohere_rerank import CohereRerank

    reranker = CohereRerank(
        model="ranking", api_key=_KEY, base_url=at.gateway["ranking"], top_n=len(TEXTS)
    )
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    found = reranker.postprocess_nodes(nodes, query_str=QUERY)
    return [[TEXTS.index(each.node.text), each.score] for each in found]


# it takes names of Cohere's models only
@call("llama-index-embeddings-cohere", "vectors", refused="is not a valid model name")
def llama_index_cohere_embeddings(at: Addresses) -> Any:
    from llama_index.embeddings.cohere import CohereEmbedding

    embedding = CohereEmbedding(
        model_name="minilm",
        api_key=_KEY,
        base_url=at.gateway["minilm"],
        input_type="search_document",
    )
    return embedding.get_text_embedding_batch(TEXTS)


@call("litellm", "ranks")
def litellm_cohere_rerank(at: Addresses) -> Any:
    return _litellm_rerank("cohere/ranking", f"{at.gateway['ranking']}/v2/rerank")


@call("litellm", "ranks")
def litellm_hosted_vllm_rerank(at: Addresses) -> Any:
    return _litellm_rerank("hosted_vllm/ranking", at.gateway["ranking"])


@call("litellm", "ranks")
def litellm_infinity_rerank(at: Addresses) -> Any:
    # of a document it reads a string, which this path answers
    return _litellm_rerank("infinity/ranking", f"{at.gateway['ranking']}/infinity")


@call("litellm", "ranks")
def litellm_huggingface_rerank(at: Addresses) -> Any:
    return _litellm_rerank("huggingface/ranking", at.gateway["ranking"])


@call("litellm", "vectors")
def litellm_cohere_embeddings(at: Addresses) -> Any:
    from litellm import embedding

    answer = embedding(
        "cohere/minilm",
        input=TEXTS,
        input_type="search_document",
        api_base=f"{at.gateway['minilm']}/v2/embed",
        api_key=_KEY,
    )
    return [each["embedding"] for each in answer.data]


@call("litellm", "vectors")
def litellm_infinity_embeddings(at: Addresses) -> Any:
    from litellm import embedding

    answer = embedding(
        "infinity/minilm", input=TEXTS, api_base=f"{at.gateway['minilm']}/infinity", api_key=_KEY
    )
    return [each["embedding"] for each in answer.data]


def _litellm_rerank(model: str, address: str) -> Any:
    from litellm import rerank

    answer = rerank(model, query=QUERY, documents=TEXTS, api_base=address, api_key=_KEY)
    return [[each["index"], each["relevance_score"]] for each in answer.results]


def _ranks(results: Any) -> Any:
    """Return the index and score of each document, best first."""
    pairs = [each if isinstance(each, dict) else vars(each) for each in results]
    return [[each["index"], each["relevance_score"]] for each in pairs]
