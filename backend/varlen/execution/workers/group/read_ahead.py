"""Orders that the last stage of a pipeline reads while it runs others.

The other stages get each of them at once, so that they run it while the last one is busy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

from varlen.execution.executor import outcome_of

_Order = TypeVar("_Order")
_Prepared = TypeVar("_Prepared")


class ReadAhead(Generic[_Order, _Prepared]):
    """Orders that are prepared as they arrive: `Orders`.

    Each comes with a function that returns the result of `prepare`, or raises its error.
    """

    def __init__(
        self,
        connection: Connection,
        receive: Callable[[Connection], _Order],
        prepare: Callable[[_Order], _Prepared],
    ) -> None:
        """Start to read.

        Args:
            connection: connection to the engine.
            receive: returns the next order.
            prepare: sends it to the other stages; called in a thread of this object.
        """
        self._connection = connection
        self._receive = receive
        self._prepare = prepare
        self._arrived: SimpleQueue[tuple[_Order, Callable[[], _Prepared]] | BaseException] = (
            SimpleQueue()
        )
        Thread(target=self._read, name="varlen-orders", daemon=True).start()

    def next(self, timeout: float | None) -> tuple[_Order, Callable[[], _Prepared]] | None:
        """Return the next order; see `Orders`."""
        try:
            arrived = self._arrived.get(timeout=timeout)
        except Empty:
            return None
        if isinstance(arrived, BaseException):
            raise arrived
        return arrived

    def _read(self) -> None:
        try:
            while True:
                order = self._receive(self._connection)
                self._arrived.put((order, outcome_of(partial(self._prepare, order))))
        except BaseException as error:
            # also too little memory for an order: the process that runs them must not wait for ever
            self._arrived.put(error)
