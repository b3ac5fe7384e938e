"""Work as it arrives at a process of a model.

The last stage of a pipeline reads and prepares work while it runs other work, so that the other stages run it at the
same time.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

from varlen.execution.executor import outcome_of

_Order = TypeVar("_Order")
_Part = TypeVar("_Part")


class Orders(Generic[_Order, _Part]):
    """Work that is read when it runs."""

    def __init__(
        self,
        connection: Connection,
        read: Callable[[bytes], _Order],
        prepare: Callable[[_Order], _Part],
    ) -> None:
        """Read from a connection to the engine.

        Args:
            connection: connection to the engine.
            read: returns the work of a message.
            prepare: returns the part of it that ranks or stages run.
        """
        self._connection = connection
        self._read = read
        self._prepare = prepare
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)

    def next(self, timeout: float | None) -> tuple[_Order, Callable[[], _Part]] | None:
        """Return the next work and a function that prepares it; None after the timeout.

        Args:
            timeout: seconds; None is no limit.

        Raises:
            EOFError, OSError: the engine has closed the connection.
        """
        if not self._arrivals.poll(None if timeout is None else 1000 * timeout):
            return None
        order = self._read(self._connection.recv_bytes())
        return order, partial(self._prepare, order)


class ReadAhead(Orders[_Order, _Part]):
    """Work that a thread reads and prepares as it arrives.

    Its function returns the result of `prepare`, or raises its error.
    """

    def __init__(
        self,
        connection: Connection,
        read: Callable[[bytes], _Order],
        prepare: Callable[[_Order], _Part],
    ) -> None:
        """Start to read; see `Orders`."""
        super().__init__(connection, read, prepare)
        self._arrived: SimpleQueue[tuple[_Order, Callable[[], _Part]] | BaseException] = (
            SimpleQueue()
        )
        Thread(target=self._loop, name="varlen-orders", daemon=True).start()

    def next(self, timeout: float | None) -> tuple[_Order, Callable[[], _Part]] | None:
        """Return the next work, see `Orders.next`."""
        try:
            arrived = self._arrived.get(timeout=timeout)
        except Empty:
            return None
        if isinstance(arrived, BaseException):
            raise arrived
        return arrived

    def _loop(self) -> None:
        try:
            while (found := super().next(None)) is not None:
                order, prepare = found
                self._arrived.put((order, outcome_of(prepare)))
        except BaseException as error:
            # also too little memory to read: the process must not wait for ever
            self._arrived.put(error)
