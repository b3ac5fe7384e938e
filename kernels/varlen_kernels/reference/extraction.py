"""The ops of a model that scores spans of words with labels, in plain torch.

Words and labels are packed: `cu_words` and `cu_labels` have the bounds of each sequence. A pair is a word and a label
of one sequence; pairs are in the order of sequences, then words, then labels.
Sources: Zaratiana et al. 2023, arXiv:2311.08526, and 2025, arXiv:2507.18546; span `markerV0` and the token scorer as
the library gliner has them, counts as gliner2 has them.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

__all__ = ["bidirectional_lstm", "count_labels", "gru_states", "span_scores", "word_scores"]

# Numbers of a temporary tensor, so that it stays in a cache.
_NUMBERS_PER_STEP = 1 << 18


def bidirectional_lstm(
    x: Tensor,
    input_weight: Tensor,
    hidden_weight: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the states of an LSTM that reads each sequence in both directions, `[rows, 2 · hidden]`.

    The states of the first direction come before the states of the second one. Gates are in the order of torch: input,
    forget, cell, output.

    Args:
        x: `[rows, features]` fp32.
        input_weight: `[2, 4 · hidden, features]`, of each direction.
        hidden_weight: `[2, 4 · hidden, hidden]`.
        bias: `[2, 2, 4 · hidden]`: of each direction, the bias of inputs, then of states.

    Source: Hochreiter, Schmidhuber 1997; the forget gate of Gers et al. 1999.
    """
    out = x.new_empty(len(x), 2 * hidden_weight.shape[2]) if out is None else out
    bounds = cu_seqlens.tolist()
    rows = [slice(*each) for each in pairwise(bounds) if each[0] < each[1]]
    if not rows:
        return out
    packed = pack_sequence([x[each] for each in rows], enforce_sorted=False)
    parameters = [
        part
        for direction in range(2)
        for part in (input_weight[direction], hidden_weight[direction], *bias[direction])
    ]
    zeros = x.new_zeros(2, len(rows), hidden_weight.shape[2])
    states, *_ = torch._VF.lstm(  # the function behind torch.nn.LSTM
        packed.data, packed.batch_sizes, (zeros, zeros), parameters, True, 1, 0.0, False, True
    )
    for part, found in zip(rows, unpack_sequence(packed._replace(data=states)), strict=True):
        out[part] = found
    return out


def gru_states(
    labels: Tensor,
    gates: Tensor,
    weight: Tensor,
    bias: Tensor,
    cu_instances: Tensor,
    numbers: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the states of a gated recurrent unit, `[labels, hidden]`.

    An instance is a number and its labels. Labels of number k follow the same labels of number k - 1: the unit begins
    with a label, and has read the numbers from 0 to k. Gates are in the order of torch: reset, update, new.

    Args:
        labels: `[labels, hidden]` fp32.
        gates: `[numbers, 3 · hidden]`, what each number gives the gates, with its bias.
        weight: `[hidden, 3 · hidden]`, of states.
        bias: `[3 · hidden]`, likewise.
        cu_instances: `[instances + 1]` int32, bounds of their labels.
        numbers: `[instances]` int32; the unit does not run where it is below 0.

    Source: Cho et al. 2014, arXiv:1406.1078; the reset gate as in `torch.nn.GRU`.
    """
    states = labels.clone() if out is None else out.copy_(labels)
    sizes = cu_instances.diff().long()
    # [labels] the number of each label, and how many rows before it the same label of the number before is
    steps, back = numbers.repeat_interleave(sizes), sizes.repeat_interleave(sizes)
    for number in range(int(numbers.max()) + 1 if len(numbers) else 0):
        rows = (steps == number).nonzero()[:, 0]
        before = states[rows - back[rows]] if number else states[rows]
        of_reset, of_update, of_new = torch.addmm(bias, before, weight).chunk(3, dim=1)
        reset, update, new = gates[number].chunk(3)
        found = torch.tanh(new + torch.sigmoid(of_reset + reset) * of_new)
        states[rows] = torch.lerp(found, before, torch.sigmoid(of_update + update))
    return states


def count_labels(
    labels: Tensor,
    offsets: Tensor,
    classes: Tensor,
    counts: Tensor,
    cu_instances: Tensor,
    numbers: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return labels and their offsets, with the counts of instances and the scores of classes.

    The offset of an instance beyond the count is -inf. A class is multiplied with no span: its row is 0, and its offset
    is its score.

    Args:
        labels: `[labels, inner]` fp32.
        offsets: `[labels, 1]` fp32.
        classes: `[labels, 1]` fp32, the score of each label as a class.
        counts: `[instances, numbers]`, logits of the number of instances, from 0.
        cu_instances: `[instances + 1]` int32, bounds of their labels.
        numbers: `[instances]` int32, from 0; below 0 the labels are classes.
    """
    sizes = cu_instances.diff().long()
    is_class = (numbers < 0).repeat_interleave(sizes)[:, None]
    is_absent = (counts.argmax(dim=1) <= numbers) & (numbers >= 0)
    made = torch.where(is_class, classes, offsets)
    made.masked_fill_(is_absent.repeat_interleave(sizes)[:, None], -torch.inf)
    kept = labels.masked_fill(is_class, 0)
    return (kept, made) if out is None else (out[0].copy_(kept), out[1].copy_(made))


def span_scores(
    starts: Tensor,
    ends: Tensor,
    labels: Tensor,
    offsets: Tensor,
    cu_words: Tensor,
    cu_labels: Tensor,
    *,
    width: int,
    out: Tensor | None = None,
) -> Tensor:
    """Return the logit of each span and label, `[pairs, width]` fp32.

    Entry k of a pair is of the span from its word to the k-th word after it: the product of relu(start + end) with the
    label, plus the label's offset. It is -inf beyond the last word of the sequence.

    Args:
        starts, ends: `[words, inner]` fp32.
        labels: `[labels, inner]` fp32.
        offsets: `[labels, 1]` fp32.
        cu_words, cu_labels: `[sequences + 1]` int32.
        width: words of the longest span.
    """
    result = _new_scores(starts, cu_words, cu_labels, width, out)
    inner = starts.shape[1]
    for words, columns, scores in _sequences(cu_words, cu_labels, result):
        # [words, inner, width], a view
        following = pad(ends[words], (0, 0, 0, width - 1)).unfold(0, width, 1)
        transposed, added = labels[columns].t(), offsets[columns, 0]
        for part in _parts(len(scores), width * inner):
            hidden = (starts[words][part, :, None] + following[part]).relu_().transpose(1, 2)
            scores[part] = (hidden @ transposed + added).transpose(1, 2)
        for beyond in range(1, min(width, len(scores) + 1)):
            scores[len(scores) - beyond, :, beyond:] = -torch.inf
    return result


def word_scores(
    words: Tensor,
    word_factors: Tensor,
    labels: Tensor,
    label_factors: Tensor,
    mixed: Tensor,
    weight: Tensor,
    bias: Tensor,
    cu_words: Tensor,
    cu_labels: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return three logits of each word and label, `[pairs, 3]` fp32.

    A span of the label starts at the word, ends there, or has the word inside.

    They are relu(word + label + (word factors · label factors) @ mixed) @ weight + bias.

    Args:
        words: `[words, inner]` fp32.
        word_factors: `[words, hidden]` fp32.
        labels: `[labels, inner]` fp32.
        label_factors: `[labels, hidden]` fp32.
        mixed: `[hidden, inner]`.
        weight: `[inner, 3]`.
        bias: `[3]`.
        cu_words, cu_labels: `[sequences + 1]` int32.
    """
    result = _new_scores(words, cu_words, cu_labels, weight.shape[1], out)
    for rows, columns, scores in _sequences(cu_words, cu_labels, result):
        for part in _parts(len(scores), scores.shape[1] * words.shape[1]):
            products = word_factors[rows][part, None] * label_factors[columns]
            hidden = products @ mixed + words[rows][part, None] + labels[columns]
            scores[part] = hidden.relu_() @ weight + bias
    return result


def _new_scores(
    words: Tensor, cu_words: Tensor, cu_labels: Tensor, columns: int, out: Tensor | None
) -> Tensor:
    if out is not None:
        return out
    pairs = int((cu_words.diff().long() * cu_labels.diff().long()).sum())
    return words.new_empty(pairs, columns)


def _sequences(
    cu_words: Tensor, cu_labels: Tensor, scores: Tensor
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield each sequence's words, labels and scores, `[words, labels, columns]`."""
    words, labels, begin = cu_words.tolist(), cu_labels.tolist(), 0
    for number in range(len(words) - 1):
        rows, columns = (slice(bounds[number], bounds[number + 1]) for bounds in (words, labels))
        count, width = rows.stop - rows.start, columns.stop - columns.start
        end = begin + count * width
        if end > begin:
            yield rows, columns, scores[begin:end].view(count, width, scores.shape[1])
        begin = end


def _parts(rows: int, numbers: int) -> Iterator[slice]:
    """Yield consecutive slices of rows, each of so few numbers that temporary results stay small."""
    size = max(1, _NUMBERS_PER_STEP // max(1, numbers))
    for begin in range(0, rows, size):
        yield slice(begin, min(begin + size, rows))
