"""The gateway as the `openai` client sees it."""

import asyncio

import numpy as np
import openai
import pytest

from varlen_client.errors import InvalidRequest

from .conftest import http_client
from .fake_models import vector_of

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def ask(make_app):
    """Return a function that runs a coroutine function with an openai client."""

    def ask(call, **options):
        async def run():
            app = make_app(api_keys=("key",))
            async with http_client(app) as transport:
                client = openai.AsyncOpenAI(
                    base_url="http://gateway/v1",
                    http_client=transport,
                    **{"api_key": "key", "max_retries": 0, **options},
                )
                return await call(client)

        return asyncio.run(run())

    return ask


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}], ids=["base64", "float"])
def test_embeddings(ask, options):
    result = ask(lambda c: c.embeddings.create(model="embedder", input=["a", "bc"], **options))

    vectors = np.float32([each.embedding for each in result.data])
    np.testing.assert_array_equal(vectors, np.stack([vector_of("a"), vector_of("bc")]))
    assert result.usage.total_tokens == 3


def test_dimensions(ask):
    result = ask(lambda c: c.embeddings.create(model="embedder", input="a", dimensions=3))

    assert len(result.data[0].embedding) == 3


def test_completions(ask):
    result = ask(
        lambda c: c.completions.create(model="writer", prompt="a", n=2, max_tokens=3, logprobs=1)
    )

    assert result.choices[0].text == "0.0 0.1 0.2 "
    assert result.choices[0].logprobs.tokens == ["0.0 ", "0.1 ", "0.2 "]
    assert result.usage.prompt_tokens == 7


def test_chat_completions(ask):
    options = {"max_completion_tokens": 2, "logprobs": True, "top_logprobs": 2}

    result = ask(lambda c: c.chat.completions.create(model="writer", messages=HELLO, **options))

    [choice] = result.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "0.0 0.1 ")
    assert choice.finish_reason == "length"
    assert choice.logprobs.content[0].top_logprobs[1].bytes == [*"é".encode()]
    # an answer is a message of the next request
    ask(
        lambda c: c.chat.completions.create(
            model="writer", messages=[*HELLO, choice.message, *HELLO], extra_body={"top_k": 5}
        )
    )


def test_streamed_chat_completions(ask):
    async def call(client):
        stream = await client.chat.completions.create(
            model="writer",
            messages=HELLO,
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        return [chunk async for chunk in stream]

    chunks = ask(call)

    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content for choice in choices) == "0.0 0.1 0.2 "
    assert choices[-1].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 3


def test_models(ask):
    async def call(client):
        return [model.id async for model in client.models.list()]

    assert "embedder" in ask(call)
    assert ask(lambda c: c.models.retrieve("embedder")).id == "embedder"


@pytest.mark.parametrize(
    "body, error, message",
    [
        ({"model": "embedder", "input": ""}, openai.BadRequestError, "input is empty"),
        ({"model": "nothing", "input": "a"}, openai.NotFoundError, "has no model 'nothing'"),
    ],
    ids=["bad", "unknown model"],
)
def test_errors_have_their_types(ask, calls, body, error, message):
    calls.failure = InvalidRequest("input is empty") if not body["input"] else None

    with pytest.raises(error, match=message) as caught:
        ask(lambda c: c.embeddings.create(**body))
    assert caught.value.type == "invalid_request_error"


def test_a_wrong_key_is_an_authentication_error(ask):
    with pytest.raises(openai.AuthenticationError):
        ask(lambda c: c.models.list(), api_key="wrong")


def test_an_error_in_a_stream_is_raised(ask, calls):
    calls.failure, calls.fail_after = InvalidRequest("input is empty"), 2

    async def call(client):
        stream = await client.completions.create(model="writer", prompt="a", stream=True)
        async for _ in stream:
            pass

    with pytest.raises(openai.APIError, match="input is empty"):
        ask(call)
