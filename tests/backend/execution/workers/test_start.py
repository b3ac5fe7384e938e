"""A process that is started early runs the next model."""

from varlen.config import EngineConfig
from varlen.execution.workers import start
from varlen.execution.workers.process import WorkerHost


def test_the_next_model_runs_in_the_process_that_was_started_early(small_bert):
    config = EngineConfig(device="cpu", dtype="fp32", threads=1, warmup_seconds=0)
    with start.started_early("embed"):
        waiting = start._early[start.HOST].process.pid
        first, second = WorkerHost(small_bert, config), WorkerHost(small_bert, config)

    try:
        assert first.pid == waiting
        assert second.pid != waiting
    finally:
        first.close()
        second.close()


def test_a_process_that_no_model_has_taken_is_ended():
    with start.started_early("generate"):
        unused = start._early[start.STEPS]

    assert unused.process.returncode
    assert not start._early


def test_a_process_whose_engine_ends_before_the_load_ends_too():
    started = start.started_process(start.STEPS)

    started.control.close()

    assert started.process.wait(60) == 0


def test_a_model_that_may_find_a_gpu_is_not_started_early(monkeypatch, tmp_path):
    monkeypatch.setattr(start, "_GPU_FILES", (tmp_path,))

    assert start.excludes_gpu("cpu")
    assert not start.excludes_gpu("auto")
    assert not start.excludes_gpu("cuda")
