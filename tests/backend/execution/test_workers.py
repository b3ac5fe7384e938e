"""Worker threads: parallel, one core each, and torch's thread setting unchanged."""

from threading import Barrier, get_ident

import pytest
import torch

from varlen.execution.workers import WorkerThreads

SECONDS = 10.0


@pytest.fixture
def workers():
    made = WorkerThreads(3)
    yield made
    made.close()


def test_tasks_run_at_the_same_time_in_threads_of_one_core(workers):
    meeting = Barrier(3, timeout=SECONDS)

    def task():
        meeting.wait()
        return get_ident(), torch.get_num_threads()

    threads, cores = zip(*workers.run([task] * 3), strict=True)

    assert len(set(threads)) == 3
    assert set(cores) == {1}


def test_results_come_in_the_order_of_the_tasks(workers):
    assert workers.run([lambda: "a", lambda: "b"]) == ["a", "b"]


def test_a_failing_task_is_raised_once_no_other_runs(workers):
    ended = []

    def fail():
        raise ZeroDivisionError

    def work():
        torch.ones(300, 300) @ torch.ones(300, 300)
        ended.append(True)

    with pytest.raises(ZeroDivisionError):
        workers.run([fail, work, work])

    assert len(ended) == 2


def test_the_threads_that_torch_uses_elsewhere_stay_what_they_were():
    before = torch.get_num_threads()

    WorkerThreads(2).close()

    assert torch.get_num_threads() == before
