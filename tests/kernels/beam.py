"""Helpers of the beam tests: random edits, and a full sort."""

import math

import numpy as np
import torch

from tests.closeness import relative_error
from varlen_kernels.reference.beam import NO_PARENT, NO_TOKEN, BeamCandidates, BeamEdits

LARGEST = torch.finfo(torch.float32).max
FACTORS = [0.25, 0.5, 1.0, 2.0, 30.0, math.inf]


def without_nan(x):
    return x.nan_to_num(nan=-torch.inf, posinf=LARGEST, neginf=-torch.inf)


def random_edits(logits, per_row, seed=0):
    """Return up to `per_row` edits of each row, half of its best tokens."""
    rng = np.random.default_rng(seed)
    rows, tokens = [], []
    for row, values in enumerate(without_nan(logits.float())):
        count = min(int(rng.integers(per_row + 1)), len(values))
        best = values.topk(count // 2).indices.tolist()
        chosen = list(dict.fromkeys([*best, *rng.permutation(len(values)).tolist()]))[:count]
        rng.shuffle(chosen)
        rows += [row] * count
        tokens += chosen
    return BeamEdits(
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(tokens, dtype=torch.int32),
        torch.from_numpy(rng.choice(np.float32(FACTORS), len(rows))),
    )


def move(edits, device):
    return None if edits is None else BeamEdits(*(tensor.to(device) for tensor in edits))


def all_scores(logits, scores, edits=None):
    """Return the score of each pair, `[sequences, beams, vocabulary]`, in the dtype of `logits`."""
    x = without_nan(logits)
    peak = x.amax(1, keepdim=True)
    peak[peak == -torch.inf] = 0
    total = (x - peak).exp().sum(1, keepdim=True)
    total[total == 0] = 1
    log_probs = (x - peak) - total.log()
    if edits is not None:
        at = edits.rows.long(), edits.tokens.long()
        log_probs[at] *= edits.factors
        log_probs[at] = log_probs[at].masked_fill(edits.factors == torch.inf, -torch.inf)
    return log_probs.unflatten(0, scores.shape) + without_nan(scores)[..., None]


def full_sort(logits, scores, finished=None, *, width=None, edits=None):
    """Return the expected result of `beam_step`, by sorting all candidates in Python."""
    sequences, beams = scores.shape
    width = 2 * beams if width is None else width
    x, table = without_nan(logits).unflatten(0, scores.shape), all_scores(logits, scores, edits)
    edited = set() if edits is None else set(zip(*(e.tolist() for e in edits[:2]), strict=True))
    out = BeamCandidates.empty(sequences, width, logits.device)
    for sequence in range(sequences):
        best = []
        if finished is None or not finished[sequence]:
            for parent in range(beams):
                row = sequence * beams + parent
                pairs = zip(
                    table[sequence, parent].tolist(), x[sequence, parent].tolist(), strict=True
                )
                best += [
                    (-s, True, parent, 0, token)
                    if (row, token) in edited
                    else (-s, False, parent, -logit, token)
                    for token, (s, logit) in enumerate(pairs)
                    if s > -math.inf
                ]
        best = sorted(best)[:width]
        best += [(math.inf, False, NO_PARENT, 0, NO_TOKEN)] * (width - len(best))
        out.scores[sequence] = torch.tensor([-key[0] for key in best])
        out.parents[sequence] = torch.tensor([key[2] for key in best])
        out.tokens[sequence] = torch.tensor([key[4] for key in best])
    return out


def check_candidates(actual, logits, scores, *, edits=None):
    """Fail unless the candidates are the best in float64, but for rounding."""
    exact = all_scores(logits.double(), scores.double(), edits).flatten(1)
    vocabulary = logits.shape[1]
    tolerance = {"rtol": relative_error(8), "atol": relative_error(vocabulary)}
    for found, row_scores in zip(zip(*actual, strict=True), exact, strict=True):
        count = min(len(found[0]), int((row_scores > -torch.inf).sum()))
        assert found[0][count:].eq(NO_TOKEN).all()
        assert found[1][count:].eq(NO_PARENT).all()
        assert found[2][count:].eq(-torch.inf).all()
        tokens, parents, values = (tensor[:count] for tensor in found)
        index = parents.long() * vocabulary + tokens.long()
        assert len(index.unique()) == count
        best = row_scores.sort(descending=True).values[:count]
        torch.testing.assert_close(values.double(), best, **tolerance)
        torch.testing.assert_close(row_scores[index], best, **tolerance)
