"""The phases of a campaign, in order."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..phase import Phase
from .fuzz import fuzz
from .mixed import mixed


@dataclass(frozen=True, slots=True)
class Planned:
    """A phase and its share of the time."""

    run: Phase
    weight: float


PHASES: Mapping[str, Planned] = {
    "mixed": Planned(mixed, 45),
    "fuzz": Planned(fuzz, 20),
}
