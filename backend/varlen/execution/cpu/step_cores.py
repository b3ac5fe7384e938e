"""How many cores a step of generation uses: one or all, whichever is faster.

Cores that share a step meet after each of its functions. A step of a small model, or one whose cores are two threads
of one real core, is faster on one. No rule says where, so steps are timed: of each size most run on the faster choice,
and some on the other one. docs/decisions/0059-steps-ahead.md has measurements.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

# Times that are kept of each choice: the least of them counts, since other processes make some longer.
_KEPT = 4
# Of this many steps one runs on the other choice.
_TRIAL = 64
# Seconds of a step on all cores from which one core is not tried: it would delay answers.
_LONGEST = 5e-3


@dataclass(slots=True)
class _Times:
    """Recent times of steps of one size in seconds, and the number of steps."""

    on_all: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    on_one: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    steps: int = 0


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
        times = self._times.setdefault(tokens.bit_length(), _Times())
        is_alone = cores == 1 or self._is_alone(times)
        began = self._clock()
        step(1 if is_alone else cores)
        (times.on_one if is_alone else times.on_all).append(self._clock() - began)
        times.steps += 1

    def _is_alone(self, times: _Times) -> bool:
        """Return whether the next step of a size runs on one core."""
        if len(times.on_all) < _KEPT or min(times.on_all) > _LONGEST:
            return False
        if len(times.on_one) < _KEPT:
            return True
        is_faster = min(times.on_one) < min(times.on_all)
        return is_faster != (times.steps % _TRIAL == 0)
