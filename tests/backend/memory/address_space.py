"""Addresses of a GPU without one."""

import torch


class FakeSpace:
    """Counts what is mapped where; its bytes exist in any case.

    Attributes:
        mapped: size and handle by address.
        reserved: sizes by address.
        waits: number of waits for the device.
        history: sizes and addresses of all that was ever mapped.
    """

    def __init__(self, device="cpu", *, granularity=2 << 20, most=1 << 40):
        self.granularity = granularity
        self.mapped, self.reserved = {}, {}
        self.waits = 0
        self.history = []
        self._device = device
        self._most = most
        self._next_address = 1 << 40

    def reserve(self, size):
        address, self._next_address = self._next_address, self._next_address + 2 * size
        self.reserved[address] = size
        return address

    def free(self, address, size):
        assert self.reserved.pop(address) == size
        assert not any(address <= each < address + size for each in self.mapped)

    def map(self, address, size):
        assert address not in self.mapped
        assert any(at <= address and address + size <= at + n for at, n in self.reserved.items())
        if sum(each for each, _ in self.mapped.values()) + size > self._most:
            raise MemoryError
        self.history.append((size, address))
        self.mapped[address] = size, len(self.history)
        return len(self.history)

    def unmap(self, address, size, handle):
        assert self.mapped.pop(address) == (size, handle)

    def wait(self):
        self.waits += 1

    def tensor(self, address, size):
        assert self.reserved[address] == size
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def mapped_steps(self, step):
        """Return which steps of the only reservation are mapped."""
        [first] = self.reserved
        return sorted((address - first) // step for address in self.mapped)
