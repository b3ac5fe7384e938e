"""Invalid requests get the right error code, and no valid request is affected."""

import http.client
import json
import random
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.closeness import assert_close
from varlen import Encoder
from varlen_tools.local_server import LOOPBACK, LocalServer

from .clients import AnswerError, Array, Client, GrpcClient, Tensor, integers, strings, texts
from .serving import TIMEOUT_SECONDS, outcomes, stub_of

# Text about the server's internals, which messages for clients must not contain.
LEAKS = ("/", "Traceback", ".py", "shm", "numpy", "0x")


@dataclass(frozen=True, slots=True)
class Case:
    """A bad request.

    Attributes:
        description: what is wrong with it, for the test's id.
        word: part of the error's message. Our messages are tested in tests/backend/test_intake.py and test_wire.py.
        inputs: by name, as on the wire.
        parameters: of the request.
    """

    description: str
    word: str
    inputs: Mapping[str, Tensor]
    parameters: Mapping[str, Any] = field(default_factory=dict)


HELLO = strings("hello")
IDS = integers([[101, 7592, 102]])


def _ids(rows: npt.ArrayLike, **others: npt.ArrayLike) -> dict[str, Tensor]:
    others = {"input_ids": rows, **others}
    return {name: integers(value) for name, value in others.items()}


def _bytes(shape: tuple[int, ...], data: bytes) -> dict[str, Tensor]:
    return {"text": Tensor("BYTES", shape, data)}


def _with(**parameters: Any) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    return {"text": HELLO}, parameters


# What our backend refuses; the server refuses the other ones before they reach us.
OURS = (
    Case("empty text", "row 1", texts("fine", "")),
    Case("only white space", "row 0", texts(" \t\n\u3000")),
    Case("NUL in a text", "NUL", texts("a\0b")),
    Case("invalid UTF-8", "UTF-8", {"text": strings("fine", b"caf\xe9")}),
    Case("half a surrogate pair", "UTF-8", {"text": strings(b"\xed\xa0\x80")}),
    Case("over-long text", "302 tokens", texts("fine", "word " * 300)),
    Case("more bytes than max_text_bytes", "70000 bytes", texts("x" * 70_000)),
    Case("zero tokens", "no tokens", _ids(np.zeros((1, 0)))),
    Case("over-long token ids", "257 tokens", _ids(np.ones((2, 257)))),
    Case("a negative id", "-1", _ids([[101, -1, 102]])),
    Case("an id past the vocabulary", "30522", _ids([[101, 102], [101, 30522]])),
    Case("an id that 32 bits cannot hold", "4294967301", _ids([[2**32 + 5, 102]])),
    Case("the least 64-bit id", str(-(2**63)), _ids([[-(2**63), 2**63 - 1]])),
    Case("a token type out of range", "token_type_ids", _ids([[9, 9]], token_type_ids=[[0, 2]])),
    Case("mask with holes", "attention_mask", _ids([[9, 9, 9]], attention_mask=[[1, 0, 1]])),
    Case("mask of zeros", "no tokens", _ids([[9, 9]], attention_mask=[[0, 0]])),
    Case("mask of another length", "[1, 2]", _ids([[9, 9, 9]], attention_mask=[[1, 1]])),
    Case("both text and ids", "both", {"text": HELLO, "input_ids": IDS}),
    Case("text with a mask", "both", {"text": HELLO, "attention_mask": IDS}),
    Case("mask alone", "attention_mask", {"attention_mask": IDS}),
    Case("truncate is a word", "truncate", *_with(truncate="yes")),
    Case("normalize is a number", "normalize", *_with(normalize=1)),
    Case("a parameter larger than an error may be", "20002", *_with(truncate="x" * 20_000)),
    Case("a misspelt parameter", "normalise", *_with(normalise=True)),
    Case("a timeout in seconds", "microseconds", *_with(timeout=30)),
)
THEIRS = (
    Case("no inputs", "0 inputs", {}),
    Case("wrong tensor name", "sentence", {"sentence": HELLO}),
    Case("text_pair where the task takes none", "text_pair", {"text": HELLO, "text_pair": HELLO}),
    Case("text as integers", "INT64", {"text": Tensor("INT64", (1, 1), bytes(8))}),
    Case("ids as INT32", "INT32", {"input_ids": Tensor("INT32", (1, 3), bytes(12))}),
    Case("ids as FP32", "FP32", {"input_ids": Tensor("FP32", (1, 3), bytes(12))}),
    Case("text of rank 1", "got [1]", _bytes((1,), HELLO.data)),
    Case("ids of rank 1", "got [2]", _ids([101, 102])),
    Case("ids of rank 3", "got [1,1,2]", _ids([[[101, 102]]])),
    Case("two texts in a row", "got [1,2]", _bytes((1, 2), HELLO.data * 2)),
    Case("10,000 rows of text", "batch-size", texts(*["row"] * 10_000)),
    Case("10,000 rows of ids", "batch-size", _ids(np.full((10_000, 8), 101))),
    Case("no rows", "text", _bytes((0, 1), b"")),
    Case("a prefix that promises too much", "500", _bytes((1, 1), b"\xf4\x01\0\0hello")),
    Case("the largest length prefix", "4294967295", _bytes((1, 1), b"\xff\xff\xff\xffhello")),
    Case("half a length prefix", "incomplete", _bytes((1, 1), b"\x05\x00")),
    Case("fewer strings than rows", "expected 2", _bytes((2, 1), HELLO.data)),
    Case("more strings than rows", "expecting 1", _bytes((1, 1), HELLO.data * 2)),
    Case("fewer bytes than ids", "got 10", {"input_ids": Tensor("INT64", (1, 3), bytes(10))}),
)
CASES = (*OURS, *THEIRS)

GOOD = ("A good request.", "ok", "The rest of the world does not concern this text. " * 9)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.description)
def test_bad_input_is_refused_and_the_message_leaks_nothing(client: Client, case: Case) -> None:
    with pytest.raises(AnswerError) as caught:
        client.infer("minilm", case.inputs, case.parameters)

    _check_refusal(caught.value, case)


def test_a_text_pair_needs_a_text_and_as_many_rows(client: Client) -> None:
    with pytest.raises(AnswerError, match="^INVALID_ARGUMENT: .*text_pair"):
        client.infer("classifier", {"text_pair": strings("word1")})
    with pytest.raises(AnswerError, match="batch size does not match"):
        client.infer("classifier", texts("word1", "word2") | {"text_pair": strings("word3")})


def test_a_parameter_that_is_not_a_number_is_ignored_or_refused(grpc_client: GrpcClient) -> None:
    # JSON has no NaN, and the server passes parameters to its backends as JSON
    for odd in (float("nan"), float("inf")):
        answer = grpc_client.infer("minilm", texts("hello"), {"odd": odd})
        np.testing.assert_array_equal(answer, grpc_client.infer("minilm", texts("hello")))
    with pytest.raises(AnswerError, match="^INVALID_ARGUMENT: .*truncate"):
        grpc_client.infer("minilm", texts("hello"), {"truncate": 0.5})


@pytest.mark.parametrize("member", [b'"trunc\xff": true', b'"note": "\xff"'], ids=["name", "value"])
def test_bytes_that_are_not_utf_8_in_a_parameter_are_refused_without_a_traceback(
    server: LocalServer, member: bytes
) -> None:
    tracebacks = server.log().count("Traceback")
    text = b'{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["hello"]}'
    body = b'{"inputs": [' + text + b'], "parameters": {' + member + b"}}"
    connection = http.client.HTTPConnection(LOOPBACK, server.http_port, timeout=TIMEOUT_SECONDS)

    connection.request("POST", "/v2/models/minilm/infer", body)
    response = connection.getresponse()
    message = json.loads(response.read())["error"]
    connection.close()

    assert response.status == 400
    assert "UTF-8" in message
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
            assert isinstance(error, AnswerError), f"{item.description}: {error!r}"
            _check_refusal(error, item)
        else:
            assert_close(answer.result(), expected[[item]], roundings=roundings["minilm"])
    invalid = sum(item in OURS for item in stream)
    right = sum(isinstance(item, int) for item in stream)
    wanted = before | {"ok": before["ok"] + right, "invalid": before["invalid"] + invalid}
    assert outcomes(server, "minilm") == wanted
    assert stub_of(server, "minilm") == stub, "the model's process did not survive"


def _check_refusal(error: AnswerError, case: Case) -> None:
    assert error.code == "INVALID_ARGUMENT", error
    assert case.word in error.message
    for leak in LEAKS:
        assert leak not in error.message
