"""Orders that are read, and sent on, while others run."""

from multiprocessing.connection import Pipe
from threading import Event

import pytest

from varlen.execution.workers.messages import ReadAhead


@pytest.fixture
def ends():
    ours, theirs = Pipe()
    yield ours, theirs
    ours.close()


def test_every_order_is_prepared_before_the_first_one_is_asked_for(ends):
    ours, theirs = ends
    prepared, all_prepared = [], Event()

    def prepare(order):
        prepared.append(order)
        if len(prepared) == 3:
            all_prepared.set()
        return order.upper()

    orders = ReadAhead(theirs, bytes.decode, prepare)
    for text in (b"a", b"b", b"c"):
        ours.send_bytes(text)

    assert all_prepared.wait(60)
    found = [orders.next(60) for _ in range(3)]
    assert [(order, result()) for order, result in found] == [("a", "A"), ("b", "B"), ("c", "C")]


def test_an_error_of_one_order_is_its_own(ends):
    ours, theirs = ends

    def prepare(order):
        return 1 // len(order)

    orders = ReadAhead(theirs, bytes, prepare)
    ours.send_bytes(b"")
    ours.send_bytes(b"x")

    _, failed = orders.next(60)
    with pytest.raises(ZeroDivisionError):
        failed()
    assert orders.next(60)[1]() == 1


def test_none_is_returned_while_nothing_comes_and_the_end_is_an_end(ends):
    ours, theirs = ends
    orders = ReadAhead(theirs, bytes, len)

    assert orders.next(0.01) is None
    ours.send_bytes(b"ab")
    ours.close()
    assert orders.next(60)[1]() == 2
    with pytest.raises(EOFError):
        orders.next(None)


def test_an_order_that_cannot_be_read_ends_the_orders(ends):
    ours, theirs = ends

    def read(message):
        raise MemoryError

    orders = ReadAhead(theirs, read, len)
    ours.send_bytes(b"ab")
    with pytest.raises(MemoryError):
        orders.next(60)
