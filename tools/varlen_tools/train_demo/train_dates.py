"""Training of the date model: a tokenizer, then a Marian model, from written dates."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor
from torch.nn import functional

from varlen_tools.train_demo.dates import FORM_WEIGHTS, Example, training_examples
from varlen_tools.train_demo.loop import Report, fit
from varlen_tools.train_demo.marian import Marian
from varlen_tools.train_demo.transformer import Shape, Training

END, UNKNOWN, PAD = "</s>", "<unk>", "<pad>"
# The tokenizer puts them first.
END_ID, PAD_ID = 0, 2
# Enough to make every word of a date one token.
_TOKENIZER_EXAMPLES = 5_000
_EVALUATION_BATCH = 256


# Two layers of 128 on each side learn the forms in about a minute on two cores.
DEFAULT_DATES = Training(
    Shape(vocabulary=400, positions=128, hidden=128, layers=2, heads=4), steps=400, samples=64
)


def train_date_tokenizer(vocabulary: int, seed: int) -> Tokenizer:
    """Return a byte-pair tokenizer that lower-cases, and adds `END` to a text.

    Digits and punctuation marks are tokens of their own.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="never"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Punctuation(),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END, UNKNOWN, PAD], show_progress=False
    )
    examples = training_examples(_TOKENIZER_EXAMPLES, random.Random(seed))
    tokenizer.train_from_iterator((example.source for example in examples), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, END_ID)]
    )
    return tokenizer


def train_dates(training: Training, tokenizer: Tokenizer, report: Report) -> Marian:
    """Return a model that was trained to rewrite dates."""
    numbers = random.Random(training.seed)
    return fit(
        Marian,
        training,
        lambda model: _loss(
            model, tokenizer, training_examples(training.samples, numbers, FORM_WEIGHTS)
        ),
        report,
    )


@torch.inference_mode()
def rewrite(model: Marian, tokenizer: Tokenizer, sources: Sequence[str], tokens: int) -> list[str]:
    """Return the model's greedy answers, of at most `tokens` tokens each."""
    token_ids, mask = _padded(tokenizer, sources)
    source = model.encode(token_ids, mask)
    answers = torch.full((len(sources), 1), PAD_ID)
    for _ in range(tokens):
        logits = model.decode(answers, source, mask)[:, -1]
        answers = torch.cat([answers, logits.argmax(-1, keepdim=True)], dim=1)
    rows = [row[: row.index(END_ID)] if END_ID in row else row for row in answers[:, 1:].tolist()]
    return tokenizer.decode_batch(rows)


def exact_matches(model: Marian, tokenizer: Tokenizer, examples: Sequence[Example]) -> int:
    """Return the number of examples whose greedy answer is the date in ISO form."""
    # similar lengths together, for little padding
    examples = sorted(examples, key=lambda example: len(example.source))
    longest = max(len(tokenizer.encode(example.target).ids) for example in examples)
    correct = 0
    for begin in range(0, len(examples), _EVALUATION_BATCH):
        batch = examples[begin : begin + _EVALUATION_BATCH]
        answers = rewrite(model, tokenizer, [example.source for example in batch], longest)
        correct += sum(
            answer == example.target for answer, example in zip(answers, batch, strict=True)
        )
    return correct


def _loss(model: Marian, tokenizer: Tokenizer, examples: Sequence[Example]) -> Tensor:
    token_ids, mask = _padded(tokenizer, [example.source for example in examples])
    # dates in ISO form have equally many tokens
    targets = torch.tensor(
        [encoding.ids for encoding in tokenizer.encode_batch([e.target for e in examples])]
    )
    starts = targets.new_full((len(examples), 1), PAD_ID)
    logits = model.decode(
        torch.cat([starts, targets[:, :-1]], dim=1), model.encode(token_ids, mask), mask
    )
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _padded(tokenizer: Tokenizer, sources: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return token ids `[batch, tokens]` and the mask of real tokens `[batch, 1, 1, tokens]`."""
    rows = [encoding.ids for encoding in tokenizer.encode_batch(list(sources))]
    longest = max(map(len, rows))
    token_ids = torch.tensor([row + [PAD_ID] * (longest - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(longest) < lengths[:, None]
    return token_ids, mask[:, None, None]
