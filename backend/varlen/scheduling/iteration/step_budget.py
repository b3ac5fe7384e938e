"""Number of tokens of the next step: small where streams would wait too long.

Every step reads all weights, so prompts cost least in large steps. A stream gets its next token at the end of a step:
while one generates, prompts get only as many tokens as are expected to run within the target of the inter-token
latency. Answers that are sent as a whole have no such target.

Prompts have a part of every step. If decoding needs all of the target, steps take longer than the target.

Source: chunks of prompts that keep the time between tokens within a target follow Sarathi-Serve (Agrawal et al. 2024,
OSDI), which chooses a constant number of tokens in advance.
"""

from collections.abc import Collection, Iterable
from itertools import chain

from varlen.scheduling.iteration.groups import Group
from varlen.scheduling.iteration.step_cost import StepCost

# Least part of the seconds of a step that prompts have, beside the tokens that run in any case.
PROMPT_PART = 0.25


def tokens_of_step(
    groups: Collection[Group],
    max_tokens: int,
    cost: StepCost,
    latency_seconds: float,
    *,
    beside: Iterable[Group] = (),
) -> int:
    """Return the number of tokens of the next step, unless its groups need more.

    Args:
        groups: groups of the step.
        max_tokens: largest step.
        cost: expected cost of steps.
        latency_seconds: target of the seconds of a step; 0 is no target.
        beside: groups of other steps of a pipeline, whose next tokens wait for this step too.
    """
    is_streaming = any(group.is_streaming for group in chain(groups, beside))
    if not latency_seconds or not is_streaming:
        return max_tokens
    least = sum(group.least_tokens for group in groups)
    factor = 1 / (1 - PROMPT_PART)
    return min(max_tokens, cost.tokens_within(latency_seconds, least_tokens=least, factor=factor))
