"""Caps: past one, the caller hears at once what came and what is allowed."""

import re
from collections import Counter
from concurrent.futures import Future

import numpy as np
import pytest

from varlen_tools.local_server import LocalServer

from .clients import AnswerError, Array, Client, Tensor, integers, texts
from .serving import outcomes, wait_until, wait_until_idle

# 32,000 tokens: the model `capped` lets 40,000 wait, so one of these fits and a second beside it does not.
BULK = {"input_ids": integers(np.ones((64, 500)))}
SMALL = {"input_ids": integers([[2, 3]])}


def test_a_text_longer_than_max_text_bytes_is_refused(client: Client) -> None:
    with pytest.raises(AnswerError, match="row 0: text has 4100 bytes.* at most 4096") as caught:
        client.infer("capped", texts("word1 " * 683 + "ok"))

    assert caught.value.code == "INVALID_ARGUMENT"


def test_a_sequence_longer_than_max_sequence_tokens_is_refused(client: Client) -> None:
    # the checkpoint itself would take 512
    with pytest.raises(AnswerError, match="input_ids has 501 tokens.* at most 500") as caught:
        client.infer("capped", {"input_ids": integers(np.ones((1, 501)))})

    assert caught.value.code == "INVALID_ARGUMENT"
    assert client.infer("capped", {"input_ids": integers(np.ones((1, 500)))}).shape == (1, 128)


@pytest.mark.parametrize(
    ("fill", "extra", "says"),
    [
        (BULK, SMALL, r"the queue is full: 2 requests wait and 2 may; try again later"),
        (
            BULK,
            BULK,
            r"the queue is full: \d+ tokens wait, 32000 came and 40000 may wait; try again later",
        ),
    ],
    ids=["max_queued_requests", "max_queued_tokens"],
)
def test_a_full_queue_refuses_at_once_and_serves_what_it_took(
    client: Client,
    server: LocalServer,
    fill: dict[str, Tensor],
    extra: dict[str, Tensor],
    says: str,
) -> None:
    wait_until_idle(server, "capped")
    before = outcomes(server, "capped")
    expected = [client.infer("capped", inputs)[0] for inputs in (SMALL, BULK)]
    sent: list[Future[Array]] = [client.start("capped", fill)]

    def is_refused() -> bool:
        """Send a few more beside what runs, and return whether that cap was hit."""
        burst = [client.start("capped", extra) for _ in range(4)]
        sent.extend(burst)
        refused = any(re.search(says, str(answer.exception())) for answer in burst)
        if not refused:
            sent.append(client.start("capped", fill))
        return refused

    wait_until(is_refused, "a request is refused")
    # the two that `expected` took
    counted: Counter[str] = Counter(ok=2)
    for answer in sent:
        error = answer.exception()
        if error is None:
            vector = answer.result()[0]
            assert min(abs(vector - right).max() for right in expected) < 1e-5
        else:
            assert isinstance(error, AnswerError)
            assert error.code == "UNAVAILABLE"
            assert error.message.startswith("the queue is full: ")
        counted["ok" if error is None else "refused"] += 1
    wanted = before | {name: before[name] + count for name, count in counted.items()}
    assert outcomes(server, "capped") == wanted
    wait_until_idle(server, "capped")
    np.testing.assert_allclose(client.infer("capped", SMALL)[0], expected[0], rtol=0, atol=1e-6)
