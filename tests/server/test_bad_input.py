"""Streams of bad input: each one is refused in words that help, and no good request beside it is harmed."""

import http.client
import json
import random
import struct
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.closeness import assert_close
from varlen import Encoder
from varlen_tools.local_server import LOOPBACK, LocalServer

from .clients import AnswerError, Array, Client, GrpcClient, Tensor, integers, strings, texts
from .serving import PATIENCE_SECONDS, outcomes, stub_of

# Nothing of the server's inside belongs into a message for its clients.
LEAKS = ("/", "Traceback", ".py", "shm", "numpy", "0x")


@dataclass(frozen=True, slots=True)
class Case:
    """A bad request, and the parts its error's message must have.

    Attributes:
        story: what is wrong with it, for the test's id.
        inputs: by name, as they go over the wire.
        says: what came and what is allowed, as the message puts it.
        parameters: of the request.
        ours: whether our backend refuses it; the server itself refuses the others before they reach us.
    """

    story: str
    inputs: Mapping[str, Tensor]
    says: tuple[str, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ours: bool = True


HELLO = strings("hello")
IDS = integers([[101, 7592, 102]])
THREE_ONES = integers([[1, 1, 1]])

CASES = (
    Case("empty text", texts("fine", ""), ("row 1: text is empty", "at least one word")),
    Case("only white space", texts(" \t\n\u3000"), ("row 0: text is empty",)),
    Case("NUL in a text", texts("a\0b"), ("row 0: text holds a NUL",)),
    Case(
        "invalid UTF-8",
        {"text": strings("fine", b"caf\xe9")},
        ("row 1", "not UTF-8 at byte 3", "send UTF-8"),
    ),
    Case("half a surrogate pair", {"text": strings(b"\xed\xa0\x80")}, ("not UTF-8",)),
    Case(
        "over-long text",
        texts("fine", "word " * 300),
        ("row 1: text has 302 tokens", "at most 256", "truncate=true"),
    ),
    Case("more bytes than max_text_bytes", texts("x" * 70_000), ("70000 bytes", "at most 65536")),
    Case(
        "zero tokens",
        {"input_ids": integers(np.zeros((1, 0)))},
        ("row 0: input_ids has no tokens",),
    ),
    Case(
        "over-long token ids",
        {"input_ids": integers(np.ones((2, 257)))},
        ("row 0: input_ids has 257 tokens", "at most 256"),
    ),
    Case(
        "a negative id",
        {"input_ids": integers([[101, -1, 102]])},
        ("input_ids holds -1", "0 to 30521"),
    ),
    Case(
        "an id past the vocabulary",
        {"input_ids": integers([[101, 102], [101, 30522]])},
        ("row 1: input_ids holds 30522", "0 to 30521"),
    ),
    Case(
        "an id that 32 bits cannot hold",
        {"input_ids": integers([[2**32 + 5, 102]])},
        ("input_ids holds 4294967301", "0 to 30521"),
    ),
    Case(
        "the least 64-bit id",
        {"input_ids": integers([[-(2**63), 2**63 - 1]])},
        (f"input_ids holds {-(2**63)}",),
    ),
    Case(
        "a token type out of range",
        {"input_ids": IDS, "token_type_ids": integers([[0, 2, 0]])},
        ("token_type_ids holds 2", "0 to 1"),
    ),
    Case(
        "mask with holes",
        {"input_ids": IDS, "attention_mask": integers([[1, 0, 1]])},
        ("row 0: attention_mask is not ones followed by zeros", "pad on the right"),
    ),
    Case(
        "mask padded on the left",
        {"input_ids": IDS, "attention_mask": integers([[0, 1, 1]])},
        ("attention_mask is not ones followed by zeros",),
    ),
    Case(
        "mask of other numbers",
        {"input_ids": IDS, "attention_mask": integers([[1, 2, -7]])},
        ("attention_mask is not ones followed by zeros",),
    ),
    Case(
        "mask of zeros",
        {"input_ids": IDS, "attention_mask": integers([[0, 0, 0]])},
        ("row 0: input_ids has no tokens",),
    ),
    Case(
        "mask of another length",
        {"input_ids": IDS, "attention_mask": integers([[1, 1]])},
        ("attention_mask has shape [1, 2]", "input_ids has [1, 3]"),
    ),
    Case(
        "both text and ids",
        {"text": HELLO, "input_ids": IDS},
        ("both text and input_ids", "one or the other"),
    ),
    Case(
        "text with a mask",
        {"text": HELLO, "attention_mask": THREE_ONES},
        ("both text and attention_mask",),
    ),
    Case(
        "mask alone",
        {"attention_mask": THREE_ONES},
        ("the request has attention_mask", "send text, or input_ids"),
    ),
    Case(
        "truncate is a word",
        {"text": HELLO},
        ("truncate is 'yes'", "true or false"),
        {"truncate": "yes"},
    ),
    Case(
        "truncate is a number", {"text": HELLO}, ("truncate is 1", "true or false"), {"truncate": 1}
    ),
    Case(
        "normalize is a word",
        {"text": HELLO},
        ("normalize is 'false'", "true or false"),
        {"normalize": "false"},
    ),
    Case(
        "a parameter larger than an error may be",
        {"text": HELLO},
        ("truncate is 'xxx", "x... (20002 characters); send true or false"),
        {"truncate": "x" * 20_000},
    ),
    Case(
        "a misspelt parameter",
        {"text": HELLO},
        ('unknown parameter "normalise"', 'Did you mean "normalize"?', "Allowed: truncate,"),
        {"normalise": True},
    ),
    Case(
        "a timeout in seconds",
        {"text": HELLO},
        ("timeout is 30 microseconds", "at least 1000", "ignore_request_timeout"),
        {"timeout": 30},
    ),
    Case("no inputs", {}, ("request has 0 inputs",), ours=False),
    Case(
        "wrong tensor name",
        {"sentence": HELLO},
        ("unexpected inference input 'sentence'",),
        ours=False,
    ),
    Case(
        "text_pair where the task takes none",
        {"text": HELLO, "text_pair": HELLO},
        ("unexpected inference input 'text_pair'",),
        ours=False,
    ),
    Case(
        "text as integers",
        {"text": Tensor("INT64", (1, 1), bytes(8))},
        ("'text' data-type is 'INT64'", "expects 'BYTES'"),
        ours=False,
    ),
    Case(
        "ids as INT32",
        {"input_ids": Tensor("INT32", (1, 3), bytes(12))},
        ("data-type is 'INT32'", "expects 'INT64'"),
        ours=False,
    ),
    Case(
        "ids as FP32",
        {"input_ids": Tensor("FP32", (1, 3), bytes(12))},
        ("data-type is 'FP32'", "expects 'INT64'"),
        ours=False,
    ),
    Case(
        "text of rank 1",
        {"text": Tensor("BYTES", (1,), HELLO.data)},
        ("Expected [-1,1], got [1]",),
        ours=False,
    ),
    Case(
        "ids of rank 1", {"input_ids": integers([101, 102])}, ("input_ids", "got [2]"), ours=False
    ),
    Case(
        "ids of rank 3",
        {"input_ids": integers([[[101, 102]]])},
        ("input_ids", "got [1,1,2]"),
        ours=False,
    ),
    Case(
        "two texts in a row",
        {"text": Tensor("BYTES", (1, 2), HELLO.data * 2)},
        ("Expected [-1,1], got [1,2]",),
        ours=False,
    ),
    Case(
        "10,000 rows of text", texts(*["row"] * 10_000), ("batch-size must be <= 64",), ours=False
    ),
    Case(
        "10,000 rows of ids",
        {"input_ids": integers(np.full((10_000, 8), 101))},
        ("batch-size must be <= 64",),
        ours=False,
    ),
    Case("no rows", {"text": Tensor("BYTES", (0, 1), b"")}, ("text",), ours=False),
    Case(
        "a length prefix that promises too much",
        {"text": Tensor("BYTES", (1, 1), struct.pack("<I", 500) + b"hello")},
        ("expecting string of length 500", "only 5 bytes"),
        ours=False,
    ),
    Case(
        "the largest length prefix",
        {"text": Tensor("BYTES", (1, 1), b"\xff\xff\xff\xffhello")},
        ("expecting string of length 4294967295",),
        ours=False,
    ),
    Case(
        "half a length prefix",
        {"text": Tensor("BYTES", (1, 1), b"\x05\x00")},
        ("incomplete string length indicator",),
        ours=False,
    ),
    Case(
        "fewer strings than rows",
        {"text": Tensor("BYTES", (2, 1), HELLO.data)},
        ("expected 2 string elements", "got 1"),
        ours=False,
    ),
    Case(
        "more strings than rows",
        {"text": Tensor("BYTES", (1, 1), HELLO.data * 2)},
        ("string elements 2", "expecting 1"),
        ours=False,
    ),
    Case(
        "fewer bytes than ids",
        {"input_ids": Tensor("INT64", (1, 3), bytes(10))},
        ("Expected 24, got 10",),
        ours=False,
    ),
)

GOOD = ("A good request.", "ok", "The rest of the world does not concern this text. " * 9)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.story)
def test_bad_input_is_refused_in_words_that_help(client: Client, case: Case) -> None:
    with pytest.raises(AnswerError) as caught:
        client.infer("minilm", case.inputs, case.parameters)

    _check_refusal(caught.value, case)


def test_a_text_pair_needs_a_text_and_as_many_rows(client: Client) -> None:
    with pytest.raises(AnswerError, match="text_pair"):
        client.infer("classifier", {"text_pair": strings("word1")})
    with pytest.raises(AnswerError, match="batch size does not match"):
        client.infer("classifier", texts("word1", "word2") | {"text_pair": strings("word3")})


def test_a_parameter_that_is_not_a_number_harms_nobody(grpc_client: GrpcClient) -> None:
    # JSON has no NaN, and the server hands parameters to its backends as JSON
    for odd in (float("nan"), float("inf")):
        answer = grpc_client.infer("minilm", texts("hello"), {"odd": odd})
        np.testing.assert_array_equal(answer, grpc_client.infer("minilm", texts("hello")))
    with pytest.raises(AnswerError, match="truncate is .*; send true or false"):
        grpc_client.infer("minilm", texts("hello"), {"truncate": 0.5})


@pytest.mark.parametrize("member", [b'"trunc\xff": true', b'"note": "\xff"'], ids=["name", "value"])
def test_bytes_that_are_not_utf_8_in_a_parameter_are_refused_without_a_traceback(
    server: LocalServer, member: bytes
) -> None:
    tracebacks = server.log().count("Traceback")
    text = b'{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["hello"]}'
    body = b'{"inputs": [' + text + b'], "parameters": {' + member + b"}}"
    connection = http.client.HTTPConnection(LOOPBACK, server.http_port, timeout=PATIENCE_SECONDS)

    connection.request("POST", "/v2/models/minilm/infer", body)
    response = connection.getresponse()
    message = json.loads(response.read())["error"]
    connection.close()

    assert response.status == 400
    assert message == "the name or value of a request parameter is not UTF-8; send UTF-8"
    assert server.log().count("Traceback") == tracebacks


def test_good_requests_between_bad_ones_are_right_and_none_is_lost(
    client: Client, server: LocalServer, in_process: Encoder, roundings: dict[str, int]
) -> None:
    expected = in_process.embed(GOOD)
    stub, before = stub_of(server, "minilm"), outcomes(server, "minilm")
    stream: list[Case | int] = [*CASES, *CASES, *CASES, *(list(range(len(GOOD))) * 60)]
    random.Random(0).shuffle(stream)

    sent: list[tuple[Case | int, Future[Array]]] = []
    for item in stream:
        inputs = item.inputs if isinstance(item, Case) else texts(GOOD[item])
        parameters = item.parameters if isinstance(item, Case) else {}
        sent.append((item, client.start("minilm", inputs, parameters)))

    for item, answer in sent:
        if isinstance(item, Case):
            error = answer.exception()
            assert isinstance(error, AnswerError), f"{item.story}: {error!r}"
            _check_refusal(error, item)
        else:
            assert_close(answer.result(), expected[[item]], roundings=roundings["minilm"])
    invalid = sum(isinstance(item, Case) and item.ours for item in stream)
    right = sum(isinstance(item, int) for item in stream)
    wanted = before | {"ok": before["ok"] + right, "invalid": before["invalid"] + invalid}
    assert outcomes(server, "minilm") == wanted
    assert stub_of(server, "minilm") == stub, "the model's process did not survive"


def _check_refusal(error: AnswerError, case: Case) -> None:
    assert error.code == "INVALID_ARGUMENT", error
    for part in case.says:
        assert part in error.message
    for leak in LEAKS:
        assert leak not in error.message
