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


# labels of each instance, and its number: three things of two labels, classes, two things of one label
OF_INSTANCES, NUMBERS = [2, 2, 2, 3, 1, 1], [0, 1, 2, -1, 0, 1]


@pytest.mark.parametrize("has_out", [False, True])
def test_gru_states_match_torch_in_float64(has_out):
    torch.manual_seed(0)
    exact = nn.GRU(7, 9).double()
    x, own = torch.randn(4, 7), torch.randn(6, 9)
    of_input, of_state = (
        (getattr(exact, f"weight_{kind}_l0"), getattr(exact, f"bias_{kind}_l0"))
        for kind in ("ih", "hh")
    )
    gates = (x.double() @ of_input[0].T + of_input[1]).float().detach()
    first, classes, last = own[:2], own[2:5], own[5:]
    labels = torch.cat([first, first, first, classes, last, last])
    out = torch.full_like(labels, torch.nan) if has_out else None

    found = reference.gru_states(
        labels,
        gates,
        of_state[0].T.float().detach(),
        of_state[1].float().detach(),
        bounds(OF_INSTANCES),
        torch.tensor(NUMBERS, dtype=torch.int32),
        out=out,
    )

    def states(begin, count):
        steps = x[:count].double()[:, None].expand(-1, len(begin), -1)
        return exact(steps.contiguous(), begin.double()[None])[0].flatten(0, 1).detach()

    expected = torch.cat([states(first, 3), classes.double(), states(last, 2)])
    assert_close(found, expected, roundings=72)
    assert out is None or found is out


@pytest.mark.parametrize("has_out", [False, True])
def test_labels_beyond_the_count_are_out_of_reach_and_classes_have_their_scores(has_out):
    count = sum(OF_INSTANCES)
    labels, offsets = torch.randn(count, 4), torch.arange(float(count))[:, None]
    classes = -offsets
    # two things, then one
    counts = torch.tensor([[0.0, 1, 2], [0, 1, 2], [0, 1, 2], [3, 0, 0], [0, 3, 1], [0, 3, 1]])
    out = (torch.full_like(labels, torch.nan), torch.empty_like(offsets)) if has_out else None

    kept, made = reference.count_labels(
        labels,
        offsets,
        classes,
        counts,
        bounds(OF_INSTANCES),
        torch.tensor(NUMBERS, dtype=torch.int32),
        out=out,
    )

    inf = torch.inf
    assert made[:, 0].tolist() == [0, 1, 2, 3, -inf, -inf, -6, -7, -8, 9, -inf]
    expected = labels.clone()
    expected[6:9] = 0
    assert torch.equal(kept, expected)


def test_no_instance_has_no_state():
    empty, none = torch.empty(0, 4), torch.empty(0, dtype=torch.int32)
    gates, weight, bias = torch.randn(2, 12), torch.randn(4, 12), torch.randn(12)

    assert reference.gru_states(empty, gates, weight, bias, bounds([]), none).shape == (0, 4)
    ones = empty[:, :1]
    kept, made = reference.count_labels(empty, ones, ones, torch.empty(0, 3), bounds([]), none)
    assert kept.shape == (0, 4)
    assert made.shape == (0, 1)
