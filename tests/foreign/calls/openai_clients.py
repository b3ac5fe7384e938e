"""Clients of OpenAI's interface, before the gateway."""

from __future__ import annotations

from typing import Any

from .table import MAX_TOKENS, PROMPT, TEXTS, Addresses, call

_KEY = "none"
_MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
_GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS}


def _v1(at: Addresses, model: str) -> str:
    return f"{at.gateway[model]}/v1"


@call("openai", "vectors")
def openai_embeddings(at: Addresses) -> Any:
    from openai import OpenAI

    with OpenAI(base_url=_v1(at, "minilm"), api_key=_KEY) as client:
        # the client asks for base64
        answer = client.embeddings.create(model="minilm", input=TEXTS)
    return [each.embedding for each in answer.data]


@call("openai", "completion")
def openai_completion(at: Addresses) -> Any:
    from openai import OpenAI

    with OpenAI(base_url=_v1(at, "gpt2"), api_key=_KEY) as client:
        answer = client.completions.create(model="gpt2", prompt=PROMPT, **_GREEDY)
    return answer.choices[0].text


@call("openai", "chat")
async def openai_chat_stream(at: Addresses) -> Any:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=_v1(at, "gpt2"), api_key=_KEY) as client:
        stream = await client.chat.completions.create(
            model="gpt2", messages=_MESSAGES, stream=True, **_GREEDY
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


@call("openai", "models")
def openai_models(at: Addresses) -> Any:
    from openai import OpenAI

    with OpenAI(base_url=_v1(at, "minilm"), api_key=_KEY) as client:
        return [model.id for model in client.models.list()]


@call("langchain-openai", "vectors")
def langchain_embeddings(at: Addresses) -> Any:
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(
        model="minilm",
        base_url=_v1(at, "minilm"),
        api_key=_KEY,
        # otherwise it sends token ids of OpenAI's own tokenizer
        check_embedding_ctx_length=False,
    )
    return embeddings.embed_documents(TEXTS)


# its default: token ids of OpenAI's tokenizer
@call("langchain-openai", "vectors", refused="check_embedding_ctx_length=False")
def langchain_embeddings_of_ids(at: Addresses) -> Any:
    import tiktoken
    from langchain_openai import OpenAIEmbeddings

    # the vocabulary is on the internet
    tiktoken.get_encoding = _encoding_of_bytes
    embeddings = OpenAIEmbeddings(model="minilm", base_url=_v1(at, "minilm"), api_key=_KEY)
    return embeddings.embed_documents(TEXTS)


def _encoding_of_bytes(name: str) -> Any:
    from tiktoken import Encoding

    ranks = {bytes([each]): each for each in range(256)}
    return Encoding(name, pat_str=r".|\n", mergeable_ranks=ranks, special_tokens={})


@call("langchain-openai", "completion")
def langchain_completion(at: Addresses) -> Any:
    from langchain_openai import OpenAI

    return OpenAI(model="gpt2", base_url=_v1(at, "gpt2"), api_key=_KEY, **_GREEDY).invoke(PROMPT)


@call("langchain-openai", "chat")
def langchain_chat(at: Addresses) -> Any:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="gpt2", base_url=_v1(at, "gpt2"), api_key=_KEY, **_GREEDY)
    return chat.invoke(PROMPT).content


@call("langchain-openai", "chat")
def langchain_chat_stream(at: Addresses) -> Any:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="gpt2", base_url=_v1(at, "gpt2"), api_key=_KEY, **_GREEDY)
    return "".join(str(part.content) for part in chat.stream(PROMPT))


@call("llama-index-embeddings-openai", "vectors")
def llama_index_embeddings(at: Addresses) -> Any:
    from llama_index.embeddings.openai import OpenAIEmbedding

    # not `model`, which knows only the names of OpenAI
    embedding = OpenAIEmbedding(model_name="minilm", api_base=_v1(at, "minilm"), api_key=_KEY)
    return embedding.get_text_embedding_batch(TEXTS)


@call("llama-index-embeddings-openai-like", "vectors")
def llama_index_like_embeddings(at: Addresses) -> Any:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    embedding = OpenAILikeEmbedding(model_name="minilm", api_base=_v1(at, "minilm"), api_key=_KEY)
    return embedding.get_text_embedding_batch(TEXTS)


@call("llama-index-llms-openai-like", "completion")
def llama_index_completion(at: Addresses) -> Any:
    return str(_llama_index(at, is_chat_model=False).complete(PROMPT))


@call("llama-index-llms-openai-like", "chat")
def llama_index_chat(at: Addresses) -> Any:
    return str(_llama_index(at, is_chat_model=True).complete(PROMPT))


def _llama_index(at: Addresses, *, is_chat_model: bool) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model="gpt2",
        api_base=_v1(at, "gpt2"),
        api_key=_KEY,
        is_chat_model=is_chat_model,
        **_GREEDY,
    )


@call("langchain-nvidia-ai-endpoints", "vectors")
def langchain_nvidia_embeddings(at: Addresses) -> Any:
    from langchain_nvidia_ai_endpoints import NVIDIAEmbeddings

    embeddings = NVIDIAEmbeddings(model="minilm", base_url=_v1(at, "minilm"), api_key=_KEY)
    return embeddings.embed_documents(TEXTS)


@call("langchain-nvidia-ai-endpoints", "chat")
def langchain_nvidia_chat(at: Addresses) -> Any:
    from langchain_nvidia_ai_endpoints import ChatNVIDIA

    chat = ChatNVIDIA(model="gpt2", base_url=_v1(at, "gpt2"), api_key=_KEY, **_GREEDY)
    return chat.invoke(PROMPT).content


@call("litellm", "vectors")
def litellm_embeddings(at: Addresses) -> Any:
    from litellm import embedding

    return _vectors(
        embedding("openai/minilm", input=TEXTS, api_base=_v1(at, "minilm"), api_key=_KEY)
    )


@call("litellm", "vectors")
def litellm_hosted_vllm_embeddings(at: Addresses) -> Any:
    from litellm import embedding

    return _vectors(
        embedding("hosted_vllm/minilm", input=TEXTS, api_base=_v1(at, "minilm"), api_key=_KEY)
    )


@call("litellm", "vectors")
def litellm_nvidia_nim_embeddings(at: Addresses) -> Any:
    from litellm import embedding

    name, address = "nvidia_nim/minilm", _v1(at, "minilm")
    return _vectors(
        embedding(name, input=TEXTS, input_type="passage", api_base=address, api_key=_KEY)
    )


@call("litellm", "completion")
def litellm_completion(at: Addresses) -> Any:
    from litellm import text_completion

    answer = text_completion(
        model="text-completion-openai/gpt2",
        prompt=PROMPT,
        api_base=_v1(at, "gpt2"),
        api_key=_KEY,
        **_GREEDY,
    )
    return answer.choices[0].text


@call("litellm", "chat")
def litellm_chat(at: Addresses) -> Any:
    from litellm import completion

    answer = completion(
        "openai/gpt2", messages=_MESSAGES, api_base=_v1(at, "gpt2"), api_key=_KEY, **_GREEDY
    )
    return answer.choices[0].message.content


@call("litellm", "chat")
def litellm_hosted_vllm_chat_stream(at: Addresses) -> Any:
    from litellm import completion

    parts = completion(
        "hosted_vllm/gpt2",
        messages=_MESSAGES,
        api_base=_v1(at, "gpt2"),
        api_key=_KEY,
        stream=True,
        **_GREEDY,
    )
    return "".join(part.choices[0].delta.content or "" for part in parts)


def _vectors(answer: Any) -> Any:
    return [each["embedding"] for each in answer.data]
