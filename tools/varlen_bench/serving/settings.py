"""The settings of a run, and the time of each load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from varlen_bench.peers.checkpoints import config_field
from varlen_bench.serving.systems import System
from varlen_tools.workloads import Mix


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run measures.

    Attributes:
        seconds: measured seconds of a load of a key system, or of an overload.
        turns: turns of the paired comparison.
        peer_batch: largest batch of the server's dynamic batcher.
    """

    model: Path
    systems: Sequence[System]
    mixes: Sequence[Mix]
    seconds: float
    turns: int
    quick: bool
    peer_batch: int
    threads: int
    seed: int

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return config_field(self.model, "vocab_size")

    def search_effort(self, system: System, *, is_hopeless: bool) -> tuple[float, int]:
        """Return the measured seconds of each load of a search, and its number of steps."""
        if self.quick:
            return self.seconds, 2 if system.is_key and not is_hopeless else 0
        if is_hopeless:
            return 0.75 * self.seconds, 1
        return (self.seconds, 4) if system.is_key else (0.75 * self.seconds, 2)
