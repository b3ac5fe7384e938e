"""How large the next step may be, and how long it takes.

Every step reads all weights, so prompts cost least in large steps. A stream gets its next token at the end of a step:
while one generates, prompts get only as many tokens as are expected to run within the target of the inter-token
latency, and a part of every step in any case.

Source: chunks of prompts that keep the time between tokens within a target follow Sarathi-Serve (Agrawal et al. 2024,
OSDI), which chooses a constant number of tokens in advance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from varlen.request.request import Request
from varlen.scheduling.batch import Forecast
from varlen.scheduling.iteration.groups import Group, Part
from varlen.scheduling.iteration.speculation import Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits of a step and of a sequence.

    Attributes:
        inter_token_latency_seconds: target of the seconds of a step while sequences are streamed; 0 is no target.
        max_running_sequences: largest number of sequences that run at the same time, without `short_slots`.
        max_sequence_tokens: longest sequence, prompt and generated tokens together.
        short_slots: slots beside them for short sequences.
        stages: stages of the model's pipeline; as many steps of different sequences are in flight. 1 is no pipeline.
        launch_steps: most steps of searches in one launch.
        speculation: limits of drafted tokens; None if there are none.
    """

    max_step_tokens: int
    inter_token_latency_seconds: float
    max_running_sequences: int
    max_sequence_tokens: int
    short_slots: int
    short_tokens: int
    stages: int = 1
    launch_steps: int = 1
    speculation: Speculation | None = None

    @property
    def step_latency_seconds(self) -> float:
        """Target of the seconds between the ends of two steps.

        A sequence runs once in `stages` steps.
        """
        return self.inter_token_latency_seconds / self.stages


# After a step that ran out of memory, steps grow again by this part of the largest step each.
_GROWTH = 32


class StepSize:
    """Size of the largest step now."""

    def __init__(self, max_tokens: int) -> None:
        """Start with the limit.

        Args:
            max_tokens: tokens of the largest step when no step has run out of memory.
        """
        self._max_tokens = max_tokens
        self.tokens = max_tokens

    @property
    def is_reduced(self) -> bool:
        """Whether a step has run out of memory, and steps are not large again."""
        return self.tokens < self._max_tokens

    def reduce(self, failed_tokens: int) -> None:
        """Halve the size of a step that ran out of memory."""
        self.tokens = max(1, failed_tokens // 2)

    def grow(self) -> None:
        """Grow after a step that ran, up to the limit."""
        growth = max(1, self._max_tokens // _GROWTH)
        self.tokens = min(self.tokens + growth, self._max_tokens)


# Weight of a step, relative to the one after it.
_MEMORY = 0.97
# A step that compiles, or touches memory first, takes many times longer than others of its size.
_LARGEST_SURPRISE = 2.0


class StepCost:
    """Predicts the seconds of a step by a weighted least-squares line.

    The mean of recent steps is forgotten at a fixed rate, the slope only as steps of other sizes come: steps that only
    decode, all of about one size, tell nothing about prompts.

    Attributes:
        base: seconds of any step; 0 before the first was learned.
        per_token: seconds that each token adds.
    """

    def __init__(self) -> None:
        self.base = 0.0
        self.per_token = 0.0
        self._steps = 0
        self._largest_tokens = 0
        # weighted: number, means of tokens and seconds, variance and covariance
        self._weight = 0.0
        self._tokens = self._seconds = 0.0
        self._variance = self._covariance = 0.0

    def seconds(self, steps: int, tokens: int) -> float:
        """Return the expected seconds of steps with these tokens in all."""
        return steps * self.base + tokens * self.per_token

    def tokens_within(self, seconds: float, *, least_tokens: int, factor: float) -> int:
        """Return the tokens of the largest step that is expected to end within some seconds.

        Costs of larger steps are unknown, so it is at most twice as large as the largest step that was learned. While
        all steps had one size, each token is expected to take its part of their seconds.

        Args:
            least_tokens: number of tokens that run in any case.
            factor: the limit is at least this many times the seconds of the least tokens.
        """
        known = 2 * max(self._largest_tokens, least_tokens)
        base, per_token = self.base, self.per_token
        if self._weight and not self._variance:
            base, per_token = 0.0, self._seconds / self._tokens
        limit = max(seconds, factor * (base + per_token * least_tokens))
        return int(min(known, (limit - base) / per_token)) if per_token else known

    def forecast(
        self,
        request: Request,
        *,
        max_step_tokens: int,
        max_running_sequences: int,
        part_before: float = 1.0,
    ) -> Forecast:
        """Return the run time of a request whose answers all have `max_tokens`.

        A sequence is fastest if it runs by itself. A request misses its deadline if that time is too long, or if the
        waiting work takes longer. A client that expects a shorter answer sends a smaller `max_tokens`.
        """
        options = request.options.generation
        assert options is not None
        branches = max(options.n, options.num_beams)
        share, alone = 0.0, 0.0
        for prompt in request.prompts:
            chunks = -(-prompt.num_tokens // max_step_tokens)
            steps, tokens = chunks + options.max_tokens - 1, options.max_tokens - 1
            alone = max(alone, self.seconds(steps, prompt.num_tokens + branches * tokens))
            # in full steps, sequences divide the constant part among them
            share += self.seconds(0, prompt.num_tokens + branches * tokens)
            share += self.seconds(steps, 0) * branches / max_running_sequences
        return Forecast(share, least_seconds=alone, part_before=part_before)

    def learn(self, tokens: int, seconds: float) -> None:
        self._steps += 1
        if self._steps == 1:
            # the first one loads and compiles
            return
        if self._weight:
            # a step of another size takes seconds in proportion at most
            in_proportion = self._seconds * tokens / self._tokens
            seconds = min(seconds, _LARGEST_SURPRISE * max(self.seconds(1, tokens), in_proportion))
        self._largest_tokens = max(self._largest_tokens, tokens)
        self._weight = _MEMORY * self._weight + 1.0
        rate = 1.0 / self._weight
        off_tokens, off_seconds = tokens - self._tokens, seconds - self._seconds
        self._tokens += rate * off_tokens
        self._seconds += rate * off_seconds
        self._learn_slope(rate, off_tokens, off_seconds)
        slope = self._covariance / self._variance if self._variance else 0.0
        # neither part is negative
        self.per_token = min(max(0.0, slope), self._seconds / self._tokens)
        self.base = self._seconds - self.per_token * self._tokens

    def _learn_slope(self, rate: float, off_tokens: float, off_seconds: float) -> None:
        if not off_tokens:
            return
        rate *= off_tokens**2 / (off_tokens**2 + self._variance)
        self._variance = (1 - rate) * (self._variance + rate * off_tokens**2)
        self._covariance = (1 - rate) * (self._covariance + rate * off_tokens * off_seconds)


# What is kept of measured rows after a step with drafts, and after one without; number of rows that are expected to
# cost what a token of a prompt does; most steps with drafts between two without.
_ROWS_MEMORY, _ROWS_KEPT, _PRIOR_ROWS, _MEASURED = 0.9, 511 / 512, 2.0, 32
# A pass of a draft model takes at least this part of a step, and this one until it is measured.
_LEAST_PASS, _PRIOR_PASS = 1 / 128, 1 / 4


class DraftCost:
    """Measures what a drafted row costs.

    It is a part of the seconds that steps with drafts take beyond others. A row of logits costs more than a token of a
    prompt, and a step that is not followed ahead of its end takes the host's part too. The cost is slowly forgotten
    while no drafts run, so they are tried again.

    A draft model runs once for the next tokens of all sequences that draft, so its rows cost less beside more of them.

    Attributes:
        saved_seconds: seconds that steps without drafts would have taken beyond those with drafts.
    """

    def __init__(self) -> None:
        self.saved_seconds = 0.0
        self._plain = StepCost()
        self._extra = self._rows = 0.0
        self._drafting = 0
        # of a draft model: cost by the sequences of a pass, and its part that is not forgotten
        self._pass, self._left = StepCost(), 1.0

    def step_seconds(self, rows: int) -> float:
        """Return the expected seconds of a step without drafts.

        It is 0 if drafts have to wait until one is measured.
        """
        return self._plain.seconds(1, rows) if self._drafting < _MEASURED else 0.0

    def row_seconds(self, per_token: float, sequences: int = 0) -> float:
        """Return the expected seconds of a drafted row.

        Args:
            per_token: seconds of a token of a prompt.
            sequences: number of sequences that a model drafts for; 0 without one.
        """
        if sequences:
            of_pass = self._pass.seconds(1, sequences)
            of_pass = of_pass or _PRIOR_PASS * self._plain.seconds(1, sequences)
            return self._left * of_pass / sequences
        rows = _PRIOR_ROWS + self._rows
        return max(0.0, (_PRIOR_ROWS * per_token + self._extra) / rows)

    def learn(
        self, rows: int, drafted: int, seconds: float, passes: int = 1, accepted: int = 0
    ) -> None:
        """Learn from a step of rows, and of drafted ones beside them.

        Args:
            seconds: time until the next step could begin.
            passes: passes of a draft model, which a lookup does not have.
            accepted: drafted rows that were chosen.
        """
        kept = _ROWS_MEMORY if drafted else _ROWS_KEPT
        self._extra, self._rows = kept * self._extra, kept * self._rows
        self._left = 1.0 if drafted else kept * self._left
        if not drafted:
            self._drafting = 0
            self._plain.learn(rows, seconds)
            return
        self._drafting += 1
        plain = self._plain.seconds(1, rows)
        self.saved_seconds += plain * (1 + accepted / rows) - seconds
        self._extra += min(seconds - plain, _LARGEST_SURPRISE * plain)
        self._rows += drafted
        # a line through 0 would stay there
        extra = max(seconds - plain, _LEAST_PASS * plain)
        self._pass.learn(max(1, drafted // passes), extra / passes)


# Least part of the seconds of a step that prompts have, beside the tokens that run in any case.
PROMPT_PART = 0.25


def tokens_of_step(
    parts: Sequence[Part],
    max_tokens: int,
    cost: StepCost,
    latency_seconds: float,
    *,
    beside: Iterable[Group] = (),
) -> int:
    """Return the number of tokens of the next step, unless its groups need more.

    Args:
        latency_seconds: target of the seconds of a step; 0 is no target.
        beside: groups of other steps of a pipeline, whose next tokens wait for this step too.
    """
    groups = chain((part.group for part in parts), beside)
    if not latency_seconds or not any(map(_waits_for_token, groups)):
        return max_tokens
    least = sum(part.least_tokens for part in parts)
    factor = 1 / (1 - PROMPT_PART)
    return min(max_tokens, cost.tokens_within(latency_seconds, least_tokens=least, factor=factor))


def _waits_for_token(group: Group) -> bool:
    """Return whether a client waits for the token that a group's next step chooses.

    The client has read a token of it before.
    """
    first = group.first
    if not group.streams or first.num_computed < first.num_tokens:
        return False
    return len(first.token_ids) + first.num_unknown == first.num_computed + 1
