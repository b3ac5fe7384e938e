"""All parts of a call end before it does."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from varlen_kernels.cpu.native import threads
from varlen_kernels.cpu.native.threads import run_parts, usable_cores, using_cores


def test_an_error_of_the_caller_is_raised_after_other_threads_are_done():
    failed, done = threading.Event(), []

    def work(first, last):
        if first == 0:
            failed.set()
            raise ValueError("the first part")
        failed.wait()
        # the caller has failed; it must still wait
        threading.Event().wait(0.05)
        done.append((first, last))

    with using_cores(2), pytest.raises(ValueError, match="the first part"):
        run_parts(work, [0, 1, 2])

    assert done == [(1, 2)]


def test_an_error_of_another_thread_is_raised():
    def work(first, last):
        if first:
            raise ValueError("the second part")

    with using_cores(2), pytest.raises(ValueError, match="the second part"):
        run_parts(work, [0, 1, 2])


def test_parts_that_no_other_thread_begins_are_run_by_the_caller(monkeypatch):
    seen = []
    monkeypatch.setattr(threads, "_help", lambda work: None)

    run_parts(lambda first, last: seen.append((first, last, threading.get_ident())), [0, 2, 3, 9])

    assert [part[:2] for part in seen] == [(0, 2), (2, 3), (3, 9)]
    assert {part[2] for part in seen} == {threading.get_ident()}


def test_a_caller_does_not_wait_for_a_thread_that_comes_too_late(monkeypatch):
    late = []
    monkeypatch.setattr(threads, "_help", late.append)

    run_parts(lambda first, last: None, [0, 1, 2])

    assert late[0].take_parts() == 0


def test_cores_are_those_of_torch_unless_the_thread_was_given_others():
    usual = torch.get_num_threads()

    with using_cores(7):
        assert usable_cores() == 7
        with ThreadPoolExecutor(1) as other:
            assert other.submit(usable_cores).result() == usual

    assert usable_cores() == usual
