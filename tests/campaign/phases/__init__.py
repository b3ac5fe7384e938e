"""The phases of a campaign, in order."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..phase import Phase
from .constraints import constraints
from .costly import costly_requests
from .damage import damaged
from .doors import doors
from .families import families
from .fuzz import fuzz
from .generation_kills import generation_workers
from .kills import stubs, workers
from .mixed import mixed
from .reloads import reloads
from .settings import wrong_settings
from .shared_memory import shared_memory
from .stream_ends import stream_ends


@dataclass(frozen=True, slots=True)
class Planned:
    """A phase and its share of the time."""

    run: Phase
    weight: float


PHASES: Mapping[str, Planned] = {
    "mixed": Planned(mixed, 45),
    "fuzz": Planned(fuzz, 30),
    "costly": Planned(costly_requests, 20),
    "constraints": Planned(constraints, 12),
    "workers": Planned(workers, 8),
    "generation_workers": Planned(generation_workers, 8),
    "stubs": Planned(stubs, 6),
    "reloads": Planned(reloads, 8),
    "shared_memory": Planned(shared_memory, 5),
    "stream_ends": Planned(stream_ends, 5),
    "damage": Planned(damaged, 8),
    "settings": Planned(wrong_settings, 6),
    "families": Planned(families, 40),
    "doors": Planned(doors, 5),
}
