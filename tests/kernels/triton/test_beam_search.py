"""Steps of searches without the model, equal to the reference to the last bit."""

import pytest
import torch

from tests.kernels.beam_searches import BLOCK_SIZE, Searches, new_state
from varlen_kernels import reference
from varlen_kernels.reference.beam_search import SearchResults
from varlen_kernels.triton.beam_search import advance_searches, follow_beams


def moved(tensors, device):
    return [
        type(each)(*moved(each, device)) if isinstance(each, tuple) else each.to(device, copy=True)
        for each in tensors
    ]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))]
)
def test_steps_match_the_reference(seed, device):
    searches, states = Searches(seed), [new_state("cpu"), new_state(device)]
    while searches.length < searches.last:
        arguments = searches.advance()
        searches.right(*arguments)
        memory = [searches.results().zero_() for _ in states]
        memory[1] = memory[1].to(device)
        results = [SearchResults.views(each, len(searches.beams)) for each in memory]

        reference.advance_searches(*arguments, states[0], results[0])
        advance_searches(*moved(arguments, device), states[1], results[1])

        ends, beams, scores = (each.cpu() for each in results[1])
        assert torch.equal(ends, results[0].ends)
        assert torch.equal(beams[:, :2], results[0].beams[:, :2])
        for first, (_, count) in zip(searches.first_beams, ends.tolist(), strict=True):
            own = slice(first, first + count)
            assert torch.equal(beams[own], results[0].beams[own])
            assert torch.equal(scores[own], results[0].scores[own])
        if searches.length == searches.last:
            return
        step = searches.follow()
        on_device = moved(step, device)
        reference.follow_beams(states[0], *step, block_size=BLOCK_SIZE)
        follow_beams(states[1], *on_device, block_size=BLOCK_SIZE)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(on_device, step, strict=True))


def test_rejects_what_is_not_contiguous(device):
    searches = Searches(0)
    found, table, *others = moved(searches.advance(), device)
    results = SearchResults.views(searches.results().to(device), len(table))
    state = new_state(device)

    with pytest.raises(ValueError, match=r"searches has strides \(1, .*it must be contiguous"):
        advance_searches(found, table.T.contiguous().T, *others, state, results)
