"""The gateway with LangChain, litellm, and LlamaIndex if installed: embeddings, tools, and an agent."""

import asyncio
import importlib
import json

import numpy as np
import pytest

from .conftest import http_client
from .fake_models import vector_of
from .tool_templates import ARGUMENTS, FAMILIES

SERVER = {"api_key": "key", "max_retries": 0}
URL = "http://gateway/v1"
TEXTS = ["a", "bc", "def"]

# these packages warn of their own code
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def langchain_openai():
    """The package, whose import takes a second: collecting tests does not need it."""
    return importlib.import_module("langchain_openai")


@pytest.fixture
def embed(make_app):
    """Return a function that embeds texts and a query with a framework."""

    def embed(connect, texts_method, query_method):
        async def run():
            async with http_client(make_app(api_keys=("key",))) as transport:
                embedder = connect(transport)
                texts = await getattr(embedder, texts_method)(TEXTS)
                return texts, await getattr(embedder, query_method)(TEXTS[0])

        return asyncio.run(run())

    return embed


def assert_vectors(found):
    texts, query = found
    expected = [vector_of(text) for text in TEXTS]
    np.testing.assert_array_equal(np.float32(texts), np.stack(expected))
    np.testing.assert_array_equal(np.float32(query), expected[0])


def test_langchain(embed, calls, langchain_openai):
    found = embed(
        lambda transport: langchain_openai.OpenAIEmbeddings(
            model="embedder",
            base_url=URL,
            # otherwise it sends token ids of OpenAI's own tokenizer
            check_embedding_ctx_length=False,
            http_async_client=transport,
            **SERVER,
        ),
        "aembed_documents",
        "aembed_query",
    )

    assert_vectors(found)
    assert [inputs for _, _, inputs, _ in calls.received] == [TEXTS, TEXTS[:1]]


def test_llama_index(embed):
    openai_embeddings = pytest.importorskip("llama_index.embeddings.openai")

    found = embed(
        lambda transport: openai_embeddings.OpenAIEmbedding(
            model_name="embedder", api_base=URL, async_http_client=transport, **SERVER
        ),
        "aget_text_embedding_batch",
        "aget_query_embedding",
    )

    assert_vectors(found)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["chats", "responses"])
def test_an_agent_of_langchain_calls_a_tool(
    make_app, calls, model, path, streams, langchain_openai
):
    agents = importlib.import_module("langchain.agents")
    model("qwen3", "<think>I add</think>", FAMILIES["qwen3"].call)
    called = []

    def add(a: int, b: list[int], c: str) -> str:
        """Add numbers."""
        called.append({"a": a, "b": b, "c": c})
        calls.texts = ("It is ", "3.")
        return "3"

    async def run():
        async with http_client(make_app(api_keys=("key",))) as transport:
            chat = langchain_openai.ChatOpenAI(
                model="writer",
                base_url=URL,
                http_async_client=transport,
                streaming=streams,
                use_responses_api=path == "responses",
                **SERVER,
            )
            question = {"messages": [("user", "add 1 and 2")]}
            return await agents.create_agent(chat, [add]).ainvoke(question)

    answer = asyncio.run(run())

    assert called == [ARGUMENTS]
    assert answer["messages"][-1].text == "It is 3."


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_litellm_calls_a_tool(ask, model, streams, monkeypatch):
    # otherwise its import asks for a list of prices
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = importlib.import_module("litellm")
    model("qwen3", "<think>I add</think>", FAMILIES["qwen3"].call)
    add = {"type": "object", "properties": {name: {} for name in ARGUMENTS}}
    tool = {"type": "function", "function": {"name": "add", "parameters": add}}

    async def call(client):
        messages = [{"role": "user", "content": "add 1 and 2"}]
        answer = await litellm.acompletion(
            "openai/writer", messages, tools=[tool], stream=streams, client=client
        )
        if not streams:
            return answer, answer.choices[0].finish_reason
        chunks = [chunk async for chunk in answer]
        # litellm's own builder takes the reason of the last chunk, which has none
        (reason,) = filter(None, (chunk.choices[0].finish_reason for chunk in chunks))
        return litellm.stream_chunk_builder(chunks), reason

    answer, reason = ask(call)

    message = answer.choices[0].message
    (called,) = message.tool_calls
    assert (reason, called.function.name) == ("tool_calls", "add")
    assert json.loads(called.function.arguments) == ARGUMENTS
    assert message.reasoning_content == "I add"
