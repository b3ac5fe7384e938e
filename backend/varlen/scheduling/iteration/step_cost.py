"""Expected run time of a generation step: a constant, and a part for each token."""

from __future__ import annotations

from varlen.request.request import Request
from varlen.scheduling.sequence import Forecast

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

        Costs of larger steps are unknown, so it is at most twice as large as the largest step that was learned, and
        while all steps had one size, each token is expected to take its part of their seconds.

        Args:
            seconds: limit of the step.
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

        A sequence that runs by itself is as fast as it can be, so a request whose deadline is before that, and before
        the end of what waits now, misses it. A client that expects a shorter answer sends a smaller `max_tokens`.
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
        """Learn from a step."""
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
        """Learn from the distances of a step from the mean step, in tokens and seconds."""
        if not off_tokens:
            return
        rate *= off_tokens**2 / (off_tokens**2 + self._variance)
        self._variance = (1 - rate) * (self._variance + rate * off_tokens**2)
        self._covariance = (1 - rate) * (self._covariance + rate * off_tokens * off_seconds)
