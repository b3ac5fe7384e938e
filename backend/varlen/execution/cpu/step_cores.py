"""How many cores a step of generation uses: one or all, whichever is faster.

Cores that share a step meet after each of its functions. A step of a small model, or one whose cores are two threads
of one real core, is faster on one. No rule says where, so steps are timed: of each size most run on the faster choice,
and some on the other one. docs/decisions/0060-steps-on-cpus-with-bf16.md has measurements.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

# Times that are kept of each choice: the least of them counts, since other processes make some longer.
_KEPT = 4
# Steps from one trial of the other choice to the next one. A trial that takes much longer doubles them.
_TRIAL, _LONGEST_TRIAL = 64, 4096
_MUCH_LONGER = 1.5
# Seconds of a step on all cores from which one core is not tried: it would delay answers.
_LONGEST = 5e-3


@dataclass(slots=True)
class _Times:
    """Recent times of steps of one size, in seconds.

    Attributes:
        on_all, on_one: times on all cores and on one.
        left: number of steps before the next trial.
        pause: number of steps between trials.
    """

    on_all: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    on_one: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    left: int = _KEPT
    pause: int = _TRIAL

    @property
    def is_faster_alone(self) -> bool:
        """Whether one core is faster by the times that are known."""
        return bool(self.on_one) and min(self.on_one) < min(self.on_all)

    def end_trial(self, taken: float, usual: float) -> None:
        """Decide when the next trial comes, given the seconds of both choices."""
        if taken > _MUCH_LONGER * usual:
            self.pause = self.left = min(2 * self.pause, _LONGEST_TRIAL)
        else:
            # a close race is decided by several trials
            is_decided = min(len(self.on_one), len(self.on_all)) == _KEPT
            self.pause, self.left = _TRIAL, _TRIAL if is_decided else 1


class StepCores:
    """Chooses the cores of steps. Not for two threads at once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without times.

        Args:
            clock: returns seconds.
        """
        self._clock = clock
        # by the bits of the number of tokens
        self._times: dict[int, _Times] = {}

    def run(self, step: Callable[[int], None], tokens: int, cores: int) -> None:
        """Run a step.

        Args:
            step: runs it on this number of cores.
            tokens: number of its tokens.
            cores: number of all cores.
        """
        if cores == 1:
            step(1)
            return
        times = self._times.setdefault(tokens.bit_length(), _Times())
        usual_alone = times.is_faster_alone
        is_trial = times.left == 0 and min(times.on_all) <= _LONGEST
        times.left = max(0, times.left - 1)
        is_alone = usual_alone != is_trial
        began = self._clock()
        step(1 if is_alone else cores)
        taken = self._clock() - began
        if is_trial:
            times.end_trial(taken, min(times.on_one if usual_alone else times.on_all))
        (times.on_one if is_alone else times.on_all).append(taken)
