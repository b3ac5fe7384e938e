"""Sampling on a GPU or in the interpreter, against a full sort in float64."""

import pytest
import torch

from tests.kernels.sampling import (
    drawn_token,
    expected_tokens,
    limits,
    random_rows,
    sorted_probabilities,
)
from varlen_kernels.triton import sampling
from varlen_kernels.triton.sampling import candidate_launches, sample_tokens
from varlen_kernels.tuning import forced_launch

from .guards import Guarded


def sample(rows, block=512, out=None):
    vocabulary = rows[0].shape[1]
    with forced_launch("sample_tokens", (vocabulary,), {"BLOCK": block, "num_warps": 1}):
        return sample_tokens(*rows, out=out)


@pytest.mark.parametrize("vocabulary, block", [(1, 16), (40, 16), (333, 256), (700, 1024)])
def test_matches_a_full_sort(vocabulary, block, device):
    rows = [x.to(device) for x in random_rows(4, vocabulary, seed=vocabulary, top_ks=(0, 5, 30))]

    assert sample(rows, block).tolist() == expected_tokens(*(x.cpu() for x in rows))


def test_tokens_for_which_a_list_has_no_room_are_read_from_the_row(device, monkeypatch):
    monkeypatch.setattr(sampling, "_LONGEST_LIST", 3)
    rows = [x.to(device) for x in random_rows(4, 200, seed=5, top_ks=(0, 20, 60))]
    # many equal logits
    rows[0] = rows[0].round()

    assert sample(rows, 64).tolist() == expected_tokens(*(x.cpu() for x in rows))


@pytest.mark.full
@pytest.mark.parametrize("top_p", [0.02, 0.5, 0.95, 0.999], ids=str)
@pytest.mark.parametrize("top_k", [0, 7, 250], ids=str)
def test_flat_and_steep_rows_match_a_full_sort(top_k, top_p, device):
    logits = random_rows(4, 300, seed=6)[0]
    logits[:2] = torch.randn(2, 300) * torch.tensor([[0.05], [12.0]])
    uniform = torch.rand(4, dtype=torch.float64)
    rows = (logits, *limits(4, top_k=top_k, top_p=top_p), uniform)

    assert sample([x.to(device) for x in rows], 64).tolist() == expected_tokens(*rows)


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 5}, {"top_p": 0.046}, {"top_k": 70, "top_p": 0.06, "temperature": 3.0}],
    ids=["top_k", "top_p", "both"],
)
def test_ties_at_a_limit_go_to_the_lower_token(settings, device):
    logits = torch.full((5, 400), -torch.inf, device=device)
    logits[:, ::4] = 0.0
    uniform = torch.linspace(0, 0.999, 5, dtype=torch.float64, device=device)

    tokens = sample((logits, *limits(5, **settings, device=device), uniform))

    assert set(tokens.tolist()) == {0, 4, 8, 12, 16}


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_random_numbers_give_kept_tokens(uniform, device):
    logits = torch.full((4, 300), -torch.inf, device=device)
    logits[:, 100:110] = torch.arange(10.0, device=device) / 10
    args = limits(4, device=device)
    args[1][1], args[2][2], args[3][3] = 20, 0.9, 0.01

    tokens = sample((logits, *args, torch.full((4,), uniform, dtype=torch.float64, device=device)))

    assert ((tokens >= 100) & (tokens < 110)).all()


def test_a_row_without_choice_gives_token_0(device):
    logits = torch.full((3, 300), -torch.inf, device=device)
    args = limits(3, device=device)
    args[0][0], args[2][1] = 0.0, 0.5

    uniform = torch.full((3,), 0.5, dtype=torch.float64, device=device)
    assert sample((logits, *args, uniform)).tolist() == [0, 0, 0]


def test_follows_the_random_number_through_the_whole_vocabulary(device):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 600, generator=generator)
    uniform = torch.linspace(0.01, 0.99, 20, dtype=torch.float64)

    tokens = sample(
        (logits.expand(20, -1).to(device), *limits(20, device=device), uniform.to(device))
    )

    probabilities = sorted_probabilities(logits[0], 1.0, 0, 1.0, 0.0)
    assert tokens.tolist() == [drawn_token(probabilities, u) for u in uniform.tolist()]


@pytest.mark.full
def test_every_candidate_launch_matches_a_full_sort(device):
    rows = [x.to(device) for x in random_rows(1, 1100, seed=4, top_ks=(40,))]
    expected = expected_tokens(*(x.cpu() for x in rows))

    for launch in candidate_launches(1100):
        with forced_launch("sample_tokens", (1100,), launch):
            assert sample_tokens(*rows).tolist() == expected


def test_accepts_strided_rows_and_writes_only_into_out(device):
    logits, *others = (x.to(device) for x in random_rows(4, 200, seed=3, top_ks=(0, 5)))
    wide = torch.full((4, 240), torch.inf, device=device)
    wide[:, :200] = logits
    guarded = Guarded((4,), torch.int32, device)

    returned = sample((wide[:, :200], *others), out=guarded.tensor)

    assert returned is guarded.tensor
    guarded.check()
    assert torch.equal(returned, sample((logits, *others)))


def test_no_rows(device):
    assert sample([x[:0].to(device) for x in random_rows(1, 50, seed=0)]).shape == (0,)


def test_rejects_numbers_that_are_not_contiguous(device):
    logits, temperature, *others = random_rows(2, 9, seed=0)

    with pytest.raises(ValueError, match="temperature has shape"):
        sample((logits, temperature.repeat_interleave(2)[::2], *others))
