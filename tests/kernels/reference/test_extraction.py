"""The ops of words and labels match float64, sequence by sequence."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.closeness import assert_close
from varlen_kernels import reference

WORDS, LABELS = [3, 0, 1, 9], [2, 1, 0, 3]


def bounds(counts):
    """Return cumulative starts, then the sum."""
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def rows(counts):
    """Return the rows of each sequence."""
    ends = bounds(counts).tolist()
    return [slice(*each) for each in pairwise(ends)]


@pytest.mark.parametrize("hidden", [1, 8, 33])
def test_lstm_matches_torch_in_float64(hidden):
    torch.manual_seed(0)
    exact = nn.LSTM(7, hidden, batch_first=True, bidirectional=True).double()
    x = torch.randn(sum(WORDS), 7)
    ways = ("", "_reverse")
    weights = [
        torch.stack([getattr(exact, f"weight_{kind}_l0{way}") for way in ways]).float().detach()
        for kind in ("ih", "hh")
    ]
    bias = torch.stack(
        [
            torch.stack([getattr(exact, f"bias_{kind}_l0{way}") for kind in ("ih", "hh")])
            for way in ways
        ]
    )
    out = torch.full((len(x), 2 * hidden), torch.nan)

    reference.bidirectional_lstm(x, *weights, bias.float().detach(), bounds(WORDS), out=out)

    for part in rows(WORDS):
        if part.start < part.stop:
            expected = exact(x[part].double()[None])[0][0]
            assert_close(out[part], expected.detach(), roundings=9 * (7 + hidden) * 3)


@pytest.mark.parametrize("width", [1, 4, 12])
def test_span_scores_match_float64(width):
    torch.manual_seed(0)
    starts, ends = torch.randn(2, sum(WORDS), 10)
    labels, offsets = torch.randn(sum(LABELS), 10), torch.randn(sum(LABELS), 1)

    found = reference.span_scores(
        starts, ends, labels, offsets, bounds(WORDS), bounds(LABELS), width=width
    )

    expected = []
    for words, columns in zip(rows(WORDS), rows(LABELS), strict=True):
        for first in range(words.start, words.stop):
            for label in range(columns.start, columns.stop):
                for last in range(first, first + width):
                    hidden = (starts[first].double() + ends[min(last, len(ends) - 1)]).relu()
                    score = hidden @ labels[label].double() + offsets[label, 0]
                    expected.append(float(score) if last < words.stop else -torch.inf)
    expected = torch.tensor(expected, dtype=torch.float64).view(-1, width)
    assert_close(found, expected, roundings=12)


def test_word_scores_match_float64():
    torch.manual_seed(0)
    words, factors = torch.randn(sum(WORDS), 10), torch.randn(sum(WORDS), 5)
    labels, label_factors = torch.randn(sum(LABELS), 10), torch.randn(sum(LABELS), 5)
    mixed, weight, bias = torch.randn(5, 10), torch.randn(10, 3), torch.randn(3)
    arguments = words, factors, labels, label_factors, mixed, weight, bias

    found = reference.word_scores(*arguments, bounds(WORDS), bounds(LABELS))

    words, factors, labels, label_factors, mixed, weight, bias = (x.double() for x in arguments)
    expected = [
        (words[i] + labels[j] + (factors[i] * label_factors[j]) @ mixed).relu() @ weight + bias
        for of_words, of_labels in zip(rows(WORDS), rows(LABELS), strict=True)
        for i in range(of_words.start, of_words.stop)
        for j in range(of_labels.start, of_labels.stop)
    ]
    assert_close(found, torch.stack(expected), roundings=18)
