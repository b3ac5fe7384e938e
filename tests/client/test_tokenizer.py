"""The server's tokenizer through the clients: order, chats, errors of one row."""

import asyncio
import json

import pytest

from varlen_client import (
    AsyncClient,
    Client,
    InvalidRequest,
    RequestTimeout,
    ServerError,
    TokenizedText,
)

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=["embed", "token_classify", "generate"])
def task(request, server):
    server.model.task = request.param
    return request.param


def parameters_of(received):
    return received.parameters or received.sampling


def test_tokens_of_texts_come_in_order(client, server, task):
    texts = [f"[{number}" for number in range(40)]

    found = client.tokenize(texts, add_special_tokens=False, priority=3)

    assert ["".join(each.tokens) for each in found] == texts
    assert found[7] == TokenizedText(
        token_ids=(91, 55),
        tokens=("[", "7"),
        special=(True, False),
        offsets=((0, 1), (1, 2)),
        prompt="",
        max_tokens=99,
    )
    # a prompt in each request to a model that generates, else 8 rows
    assert len(server.model.requests) == (40 if task == "generate" else 5)
    for received in server.model.requests:
        assert parameters_of(received) == {
            "operation": "tokenize",
            "add_special_tokens": False,
            "request_priority": 3,
        }


def test_adapters_come_by_name_with_the_reason_of_a_damaged_one(client, server, task):
    server.model.tokenizer_answer = b'{"adapters": {"legal": "", "cut": "damaged"}}'

    assert client.adapters(timeout=5) == {"legal": "", "cut": "damaged"}
    [received] = server.model.requests
    assert parameters_of(received) == {"operation": "adapters"}


def test_texts_of_token_ids_come_in_order(client, server, task):
    texts = ["a b", "", "ü😀"]

    found = client.detokenize([[ord(each) for each in text] for text in texts])
    client.detokenize([[97]], skip_special_tokens=False)

    assert found == texts
    assert parameters_of(server.model.requests[-1]) == {
        "operation": "detokenize",
        "skip_special_tokens": False,
    }


def test_a_model_that_requires_pairs_gets_empty_ones(client, server):
    server.model.task = "rerank"
    server.model.requires_pairs = True

    [found] = client.tokenize(["ab"])

    assert found.tokens == ("a", "b")
    assert server.model.requests[0].tensors["text_pair"].tolist() == [[b""]]


def test_no_rows_have_no_tokens(client, server, task):
    assert client.tokenize([]) == client.detokenize([]) == []
    assert server.model.requests == []


def test_chats_are_tokenized_by_models_that_generate(client, server):
    server.model.task = "generate"

    [found] = client.tokenize([CHAT])

    assert json.loads("".join(found.tokens)) == CHAT
    client.tokenize([CHAT], chat_template_kwargs={"enable_thinking": False})
    sent = json.loads(server.model.requests[-1].tensors["sampling_parameters"][0])
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    with pytest.raises(InvalidRequest, match="got chat_template_kwargs without chats"):
        client.tokenize(["hi"], chat_template_kwargs={})
    with pytest.raises(InvalidRequest, match="some rows are chats and others are not"):
        client.tokenize([CHAT, "hi"])
    with pytest.raises(InvalidRequest, match="the messages are no JSON"):
        client.tokenize([[{"role": object()}]])


def test_another_model_has_no_chats(client):
    with pytest.raises(InvalidRequest, match="'fake' does not generate; chats need a model that"):
        client.tokenize([CHAT])


@pytest.mark.parametrize(
    "method, rows, message",
    [
        ("tokenize", [[1, 2]], "got token ids; tokenize takes texts or chats"),
        ("tokenize", "text", "got one string; pass a list of strings"),
        ("tokenize", ["a", 7], "row 1 is int; expected text"),
        ("detokenize", ["a"], "got texts; detokenize takes lists of token ids"),
        ("detokenize", [[0.5]], "row 0 is neither text nor a list of token ids"),
    ],
)
def test_refuses_other_rows(client, method, rows, message):
    with pytest.raises(InvalidRequest, match=message):
        getattr(client, method)(rows)


def test_an_unknown_option_is_refused(client):
    with pytest.raises(TypeError, match="unexpected keyword argument 'normalize'"):
        client.tokenize(["a"], normalize=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'truncate'"):
        client.detokenize([[1]], truncate=True)


def test_errors_name_the_row(server, fault, task):
    def refuse(received):
        texts = received.texts if "text" in received.tensors else [received.prompt]
        return fault("invalid", "row 0: text is bad") if "11".upper() in texts else None

    server.model.refuse = refuse
    with (
        Client(server.url, rows_per_request=1) as client,
        pytest.raises(InvalidRequest, match="^row 11: text is bad") as error,
    ):
        client.tokenize([str(number) for number in range(12)])
    assert error.value.rows == range(11, 12)


@pytest.mark.parametrize(
    "answer, message",
    [
        (b"no JSON", "the response cannot be read"),
        (b"[]", "the response cannot be read"),
        (b"{}", "the response has no token_ids"),
    ],
)
def test_refuses_another_answer(client, server, task, answer, message):
    server.model.tokenizer_answer = answer

    with pytest.raises(ServerError, match=message):
        client.tokenize(["a"])


def test_an_older_server_is_named(client, server):
    server.model.answer = lambda received: {"sentence_embedding": server.model.output(received)}

    with pytest.raises(ServerError, match="has no texts; the server is older than this client"):
        client.tokenize(["a"])


def test_the_call_ends_in_time(server, task):
    server.model.delay = lambda received: 30.0

    async def call():
        async with AsyncClient(server.url) as client:
            await client.tokenize(["a"], timeout=0.2)

    with pytest.raises(RequestTimeout, match="tokenize did not end within 0.2 s; 0 of 1 rows"):
        asyncio.run(call())


class CountedText(str):
    """A text that counts the times when its characters are read one by one."""

    walks = 0

    def __iter__(self):
        CountedText.walks += 1
        return super().__iter__()


def test_the_characters_of_a_text_are_not_looked_at_one_by_one(client, server):
    server.model.task = "embed"

    client.tokenize([CountedText("ab"), CountedText("c")])

    assert CountedText.walks == 0


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def test_values_of_very_many_levels_are_refused(client, server):
    server.model.task = "generate"
    chat = [{**CHAT[0], "more": deep(100_000)}]
    calls = [
        lambda: client.tokenize([chat]),
        lambda: client.tokenize([CHAT], chat_template_kwargs={"a": deep(100_000)}),
        lambda: client.generate(chat),
        lambda: client.generate("a", chat_template_kwargs={"a": deep(100_000)}),
    ]

    for call in calls:
        with pytest.raises(InvalidRequest, match="have too many levels"):
            call()
    assert server.model.requests == []
