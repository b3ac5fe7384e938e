"""Buffers for the intermediates of a program, shared by those whose lifetimes do not overlap.

Intermediates are laid out once, by bytes per token, into a few slots; each slot is one buffer that
grows to the largest batch seen and stays. So a batch allocates nothing, which on a CPU saves the
page faults that otherwise cost more than GELU itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Usage:
    """When an intermediate is live, and how large it is.

    Attributes:
        first_op, last_op: the ops that write it and read it last, inclusive.
        bytes_per_token: its size for a batch of one token.
        inherits: an intermediate whose memory it may take over if that one dies at `first_op`.
    """

    first_op: int
    last_op: int
    bytes_per_token: int
    inherits: str | None = None

    def until(self, op: int) -> "Usage":
        """Return the same record, live until `op` at least."""
        return replace(self, last_op=max(self.last_op, op))


def assign_slots(usages: Mapping[str, Usage]) -> dict[str, int]:
    """Return a slot number for each intermediate; two that are live at one op never share a slot.

    Walks the intermediates in the order of their first op and gives each the free slot nearest in size, or a new one.

    Args:
        usages: in the order of `first_op`.
    """
    slot_of: dict[str, int] = {}
    width: list[int] = []
    busy_until: list[int] = []
    for name, usage in usages.items():
        parent = usage.inherits
        free = [slot for slot, last in enumerate(busy_until) if last < usage.first_op]
        if parent in slot_of and usages[parent].last_op == usage.first_op:
            chosen = slot_of[parent]
        elif free:
            chosen = min(free, key=lambda slot: abs(width[slot] - usage.bytes_per_token))
        else:
            chosen = len(width)
            width.append(0)
            busy_until.append(-1)
        width[chosen] = max(width[chosen], usage.bytes_per_token)
        busy_until[chosen] = max(busy_until[chosen], usage.last_op)
        slot_of[name] = chosen
    return slot_of


class Workspace:
    """The buffers of one engine on one device. Not for two threads at once."""

    def __init__(self, usages: Mapping[str, Usage], device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self._slot_of = assign_slots(usages)
        self._bytes_per_token = [0] * (1 + max(self._slot_of.values(), default=-1))
        for name, slot in self._slot_of.items():
            self._bytes_per_token[slot] = max(
                self._bytes_per_token[slot], usages[name].bytes_per_token
            )
        self._buffers = [self._buffer(0) for _ in self._bytes_per_token]

    @property
    def reserved_bytes(self) -> int:
        """Bytes held now."""
        return sum(buffer.numel() for buffer in self._buffers)

    def reserve(self, tokens: int) -> None:
        """Make room for batches of so many tokens; no view moves as long as none is larger."""
        for slot, bytes_per_token in enumerate(self._bytes_per_token):
            self._grow(slot, tokens * bytes_per_token)

    def view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the memory of the intermediate `name`, uninitialised.

        It is valid until a usage that shares its slot begins.
        """
        slot = self._slot_of[name]
        needed = torch.Size(shape).numel() * dtype.itemsize
        self._grow(slot, needed)
        return self._buffers[slot][:needed].view(dtype).view(shape)

    def _grow(self, slot: int, needed: int) -> None:
        if self._buffers[slot].numel() < needed:
            # freed before its larger successor is made, so that both are never held
            self._buffers[slot] = self._buffer(0)
            self._buffers[slot] = self._buffer(-(-needed // _PAGE) * _PAGE)

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)
