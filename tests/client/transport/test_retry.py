"""The delays between retries."""

from varlen_client import RetryPolicy


def test_delays_double_up_to_the_cap_and_are_reduced_by_at_most_half():
    policy = RetryPolicy(first_delay=1.0, max_delay=3.0)

    for retry, longest in [(0, 1.0), (1, 2.0), (2, 3.0), (50, 3.0)]:
        delays = [policy.delay(retry) for _ in range(100)]
        assert longest / 2 <= min(delays) <= max(delays) <= longest
        assert max(delays) > min(delays)
