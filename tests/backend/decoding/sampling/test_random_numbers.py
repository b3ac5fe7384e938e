"""Random numbers of sequences: even, independent, and the same ones for a seed."""

import numpy as np

from varlen.decoding.sampling.sampler_state import random_key, uniform_numbers


def assert_uniform(numbers, buckets=64):
    """Fail if the counts of equal buckets differ by more than chance explains."""
    counts = np.histogram(numbers, buckets, range=(0, 1))[0]
    expected = len(numbers) / buckets
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    # five standard deviations of the chi-square distribution
    assert statistic < (buckets - 1) + 5 * np.sqrt(2 * (buckets - 1))


def test_numbers_of_adjacent_seeds_samples_and_positions_are_even():
    seeds = [random_key(seed, 0) for seed in range(4000)]
    samples = [random_key(7, sample) for sample in range(4000)]

    assert_uniform(uniform_numbers(seeds, [0] * 4000))
    assert_uniform(uniform_numbers(samples, [3] * 4000))
    assert_uniform(uniform_numbers([seeds[5]] * 4000, range(4000)))


def test_numbers_of_adjacent_positions_and_seeds_are_independent():
    key, other = random_key(1, 0), random_key(2, 0)
    numbers = uniform_numbers([key] * 4000, range(4000))
    others = uniform_numbers([other] * 4000, range(4000))

    for a, b in [(numbers[1:], numbers[:-1]), (numbers, others)]:
        # in 8 x 8 squares
        cells = np.floor(a * 8) * 8 + np.floor(b * 8)
        assert_uniform((cells + 0.5) / 64)


def test_a_number_does_not_depend_on_what_is_drawn_beside_it():
    keys = [random_key(seed, seed % 3) for seed in range(10)]
    together = uniform_numbers(keys, range(10))

    assert [uniform_numbers([key], [i])[0] for i, key in enumerate(keys)] == together.tolist()


def test_seeds_and_samples_have_keys_of_their_own():
    seeds = [0, 1, -1, 2**63, 2**64 - 2, -(2**63) + 1]

    keys = {random_key(seed, sample) for seed in seeds for sample in range(64)}

    assert len(keys) == 64 * len(seeds)


def test_the_numbers_of_a_seed_stay_the_same():
    # a change here changes the answers of clients who keep their seed
    numbers = uniform_numbers([random_key(1234, 0)] * 3, [0, 1, 2])

    assert numbers.tolist() == [0.323102120879034, 0.2778404897429817, 0.2975900359632555]
