"""Loads with damaged compiled code, which must answer what they answered before."""

import random
from collections.abc import Mapping
from pathlib import Path

from .attacks.damage import ANY, become_a_dead_link, become_a_folder
from .loads import Load, Loader

# Damage of a file's content; only a person puts a folder in its place.
_DAMAGES = tuple(each for each in ANY if each not in (become_a_folder, become_a_dead_link))


class CodeCache:
    """A folder of compiled code of its own, which the first load fills."""

    def __init__(self, scratch: Path, checkpoint: Path, parameters: Mapping[str, str]) -> None:
        self._scratch, self._folder = scratch, scratch / "compiled"
        self._checkpoint, self._parameters = checkpoint, parameters
        self._intact: Load | None = None

    def damage_and_load(self, draw: random.Random) -> tuple[str, Load]:
        """Damage a file, and return how, and the end of the next load."""
        self._intact = self._intact or self._load()
        files = sorted(self._folder.glob("*.o"))
        if not files:
            return "", Load("failed", f"no compiled code was stored: {self._intact.text}")
        file, change = draw.choice(files), draw.choice(_DAMAGES)
        change(draw, file)
        return f"{change.__name__} {file.name}", self._load().must_serve(self._intact)

    def _load(self) -> Load:
        # compiled code is loaded once per process
        with Loader(self._scratch, self._folder) as loader:
            return loader.load(self._checkpoint, self._parameters)
