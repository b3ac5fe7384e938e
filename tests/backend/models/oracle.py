"""Reference outputs of transformers, one sequence at a time, in fp32."""

import numpy as np
import torch
import transformers

from tests.closeness import assert_rows_close, encoder_roundings, relative_error
from varlen import Encoder

from . import stated


def class_of(kind):
    """Return a class of `stated`, else of transformers."""
    return getattr(stated, kind, None) or getattr(transformers, kind)


def load_oracle(folder, kind="BertModel", **settings):
    """Return the checkpoint loaded by the class `kind`: of `stated`, else of transformers."""
    loader = class_of(kind)
    return loader.from_pretrained(folder, dtype=torch.float32, **settings).eval()


@torch.inference_mode()
def one_by_one(model, rows, types=None):
    """Return transformers' output for each row of token ids, run by itself."""
    types = types or [[0] * len(row) for row in rows]
    return [
        model(input_ids=torch.tensor([row]), token_type_ids=torch.tensor([kinds]))
        for row, kinds in zip(rows, types, strict=True)
    ]


def hidden_states(model, rows, types=None):
    """Return the last hidden state of each row of token ids."""
    return [output.last_hidden_state[0] for output in one_by_one(model, rows, types)]


@torch.inference_mode()
def outputs(model, rows):
    """Return what a model without token types returns for each row of token ids."""
    return [model(torch.tensor([row])) for row in rows]


def states_of(model, rows):
    """Return the last hidden state of each row of a model without token types."""
    return [output.last_hidden_state[0] for output in outputs(model, rows)]


def logits_of(model, rows):
    """Return the logits of each row of a model without token types."""
    return [output.logits[0] for output in outputs(model, rows)]


@torch.inference_mode()
def decoded(model, rows):
    """Return a decoder's hidden states, and logits if it has them, of each row."""
    inputs = [torch.tensor([row]) for row in rows]
    hidden = [model.base_model(each).last_hidden_state[0] for each in inputs]
    has_logits = hasattr(model, "lm_head")
    return hidden, [model(each).logits[0] for each in inputs] if has_logits else hidden


@torch.inference_mode()
def translated(model, pairs):
    """Return the logits of all tokens of each target, given `(source, target)` token ids."""
    return [
        model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target])).logits[0]
        for source, target in pairs
    ]


@torch.inference_mode()
def assert_greedy(model, row, tokens, *, roundings):
    """Fail unless each token is the likeliest after those before it, but for rounding."""
    if getattr(model.config, "is_encoder_decoder", False):
        start = [model.config.decoder_start_token_id]
        given = {"input_ids": torch.tensor([row])}
        logits = model(decoder_input_ids=torch.tensor([start + tokens[:-1]]), **given).logits[0]
    else:
        logits = model(input_ids=torch.tensor([row + tokens[:-1]])).logits[0, len(row) - 1 :]
    assert len(logits) == len(tokens)
    bound = relative_error(roundings) * logits.abs().amax(1)
    chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert (logits.amax(1) - chosen <= bound).all()


def assert_hidden_states_match(folder, model, rows):
    """Compare our encoder's hidden states with a transformers model."""
    with Encoder.from_pretrained(folder, task="hidden", dtype="fp32") as encoder:
        actual = encoder.hidden(rows)
    assert all(row.dtype == np.float32 for row in actual)
    assert_rows_close(actual, hidden_states(model, rows), roundings=encoder_roundings(folder))


def assert_states_equal(folder, expected, rows):
    """Compare hidden states in fp32, in a batch and of each row alone; return both.

    Args:
        expected: hidden states of each row, `[tokens, hidden]`.
    """
    with Encoder.from_pretrained(folder, task="hidden", dtype="fp32") as encoder:
        together = encoder.hidden(rows)
        alone = [encoder.hidden([row])[0] for row in rows]
    roundings = encoder_roundings(folder)
    assert_rows_close(together, expected, roundings=roundings)
    assert_rows_close(alone, expected, roundings=roundings)
    return together, alone
