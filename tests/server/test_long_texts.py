"""A client that sends long texts: others get their answers, and memory is bounded."""

from pathlib import Path

import numpy as np
import pytest

from tests.closeness import assert_close

from .clients import AnswerError, texts
from .serving import metrics, stub_of, wait_until_idle

# The longest text and the largest request that a model takes by default.
NUM_BYTES = 65_536
ROWS = 64
SHORT = ["a river", "tea is blue", "seven runners of the river", "the"]
# Tokenizing one such request as a whole takes 350 MB.
MEMORY_BYTES = 200 * 2**20


@pytest.mark.parametrize(
    "piece", ["the quick brown fox ", "!", "中"], ids=["words", "marks", "chinese"]
)
def test_long_texts_cost_other_clients_no_answer_and_little_memory(
    grpc_client, server, in_process, roundings, piece
):
    long = texts(*[piece * (NUM_BYTES // len(piece.encode()))] * ROWS)
    expected = in_process.embed(SHORT)
    stub = stub_of(server, "minilm")
    reset_peak_memory(stub)
    before = peak_memory(stub)

    attacks = [grpc_client.start("minilm", long) for _ in range(3)]
    answers = [grpc_client.start("minilm", texts(text)) for text in SHORT * 5]

    for number, answer in enumerate(answers):
        row = number % len(SHORT)
        assert_close(answer.result(), expected[row : row + 1], roundings=roundings["minilm"])
    for attack in attacks:
        with pytest.raises(AnswerError, match="^INVALID_ARGUMENT: .*row 0: text has more than"):
            attack.result()
    wait_until_idle(server, "minilm")
    assert peak_memory(stub) - before < MEMORY_BYTES
    assert stub_of(server, "minilm") == stub
    assert metrics(server, "minilm")["varlen_queued_text_bytes"] == 0


@pytest.mark.parametrize("space", [" ", "\n"], ids=["words", "lines"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_long_texts_that_are_cut_get_the_answer_of_their_kept_end(grpc_client, side, space):
    truncate = {"truncate": True, "truncation_side": side}
    kept, cut = f"word1{space}word2{space}", f"word4{space}word5{space}"
    parts = [kept * 300, cut * (NUM_BYTES // len(cut) - 400)]
    text = "".join(parts if side == "right" else reversed(parts))
    long = texts(*[text] * 8, "word3")

    answer = grpc_client.infer("encoder", long, truncate)

    shorter = grpc_client.infer("encoder", texts(kept * 300), truncate)
    for row in answer[:8]:
        np.testing.assert_allclose(row, shorter[0], rtol=1e-4, atol=1e-5)


def reset_peak_memory(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_memory(pid: int) -> int:
    """Return the largest resident memory of a process since the last reset, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(value) * 1024
