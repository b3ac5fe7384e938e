"""Sampling in torch and compiled for CPUs, against a sort in float64."""

import numpy as np
import pytest
import torch

from tests.kernels.sampling import expected_tokens, limits, random_rows, sorted_probabilities
from varlen_kernels import cpu, reference

SETTINGS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 40},
    "large_top_k": {"top_k": 550},
    "top_p": {"top_p": 0.9},
    "flat_top_p": {"top_p": 0.9, "temperature": 5.0},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 60, "top_p": 0.8, "min_p": 0.05},
    "all_large": {"temperature": 1.3, "top_k": 700, "top_p": 0.8, "min_p": 0.01},
}


@pytest.fixture(params=[reference, cpu], ids=["reference", "cpu"])
def sample_tokens(request):
    return request.param.sample_tokens


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 63, 64, 65, 500, 1500, 5003])
@pytest.mark.parametrize("seed", range(8))
def test_matches_a_full_sort(sample_tokens, vocabulary, seed):
    rows = random_rows(16, vocabulary, seed)

    assert sample_tokens(*rows).tolist() == expected_tokens(*rows)


def test_a_real_vocabulary_matches_a_full_sort(sample_tokens):
    rows = random_rows(16, 50257, seed=1)

    assert sample_tokens(*rows).tolist() == expected_tokens(*rows)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_have_their_probabilities(sample_tokens, settings):
    draws, vocabulary = 8_000, 600
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(1, vocabulary, generator=generator)
    uniform = torch.rand(draws, generator=generator, dtype=torch.float64)

    # row after row of the same logits, without a copy
    tokens = sample_tokens(logits.expand(draws, -1), *limits(draws, **settings), uniform)

    arguments = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    expected = draws * sorted_probabilities(logits[0], **arguments)
    counts = np.bincount(tokens, minlength=vocabulary)
    assert counts[expected == 0].sum() == 0
    # tokens that are expected fewer than 10 times are counted together
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    # chi-square of n values: mean n - 1, standard deviation sqrt(2 (n - 1))
    chi_square, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert chi_square <= freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("vocabulary", [100, 3000])
@pytest.mark.parametrize(
    "settings",
    [{"top_k": 5}, {"top_k": 5, "temperature": 3.0}, {"top_p": 4.5 / 100}],
    ids=["top_k", "hot", "top_p"],
)
def test_ties_at_a_limit_go_to_the_lower_token(sample_tokens, vocabulary, settings):
    logits = torch.full((1000, vocabulary), -torch.inf)
    tied = torch.arange(100) * (vocabulary // 100)
    logits[:, tied] = 0.0
    uniform = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]

    tokens = sample_tokens(logits, *limits(1000, **settings), uniform)

    assert tokens.unique().tolist() == tied[:5].tolist()


def test_a_large_top_k_drops_equal_logits_with_higher_tokens(sample_tokens):
    logits = torch.zeros(500, 3000)
    uniform = torch.linspace(0, 1, 501, dtype=torch.float64)[:-1]

    tokens = sample_tokens(logits, *limits(500, top_k=500), uniform)

    assert tokens.tolist() == pytest.approx(list(range(500)), abs=1)
    assert tokens.max() == 499


def test_greedy_takes_the_first_of_the_largest_logits(sample_tokens):
    logits = torch.zeros(3, 200)
    logits[0, 150] = logits[0, 70] = 1.0
    logits[1, 130] = torch.nan
    logits[2] = -torch.inf

    tokens = sample_tokens(logits, *limits(3, temperature=0.0), torch.full((3,), 0.9).double())

    assert tokens.tolist() == [70, 0, 0]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_row_without_choice_gives_token_0(sample_tokens, settings):
    logits = torch.full((1, 2000), -torch.inf)

    assert sample_tokens(logits, *limits(1, **settings), torch.tensor([0.5]).double()) == 0


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_random_numbers_give_kept_tokens(sample_tokens, uniform, settings):
    logits = torch.full((1, 2000), -torch.inf)
    logits[0, 1000:1010] = torch.arange(10.0) / 10

    token = sample_tokens(
        logits, *limits(1, **settings), torch.tensor([uniform], dtype=torch.float64)
    )

    assert 1000 <= token < 1010


def test_a_row_does_not_depend_on_the_other_rows(sample_tokens):
    rows = random_rows(12, 3001, seed=5)
    together = sample_tokens(*rows)

    alone = [sample_tokens(*(x[i : i + 1] for x in rows)).item() for i in range(12)]

    assert together.tolist() == alone


def test_does_not_change_its_inputs(sample_tokens):
    rows = random_rows(16, 2000, seed=2)
    before = [x.clone() for x in rows]

    sample_tokens(*rows)

    for x, same in zip(rows, before, strict=True):
        torch.testing.assert_close(x, same, rtol=0, atol=0, equal_nan=True)


def test_accepts_strided_rows_and_writes_into_out(sample_tokens):
    logits, *others = random_rows(9, 1500, seed=3)
    wide = torch.full((9, 1600), torch.nan)
    wide[:, :1500] = logits
    out = torch.full((9,), -7, dtype=torch.int32)

    returned = sample_tokens(wide[:, :1500], *others, out=out)

    assert returned is out
    assert torch.equal(out, sample_tokens(logits, *others))


def test_no_rows(sample_tokens):
    assert sample_tokens(*random_rows(0, 50, seed=0)).shape == (0,)


@pytest.mark.parametrize(
    "position, tensor, message",
    [
        (0, torch.zeros(2, 9).half(), r"logits is \[2, 9\] torch.float16; it must be \[rows, voc"),
        (0, torch.zeros(2, 0), "vocabulary of 0; allowed: 1 to"),
        (1, torch.zeros(3), r"temperature is \[3\] torch.float32; it must be \[2\] torch.float32"),
        (2, torch.zeros(2), r"top_k is \[2\] torch.float32; it must be \[2\] torch.int32"),
        (5, torch.zeros(2), r"uniform is \[2\] torch.float32; it must be \[2\] torch.float64"),
    ],
    ids=["dtype", "no-vocabulary", "rows", "top_k", "uniform"],
)
def test_rejects_invalid_arguments(sample_tokens, position, tensor, message):
    arguments = list(random_rows(2, 9, seed=0))
    arguments[position] = tensor

    with pytest.raises(ValueError, match=message):
        sample_tokens(*arguments)
