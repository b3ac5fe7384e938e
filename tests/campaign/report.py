"""What a phase of a campaign did and found."""

from __future__ import annotations

from dataclasses import dataclass, field

from .endings import Ledger
from .state import State


@dataclass(slots=True)
class Report:
    """What a phase did and found.

    Attributes:
        name: name of the phase.
        ledger: its requests, and the invariants that were violated.
        seconds: that it took, starts of servers included.
        before, after: state of the server, where the phase compares them.
        notes: figures of only this phase, by name.
    """

    name: str
    ledger: Ledger = field(default_factory=Ledger)
    seconds: float = 0.0
    before: State | None = None
    after: State | None = None
    notes: dict[str, int] = field(default_factory=dict)

    def count(self, note: str, number: int = 1) -> None:
        """Add to a figure of this phase."""
        self.notes[note] = self.notes.get(note, 0) + number

    def check(self, *, holds: bool, problem: str) -> None:
        """Report a problem unless something holds."""
        if not holds:
            self.ledger.report(problem)
