"""Padded execution gives the answers of packed execution, for all attention and tasks."""

from dataclasses import replace

import numpy as np
import pytest

from tests.backend.requests import random_prompts
from tests.checkpoints import KIND_OF_TASK
from tests.closeness import assert_rows_close, encoder_roundings
from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Masks, RequestOptions, Unpooled

from .oracle import load_oracle, states_of

# Kinds of checkpoints, by what their attention has beside products.
KINDS = {
    "nothing": ("BertModel", "hidden"),
    "key heads and rotary": ("EuroBertModel", "hidden"),
    "causal": ("Qwen3Model", "hidden"),
    "windows": ("ModernBertModel", "hidden"),
    "biases": ("MPNetModel", "hidden"),
    "distances": ("DebertaV2Model", "hidden"),
    "one kind of distances": ("DebertaModel", "hidden"),
    "limits and causal windows": ("Gemma2ForSequenceClassification", "classify"),
    "experts": ("Qwen3MoeModel", "hidden"),
}
LENGTHS = ([9], [7, 7, 7], [3, 41, 1, 40, 17])


def runners(folder, task, dtype="fp32", **settings):
    """Return runners that pack and that pad."""
    return [
        Runner(
            Checkpoint.open(folder),
            EngineConfig(task=task, dtype=dtype, execution=execution, threads=1, **settings),
        )
        for execution in ("packed", "padded")
    ]


@pytest.mark.parametrize("kind, task", KINDS.values(), ids=KINDS)
def test_every_form_of_attention_is_as_packed(make_checkpoint, kind, task):
    folder = make_checkpoint(kind)
    packed, padded = runners(folder, task)
    programs = [[op.kernel for op in each.program.ops] for each in (packed, padded)]
    assert "attention_padded" not in programs[0]
    assert "attention_varlen" not in programs[1]

    for lengths in LENGTHS:
        prompts, options = random_prompts(lengths), [RequestOptions()] * len(lengths)
        expected, actual = (each.run(prompts, options) for each in (packed, padded))
        assert_rows_close(actual, expected, roundings=encoder_roundings(folder))


@pytest.mark.parametrize("kind, task", list(KINDS.values())[:6], ids=list(KINDS)[:6])
def test_bf16_keeps_the_direction_of_packed_vectors(make_checkpoint, kind, task):
    prompts = random_prompts(LENGTHS[-1])
    packed, padded = runners(make_checkpoint(kind), task, "bf16")

    answers = [each.run(prompts, [RequestOptions()] * len(prompts)) for each in (packed, padded)]

    expected, actual = (np.concatenate(rows) for rows in answers)
    norms = np.linalg.norm(expected, axis=1) * np.linalg.norm(actual, axis=1)
    # a checkpoint may embed a token as zeros
    assert ((expected * actual).sum(axis=1) >= 0.999 * norms).all()


def test_hidden_states_are_those_of_transformers(make_checkpoint):
    folder = make_checkpoint("BertModel")
    prompts = random_prompts(LENGTHS[-1])
    _, padded = runners(folder, "hidden")

    actual = padded.run(prompts, [RequestOptions()] * len(prompts))

    rows = [prompt.token_ids.tolist() for prompt in prompts]
    expected = states_of(load_oracle(folder, "BertModel"), rows)
    assert_rows_close(actual, expected, roundings=encoder_roundings(folder))


@pytest.mark.parametrize("task", KIND_OF_TASK)
def test_every_task_is_as_packed(make_checkpoint, task):
    folder = make_checkpoint(KIND_OF_TASK[task])
    prompts = random_prompts(LENGTHS[-1], types=2)
    if task == "fill_mask":
        prompts = [replace(each, payload=Masks(np.array([0], np.int32))) for each in prompts]
    if task == "embed":
        prompts[1] = replace(prompts[1], payload=Unpooled(3))
    options = [RequestOptions(normalize=number % 2 == 0) for number in range(len(prompts))]
    packed, padded = runners(folder, task)

    expected, actual = (each.run(prompts, options) for each in (packed, padded))

    assert_rows_close(actual, expected, roundings=encoder_roundings(folder))


def test_a_full_batch_of_tokens_fits(make_checkpoint):
    """Padding has sequences and no tokens where all texts have one token."""
    sizes = {"max_batch_tokens": 40, "max_batch_sequences": 40, "max_sequence_tokens": 40}
    _, padded = runners(make_checkpoint("BertModel"), "embed", **sizes)

    for lengths in ([1] * 40, [40], [20, 1]):
        answers = padded.run(random_prompts(lengths), [RequestOptions()] * len(lengths))
        assert not np.isnan(np.stack(answers)).any()

    assert padded.arena.largest["scores"] == 40 * 40
    assert padded.info.is_padded
