"""Invalid requests get the right error code, and no valid request is affected."""

import http.client
import json
import random
from concurrent.futures import Future

import numpy as np
import pytest

from tests.closeness import assert_close
from varlen_tools.local_server import LOOPBACK

from .bad_requests import CASES, OURS, BadRequest
from .clients import AnswerError, Array, strings, texts
from .serving import TIMEOUT_SECONDS, outcomes, stub_of

# Text about the server's internals, which messages for clients must not contain.
LEAKS = ("/", "Traceback", ".py", "shm", "numpy", "0x")


GOOD = ("A good request.", "ok", "The rest of the world does not concern this text. " * 9)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.description)
def test_bad_input_is_refused_and_the_message_leaks_nothing(client, case):
    with pytest.raises(AnswerError) as caught:
        client.infer("minilm", case.inputs, case.parameters)

    _check_refusal(caught.value, case)


def test_a_text_pair_needs_a_text_and_as_many_rows(client):
    with pytest.raises(AnswerError, match="^INVALID_ARGUMENT: .*text_pair"):
        client.infer("classifier", {"text_pair": strings("word1")})
    with pytest.raises(AnswerError, match="batch size does not match"):
        client.infer("classifier", texts("word1", "word2") | {"text_pair": strings("word3")})


def test_a_parameter_that_is_not_a_number_is_ignored_or_refused(grpc_client):
    # JSON has no NaN, and the server passes parameters to its backends as JSON
    for odd in (float("nan"), float("inf")):
        answer = grpc_client.infer("minilm", texts("hello"), {"odd": odd})
        np.testing.assert_array_equal(answer, grpc_client.infer("minilm", texts("hello")))
    with pytest.raises(AnswerError, match="^INVALID_ARGUMENT: .*truncate"):
        grpc_client.infer("minilm", texts("hello"), {"truncate": 0.5})


@pytest.mark.parametrize("member", [b'"trunc\xff": true', b'"note": "\xff"'], ids=["name", "value"])
def test_bytes_that_are_not_utf_8_in_a_parameter_are_refused_without_a_traceback(server, member):
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
    client, server, in_process, roundings
):
    expected = in_process.embed(GOOD)
    stub, before = stub_of(server, "minilm"), outcomes(server, "minilm")
    stream: list[BadRequest | int] = [*CASES, *CASES, *CASES, *(list(range(len(GOOD))) * 60)]
    random.Random(0).shuffle(stream)

    sent: list[tuple[BadRequest | int, Future[Array]]] = []
    for item in stream:
        inputs = item.inputs if isinstance(item, BadRequest) else texts(GOOD[item])
        parameters = item.parameters if isinstance(item, BadRequest) else {}
        sent.append((item, client.start("minilm", inputs, parameters)))

    for item, answer in sent:
        if isinstance(item, BadRequest):
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


def _check_refusal(error: AnswerError, case: BadRequest) -> None:
    assert error.code == "INVALID_ARGUMENT", error
    assert case.word in error.message
    for leak in LEAKS:
        assert leak not in error.message
