"""Limits: a request past one is refused with its value and the allowed one."""

from collections import Counter
from concurrent.futures import Future

import numpy as np
import pytest

from tests.closeness import assert_close

from .clients import AnswerError, Array, Tensor, integers, texts
from .serving import outcomes, wait_until, wait_until_idle

# 32,000 tokens: the model `capped` lets 40,000 wait, so one of these fits and a second beside it does not.
BULK = {"input_ids": integers(np.ones((64, 500)))}
SMALL = {"input_ids": integers([[2, 3]])}


def test_a_text_longer_than_max_text_bytes_is_refused(client):
    with pytest.raises(AnswerError, match="^INVALID_ARGUMENT: .*4100 bytes"):
        client.infer("capped", texts("word1 " * 683 + "ok"))


def test_a_sequence_longer_than_max_sequence_tokens_is_refused(client):
    # the checkpoint itself would take 512
    with pytest.raises(AnswerError, match="^INVALID_ARGUMENT: .*501 tokens"):
        client.infer("capped", {"input_ids": integers(np.ones((1, 501)))})
    assert client.infer("capped", {"input_ids": integers(np.ones((1, 500)))}).shape == (1, 128)


@pytest.mark.parametrize(
    ("extra", "word"),
    [(SMALL, "requests wait"), (BULK, "tokens wait")],
    ids=["max_queued_requests", "max_queued_tokens"],
)
def test_a_full_queue_refuses_at_once_and_serves_what_it_took(
    client, server, roundings, extra, word
):
    wait_until_idle(server, "capped")
    before = outcomes(server, "capped")
    small, bulk = (client.infer("capped", inputs) for inputs in (SMALL, BULK))
    sent: list[tuple[Future[Array], Array]] = []

    def send(inputs: dict[str, Tensor]) -> Future[Array]:
        """Send a request, and record its future with the expected answer."""
        answer = client.start("capped", inputs)
        sent.append((answer, small if inputs is SMALL else bulk))
        return answer

    def is_refused() -> bool:
        """Send a few more requests, and return whether the limit refused one."""
        burst = [send(extra) for _ in range(4)]
        refused = any(word in str(answer.exception()) for answer in burst)
        if not refused:
            send(BULK)
        return refused

    send(BULK)
    wait_until(is_refused, "a request is refused")
    # `small` and `bulk`
    counted: Counter[str] = Counter(ok=2)
    for answer, expected in sent:
        error = answer.exception()
        if error is None:
            assert_close(answer.result(), expected, roundings=roundings["slow"])
        else:
            assert isinstance(error, AnswerError)
            assert error.code == "UNAVAILABLE"
        counted["ok" if error is None else "refused"] += 1
    wanted = before | {name: before[name] + count for name, count in counted.items()}
    assert outcomes(server, "capped") == wanted
    wait_until_idle(server, "capped")
    assert_close(client.infer("capped", SMALL), small, roundings=roundings["slow"])
