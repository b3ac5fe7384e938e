"""Clients of Text Embeddings Inference, and of Hugging Face's inference endpoints, before the gateway."""

from __future__ import annotations

from typing import Any

from .table import DATE, MASKED, MAX_TOKENS, PROMPT, TEXTS, Addresses, call


def _hub(at: Addresses, model: str, path: str = "") -> Any:
    from huggingface_hub import InferenceClient

    return InferenceClient(f"{at.gateway[model]}{path}")


@call("huggingface_hub", "vectors")
def hub_feature_extraction(at: Addresses) -> Any:
    return _hub(at, "minilm").feature_extraction(TEXTS).tolist()


@call("huggingface_hub", "vectors")
async def hub_async_feature_extraction(at: Addresses) -> Any:
    from huggingface_hub import AsyncInferenceClient

    client = AsyncInferenceClient(f"{at.gateway['minilm']}/embed")
    return (await client.feature_extraction(TEXTS, normalize=True, truncate=True)).tolist()


@call("huggingface_hub", "similarities")
def hub_sentence_similarity(at: Addresses) -> Any:
    return _hub(at, "minilm", "/similarity").sentence_similarity(TEXTS[0], TEXTS[1:])


@call("huggingface_hub", "labels")
def hub_text_classification(at: Addresses) -> Any:
    # of a text outside a batch it returns the best label only
    found = _hub(at, "moods", "/predict").text_classification([TEXTS[:1]])
    return {each.label: each.score for each in found}


@call("huggingface_hub", "masks", refused="embed needs sentence_embedding")
def hub_fill_mask(at: Addresses) -> Any:
    found = _hub(at, "masks").fill_mask(MASKED, top_k=3)
    return [[each.token, each.score] for each in found]


@call("huggingface_hub", "completion", refused="embed needs sentence_embedding")
def hub_text_generation(at: Addresses) -> Any:
    return _hub(at, "gpt2").text_generation(PROMPT, max_new_tokens=MAX_TOKENS, do_sample=False)


@call("huggingface_hub", "translation", refused="its task is translate")
def hub_translation(at: Addresses) -> Any:
    return _hub(at, "dates").translation(DATE).translation_text


@call("huggingface_hub", "chat")
def hub_chat(at: Addresses) -> Any:
    answer = _hub(at, "gpt2", "/v1").chat_completion(
        [{"role": "user", "content": PROMPT}], model="gpt2", max_tokens=MAX_TOKENS, temperature=0
    )
    return answer.choices[0].message.content


@call("langchain-huggingface", "vectors")
def langchain_endpoint_embeddings(at: Addresses) -> Any:
    from langchain_huggingface import HuggingFaceEndpointEmbeddings

    embeddings = HuggingFaceEndpointEmbeddings(model="minilm")
    # `model` may be no address since 1.2
    embeddings.client = _hub(at, "minilm")
    return embeddings.embed_documents(TEXTS)


@call("llama-index-embeddings-text-embeddings-inference", "vectors")
def llama_index_tei_embeddings(at: Addresses) -> Any:
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    embedding = TextEmbeddingsInference(model_name="minilm", base_url=at.gateway["minilm"])
    return embedding.get_text_embedding_batch(TEXTS)


@call("llama-index-embeddings-huggingface-api", "vectors")
def llama_index_huggingface_api_embeddings(at: Addresses) -> Any:
    from llama_index.embeddings.huggingface_api import HuggingFaceInferenceAPIEmbedding

    embedding = HuggingFaceInferenceAPIEmbedding(model_name=at.gateway["minilm"])
    return embedding.get_text_embedding_batch(TEXTS)


@call("litellm", "vectors")
def litellm_huggingface_embeddings(at: Addresses) -> Any:
    from litellm import embedding

    answer = embedding(
        "huggingface/minilm",
        input=TEXTS,
        # otherwise it asks the Hub for the task of the model
        input_type="feature-extraction",
        api_base=f"{at.gateway['ranking']}/embed?model=minilm",
    )
    return [each["embedding"] for each in answer.data]
