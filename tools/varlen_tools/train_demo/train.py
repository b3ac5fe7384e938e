"""Training: a tokenizer, then a model, from a list of documents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional

from varlen_tools.train_demo.gpt2 import GPT2
from varlen_tools.train_demo.loop import Report, fit
from varlen_tools.train_demo.transformer import Shape, Training

END_OF_TEXT = "<|endoftext|>"


# Four layers of 256 learn to repeat the text's phrases in about a minute on two cores.
DEFAULT = Training(
    Shape(vocabulary=2048, positions=256, hidden=256, layers=4, heads=4),
    steps=130,
    samples=2,
    matrix_rate=0.03,
)


def train_tokenizer(documents: Sequence[str], vocabulary: int) -> Tokenizer:
    """Return a byte-level byte-pair tokenizer; `END_OF_TEXT` is token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> Tensor:
    """Return the tokens of all documents, `[tokens]` int64, each document with `END_OF_TEXT` after it."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch(documents)
    return torch.tensor([token for each in encodings for token in (*each.ids, end)])


def train(training: Training, token_ids: Tensor, report: Report) -> GPT2:
    """Return a model that was trained on `token_ids`, `[tokens]`."""
    draw = torch.Generator().manual_seed(training.seed)
    return fit(
        GPT2, training, lambda model: _loss(model, windows_of(token_ids, training, draw)), report
    )


def windows_of(token_ids: Tensor, training: Training, draw: torch.Generator) -> Tensor:
    """Return parts of the text, `[samples, positions + 1]`."""
    length = training.shape.positions + 1
    begins = torch.randint(len(token_ids) - length + 1, (training.samples,), generator=draw)
    return torch.stack([token_ids[begin : begin + length] for begin in begins.tolist()])


def _loss(model: GPT2, windows: Tensor) -> Tensor:
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
