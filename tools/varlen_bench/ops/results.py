"""Results of ops as one tensor that an exact one is compared with.

Several tokens may be a right choice. The result of such an op is a property of the choice, in float64.
"""

from typing import Any

import torch
from torch import Tensor

from varlen_bench.ops.call import Inputs, as_tensor


def first(result: Any, inputs: Inputs) -> Tensor:
    """Return the first tensor of a result."""
    return as_tensor(result[0] if isinstance(result, tuple) else result, inputs)


def stacked(result: Any, _: Inputs) -> Tensor:
    """Return the results of an op with several, of one shape, as one tensor."""
    assert isinstance(result, tuple)
    return torch.stack(result)


def flat(result: Any, _: Inputs) -> Tensor:
    """Return all numbers of a result with several tensors."""
    return torch.cat([each.flatten() for each in result]).double()


def appended(result: Any, inputs: Inputs) -> Tensor:
    """Return the keys and values in the slots, after the queries if they are rotated."""
    # [blocks * block_size, kv_heads, head_dim] each
    rows = [cache.transpose(1, 2).flatten(0, 1) for cache in result]
    found = torch.stack([each[inputs["slots"]] for each in rows])
    if "out" not in inputs:
        return found
    out: Tensor = inputs["out"]
    keys_and_values = 2 * result[0].shape[1] * result[0].shape[3]
    return torch.cat([out[:, : out.shape[1] - keys_and_values].flatten(), found.flatten()])


def first_tiles(result: Any, _: Inputs) -> Tensor:
    """Return sequence and slot of the tiles that begin a sequence, which no launch changes."""
    return _beginning(result)[:, :2]


def first_paged_tiles(result: Any, inputs: Inputs) -> Tensor:
    """Return the tiles that begin a sequence, which no launch changes."""
    return _beginning(result)[: len(inputs["context_lens"])]


def _beginning(tiles: Tensor) -> Tensor:
    return tiles[(tiles[:, 2] == 0) & (tiles[:, 1] > 0)]


def advanced(result: Any, _: Inputs) -> Tensor:
    """Return ends and beams of `advance_searches`; the slots of absent answers are not written."""
    ends, beams, _answers = result[0]
    return torch.cat([ends.flatten(), beams[:, :2].flatten()]).double()


def allowed_logits(result: Any, _: Inputs) -> Tensor:
    """Return the logits without the first token, which is banned."""
    edited: Tensor = result[0][:, 1:]
    return edited.double()


def best_scores(inputs: Inputs) -> Tensor:
    """Return the best scores of a beam step, twice: see `scores_of_candidates`."""
    top = _scores(inputs).topk(inputs["out"].scores.shape[1], dim=1).values
    return torch.stack((top, top))


def scores_of_candidates(result: Any, inputs: Inputs) -> Tensor:
    """Return the scores of a beam step, and the exact scores of its candidates.

    A result is right if both are the best scores in descending order.
    """
    tokens, parents, scores = result
    if inputs.get("edits") is not None:
        # the logits are overwritten
        return torch.stack((scores.double(), scores.double()))
    exact = _scores(inputs)
    index = parents.long() * inputs["logits"].shape[1] + tokens.long()
    # the poison of an unwritten candidate is no valid index; its score already shows the error
    exact = exact.gather(1, index.clamp(0, exact.shape[1] - 1))
    return torch.stack((scores.double(), exact))


def _scores(inputs: Inputs) -> Tensor:
    """Return the score of each continuation, `[sequences, beams · vocabulary]`."""
    log_prob = torch.log_softmax(inputs["logits"].double(), dim=-1)
    if (edits := inputs.get("edits")) is not None:
        log_prob[edits.rows.long(), edits.tokens.long()] *= edits.factors
    scores: Tensor = inputs["scores"].double()
    return (log_prob.view(*scores.shape, -1) + scores[..., None]).flatten(1)


def uniform_of_tokens(result: Any, inputs: Inputs) -> Tensor:
    """Return each uniform number, moved into the part of the token that was drawn.

    A result is right if each is inside its token's part of the sum of probabilities.
    """
    probability = _kept_probabilities(inputs)
    after = probability.cumsum(1)
    # the poison of an unwritten token is no valid index
    token = result.long().clamp(0, after.shape[1] - 1)[:, None]
    uniform: Tensor = inputs["uniform"][:, None]
    before = (after - probability).gather(1, token)
    return uniform.clamp(before, after.gather(1, token)).squeeze(1)


def _kept_probabilities(inputs: Inputs) -> Tensor:
    """Return the probability of each token after top-k, top-p and min-p, `[rows, vocabulary]`."""
    logits: Tensor = inputs["logits"].double()
    temperature, top_k, top_p, min_p = (
        inputs[name][:, None].double() for name in ("temperature", "top_k", "top_p", "min_p")
    )
    order = logits.sort(dim=1, descending=True, stable=True).indices
    kept = (logits / temperature.clamp_min(1e-9)).softmax(1).gather(1, order)
    rank = torch.arange(logits.shape[1], device=logits.device)
    limit = top_k.where(top_k > 0, logits.shape[1]).where(temperature > 0, 1)
    kept = kept.masked_fill(rank >= limit, 0.0)
    kept /= kept.sum(1, keepdim=True)
    better = kept.cumsum(1) - kept
    kept = kept.masked_fill((better >= top_p) & (rank > 0), 0.0)
    kept = kept.masked_fill(kept < min_p * kept[:, :1], 0.0)
    kept = torch.zeros_like(kept).scatter_(1, order, kept)
    return kept / kept.sum(1, keepdim=True)
