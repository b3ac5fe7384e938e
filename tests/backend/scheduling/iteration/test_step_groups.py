"""The groups of each step of a pipeline: sizes, order and waits."""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.scheduling.iteration.group_queues import first_parts, parts_of, take_share

# a sequence that generates
_SEQUENCE = {"token_ids": [1, 2], "num_unknown": 1, "num_computed": 2}


@dataclass(eq=False)
class Running:
    """What a running group tells of itself."""

    least_tokens: int = 1
    max_length: int = 10
    skipped: int = 0
    is_plain: bool = False
    first: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(**_SEQUENCE))


def running(*least_tokens):
    return [Running(tokens) for tokens in least_tokens]


def take(groups, busy, step_tokens, stages):
    """Return the groups of a step."""
    parts = parts_of(groups, busy, stages)
    return [part.group for part in take_share(parts, groups, step_tokens, stages)]


def steps_of(groups, stages, step_tokens=100, *, in_flight=None):
    """Yield the groups of each step.

    Args:
        groups: running groups, in order.
        stages: stages of the pipeline.
        step_tokens: largest step.
        in_flight: most steps in flight; all stages have one by default.
    """
    steps = deque()
    while True:
        busy = {group for step in steps for group in step}
        taken = take(groups, busy, step_tokens, stages)
        if taken:
            steps.append(taken)
            yield taken
        if not taken or len(steps) == (in_flight or stages):
            steps.popleft()


@pytest.mark.parametrize(
    "stages, least_tokens, sizes",
    [
        (1, [1, 4, 1], [3, 3]),
        (2, [1] * 16, [8, 8, 8, 8]),
        (2, [1] * 5, [3, 2, 3, 2]),
        (3, [1] * 16, [6, 6, 4, 6, 6, 4]),
        (3, [1], [1, 1, 1]),
        # the beams of a search are one group
        (2, [4, 1, 1, 1, 1], [1, 4, 1, 4]),
        (2, [1, 4, 1, 1, 1], [2, 3, 2, 3]),
    ],
    ids=str,
)
def test_each_step_has_its_share(stages, least_tokens, sizes):
    steps = steps_of(running(*least_tokens), stages, in_flight=1 if stages == 1 else None)

    assert [len(step) for step in islice(steps, len(sizes))] == sizes


def test_a_step_takes_what_is_free_in_order():
    groups = running(*[1] * 6)

    assert take(groups, set(groups[1:3]), 100, 2) == [groups[0], *groups[3:5]]
    assert take(groups, set(groups), 100, 2) == []


def test_a_share_never_exceeds_a_step_except_by_one_group():
    parts = parts_of(running(3, 3, 9), set())

    assert first_parts(parts, 5, share=9) == parts[:1]
    assert first_parts(parts[2:], 5, share=9) == parts[2:]


def test_a_group_whose_last_token_is_in_flight_does_not_run_again():
    groups = running(1, 1, 1, 1)
    groups[0].max_length = 3

    assert take(groups, {groups[0]}, 100, 2) == groups[1:3]


def test_a_group_that_does_not_fit_beside_those_before_it_gets_its_turn():
    groups = running(1, 1, 10)

    steps = list(islice(steps_of(groups, 2, step_tokens=10, in_flight=1), 6))

    assert [groups[2] in step for step in steps] == [False, False, True] * 2


_WEIGHTS = st.lists(st.integers(1, 6), min_size=1, max_size=12)


@given(_WEIGHTS, st.integers(2, 5))
def test_a_full_pipeline_runs_each_group_once_in_as_many_steps_as_stages(least_tokens, stages):
    groups = running(*least_tokens)
    # one step has enough tokens for all of them
    steps = list(islice(steps_of(groups, stages, sum(least_tokens)), 6 * stages))

    for group in groups:
        numbers = [number for number, step in enumerate(steps) if group in step]
        assert numbers[0] < stages
        assert all(after - before <= stages for before, after in pairwise(numbers))


@given(_WEIGHTS, st.integers(2, 5), st.data())
def test_no_group_waits_for_long_whenever_steps_end(least_tokens, stages, data):
    groups = running(*least_tokens)
    steps = deque()
    for _ in range(60):
        busy = {group for step in steps for group in step}
        if taken := take(groups, busy, sum(least_tokens), stages):
            steps.append(taken)
        most = data.draw(st.integers(0, stages - 1)) if taken else len(steps) - 1
        while len(steps) > most:
            steps.popleft()

        # it goes first after `stages` steps, and that number of steps has a share for each group
        assert all(group.skipped < 2 * stages for group in groups)


def test_the_last_groups_run_though_only_one_step_is_in_flight():
    groups = running(1, 1, 1, 1)

    steps = list(islice(steps_of(groups, 4, in_flight=1), 40))

    runs = [sum(group in step for step in steps) for group in groups]
    assert min(runs) >= 5
