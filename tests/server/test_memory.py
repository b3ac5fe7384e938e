"""The arena in the real server: refusals, metrics, and answers equal to the bit."""

import random

import numpy as np
import pytest
import torch

from tests.checkpoints import SPECIAL_TOKENS, WORDS
from tests.closeness import assert_close
from tests.plain_run import pack, run_without_arena
from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import Program
from varlen.request.request import Prompt, RequestOptions
from varlen_kernels import cpu

from .clients import AnswerError, Array, Tensor, integers
from .serving import add_model, load, metrics, unload

pytestmark = pytest.mark.full

PLAIN = RequestOptions()
VOCAB_SIZE = len(SPECIAL_TOKENS) + len(WORDS)

# Fits 150 tokens of the checkpoint `encoder`: six results of 32 numbers each.
ARENA_BYTES = 150 * 6 * 32 * 4


@pytest.fixture
def small_arena(server, repository, checkpoints):
    """A model with a small arena."""
    name = "small_arena"
    if not (repository / name).exists():
        add_model(
            repository, name, checkpoints["encoder"], arena_bytes=str(ARENA_BYTES), threads="1"
        )
    assert load(server, name) is None
    yield name
    unload(server, name)


def test_a_sequence_without_room_is_refused(small_arena, client):
    fitting = integers(np.full((1, 150), 9))
    assert client.infer(small_arena, {"input_ids": fitting}).shape == (1, 32)

    with pytest.raises(AnswerError, match="^INVALID_ARGUMENT: .*enough for 150 tokens"):
        client.infer(small_arena, {"input_ids": integers(np.full((1, 151), 9))})


def test_many_rows_run_in_batches_that_fit(
    small_arena, server, grpc_client, checkpoints, roundings
):
    rows = np.arange(64 * 100).reshape(64, 100) % VOCAB_SIZE
    runner = Runner(Checkpoint.open(checkpoints["encoder"]), EngineConfig(dtype="fp32"))
    sequences = [Prompt(row.astype(np.int32)) for row in rows[:40]]
    expected = runner.run(sequences, [PLAIN] * 40)
    runner.close()

    answers = grpc_client.infer(small_arena, {"input_ids": integers(rows)})

    assert_close(answers[:40], expected, roundings=roundings["encoder"])
    seen = metrics(server, small_arena)
    assert seen["varlen_arena_reserved_bytes"] <= seen["varlen_arena_capacity_bytes"] <= ARENA_BYTES


def test_an_arena_without_room_for_one_token_ends_the_load(server, repository, checkpoints):
    add_model(repository, "roomless", checkpoints["encoder"], arena_bytes="100")

    assert "arena_bytes" in (load(server, "roomless") or "")


@pytest.fixture
def whole(server, repository, checkpoints):
    """A model that runs each request as one batch."""
    name = "whole"
    if not (repository / name).exists():
        add_model(repository, name, checkpoints["classifier"], policy="token_budget")
    assert load(server, name) is None
    yield name
    unload(server, name)


def test_answers_are_bit_equal_to_those_of_a_forward_pass_without_an_arena(
    client, whole, one_core, checkpoints
):
    runner = Runner(Checkpoint.open(checkpoints["classifier"]), EngineConfig(dtype="fp32"))
    numbers = random.Random(0)
    for _ in range(100):
        lengths = [numbers.randint(1, 200) for _ in range(numbers.randint(1, 16))]
        rows = [[numbers.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]

        # sent one after the other, so each request is a batch
        answers = client.infer(whole, padded(rows))

        assert np.array_equal(answers, without_arena(runner.program, rows))
    runner.close()


@pytest.fixture
def one_core():
    """Run torch on one core, like the served model."""
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(kept)


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    """Return token ids as inputs: rows padded to one length, with a mask."""
    width = max(map(len, rows))
    return {
        "input_ids": integers([row + [0] * (width - len(row)) for row in rows]),
        "attention_mask": integers([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    }


def without_arena(program: Program, rows: list[list[int]]) -> Array:
    """Return the answers of a program run without an arena, by row.

    The rows are packed in the same order as in the server.
    """
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    prompts = [Prompt(np.array(rows[index], dtype=np.int32)) for index in order]
    (output,) = run_without_arena(program, pack(program, prompts, PLAIN).inputs, cpu)
    answers: Array = output.numpy()
    return answers[np.argsort(order)]
