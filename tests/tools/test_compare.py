"""The comparison of systems: passes over requests, workers, and their options."""

import importlib
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext

import pytest
from typer.testing import CliRunner

from varlen_bench.compare.passes import Requests, drive_batches, drive_iterations
from varlen_bench.compare.results import Result, csv_row, speed_ratio
from varlen_bench.compare.systems import REFERENCE, System
from varlen_bench.compare.turns import measure_in_turns, running, start_system
from varlen_bench.compare.worker import Worker
from varlen_bench.harness.worker import WorkerError
from varlen_bench.peers import engines
from varlen_bench.workers.stepped import step_in_thread

from .virtual_clock import VirtualTime

pytestmark = pytest.mark.full

SORTED = System("sorted", "transformers", "fp32", "sorted")


def small(*lengths, due=None):
    """Return requests with these lengths of prompt and answer."""
    prompts = [[7] * prompt for prompt, _ in lengths]
    return Requests("small", prompts, [limit for _, limit in lengths], due or [0.0] * len(lengths))


def run_batch(prompts, limits, on_tokens):
    """Generate the token 10 * length of prompt + number, step by step."""
    for step in range(max(limits)):
        for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            if step < limit:
                on_tokens(row, [10 * len(prompt) + step], time.perf_counter())


def test_poisson_arrivals_have_their_rate_and_the_same_requests():
    whole = small(*[(3, 2)] * 2000)

    due = whole.arriving(rate=50.0, seed=0).due

    assert due == sorted(due)
    assert 2000 / due[-1] == pytest.approx(50.0, rel=0.1)
    assert whole.arriving(50.0, 0) == whole.arriving(50.0, 0)


def test_batches_take_the_longest_prompts_that_wait_and_run_to_their_end(monkeypatch):
    VirtualTime.replace(monkeypatch)
    seen = []

    def run(prompts, limits, on_tokens):
        seen.append([len(prompt) for prompt in prompts])
        time.sleep(0.8)
        run_batch(prompts, limits, on_tokens)

    # the last two arrive while the first batch runs
    requests = small((4, 2), (9, 1), (5, 3), (6, 1), due=[0.0, 0.0, 0.5, 0.6])

    answers = drive_batches(run, requests, SORTED, 2)

    assert seen == [[9, 4], [6, 5]]
    assert [answer.tokens for answer in answers] == [[40, 41], [90], [50, 51, 52], [60]]
    assert [answer.moments[0] for answer in answers] == [0.8, 0.8, 1.6, 1.6]
    assert [answer.end for answer in answers] == [0.8, 0.8, 1.6, 1.6]


def test_instances_run_batches_at_the_same_time_and_share_the_requests():
    together = threading.Barrier(2, timeout=60)

    def run(prompts, limits, on_tokens):
        together.wait()
        run_batch(prompts, limits, on_tokens)

    requests = small((9, 1), (4, 2), (7, 1), (5, 3))

    answers = drive_batches(run, requests, SORTED, 1, instances=2)

    assert [answer.tokens for answer in answers] == [[90], [40, 41], [70], [50, 51, 52]]


def test_an_instance_that_fails_ends_the_pass():
    def run(prompts, limits, on_tokens):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        drive_batches(run, small((9, 1), (4, 2)), SORTED, 1, instances=2)


def test_iterations_start_requests_when_they_are_due(monkeypatch):
    VirtualTime.replace(monkeypatch)
    moments = []

    def submit(prompt, limit, on_tokens):
        moments.append(time.perf_counter())
        run_batch([prompt], [limit], on_tokens)
        done = Future()
        done.set_result(None)
        return done

    answers = drive_iterations(submit, small((4, 2), (5, 1), due=[0.0, 0.1]))

    assert moments == [answer.moments[0] for answer in answers] == [0.0, 0.1]
    assert moments == [answer.end for answer in answers]
    assert [answer.tokens for answer in answers] == [[40, 41], [50]]


def test_requests_that_are_due_together_start_as_a_list(monkeypatch):
    VirtualTime.replace(monkeypatch)
    lists = []

    class Engine:
        def __call__(self, prompt, limit, on_tokens):
            raise AssertionError("one by one")

        def submit_all(self, prompts, limit, on_tokens):
            lists.append([len(prompt) for prompt in prompts])
            run_batch(prompts, [limit] * len(prompts), on_tokens)
            done = Future()
            done.set_result(None)
            return done

    load = small((4, 2), (5, 2), (6, 1), (7, 1), due=[0.0, 0.0, 0.0, 0.1])
    answers = drive_iterations(Engine(), load)

    assert lists == [[4, 5], [6], [7]]
    assert [answer.tokens for answer in answers] == [[40, 41], [50, 51], [60], [70]]


class Stepped:
    """An engine whose step gives a token to each request; the token counts its steps."""

    def __init__(self, fails_at=0):
        self.left, self.steps, self.fails_at = {}, 0, fails_at

    def add(self, number, prompt, limit):
        self.left[number] = limit

    def step(self):
        assert self.left, "a step without requests"
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("out of memory")
        for number in list(self.left):
            self.left[number] -= 1
            is_last = self.left[number] == 0
            if is_last:
                del self.left[number]
            yield number, [self.steps], is_last


def test_a_thread_runs_steps_while_requests_run_and_each_token_has_its_moment():
    engine = Stepped()
    submit = step_in_thread(lambda: (engine.add, engine.step))

    for passed in (0, 4):
        answers = drive_iterations(submit, small((3, 4), due=[0.0]))
        assert [answer.tokens for answer in answers] == [[passed + n for n in (1, 2, 3, 4)]]
        (moments,) = [answer.moments for answer in answers]
        assert moments == sorted(set(moments))

    answers = drive_iterations(submit, small((3, 4), (5, 1), (4, 2), due=[0.0, 0.0, 0.01]))
    assert [len(answer.tokens) for answer in answers] == [4, 1, 2]


def test_requests_after_a_step_that_failed_fail_too():
    engine = Stepped(fails_at=1)
    submit = step_in_thread(lambda: (engine.add, engine.step))

    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            submit([7, 7], 3, lambda *_: None).result(timeout=60)


def test_a_step_that_fails_ends_the_pass():
    engine = Stepped(fails_at=2)

    with pytest.raises(RuntimeError, match="out of memory"):
        drive_iterations(step_in_thread(lambda: (engine.add, engine.step)), small((9, 1), (4, 8)))


def test_an_engine_that_cannot_be_loaded_starts_no_request():
    def load():
        raise SystemExit("no such instruction")

    with pytest.raises(SystemExit, match="no such instruction"):
        step_in_thread(load)


def test_a_worker_keeps_its_fastest_batch_size():
    seen = []

    def answer(requests, size):
        seen.append((size, len(requests)))
        time.sleep(0.001 if size == 8 else 0.1 * len(requests))
        return drive_batches(run_batch, requests, SORTED, size)

    def worker_of(system):
        return Worker(system, answer, lambda answers, _: {"answers": len(answers)}, "tokens")

    worker, requests = worker_of(SORTED), small(*[(3, 2)] * 10)

    assert worker.calibrate(requests)["size"] == 8
    assert seen == [(1, 4), (4, 4), (8, 8)]
    measured = worker.measure(requests)
    assert measured["figures"].keys() == {"answers", "machine_gflops"}
    assert measured["answers"] == [[30, 31]] * 10
    assert seen[-1] == (8, 10)
    assert worker_of(REFERENCE).measure(requests)["answers"] == [[30, 31]] * 10
    assert seen[-1] == (1, 10)


WORK = {"workload": "small", "requests": 1, "work": 4}


def results_of(*names):
    systems = [System(name, "transformers", "fp32", "sorted") for name in names]
    return [Result(system=system, **WORK) for system in systems]


def test_systems_take_turns_in_every_round(monkeypatch):
    VirtualTime.replace(monkeypatch)
    results, order = results_of("a", "b"), []

    def measure(result):
        order.append(result.system.name)
        # the machine halves its speed in the second round
        return {"tokens_per_second": (200.0 if result is results[0] else 100.0) / len(order)}

    measure_in_turns(results, measure, rounds=3, report=print)

    assert order == ["a", "b"] * 3
    assert speed_ratio(*results) == pytest.approx(8 / 3, abs=1e-4)


def test_a_system_that_fails_keeps_its_reason_and_the_others_go_on(monkeypatch):
    VirtualTime.replace(monkeypatch)
    results = results_of("a", "b", "c")

    def start(system):
        if system.name == "a":
            raise RuntimeError("export failed")
        return nullcontext(system.name)

    def measure(result):
        if result.system.name == "b" and result.rounds:
            raise WorkerError("out of memory")
        return {"tokens_per_second": 8.0}

    with running(results, start, lambda process, own: None, print) as ready:
        assert ready == {"b": "b", "c": "c"}
        measure_in_turns(results, measure, rounds=3, report=print)

    notes = ["did not run: export failed", "did not run: out of memory", ""]
    assert [result.note for result in results] == notes
    columns = ("system", "tokens_per_second", "tokens_per_second_p80", "rounds", "rate")
    rows = [tuple(csv_row(result, columns).values()) for result in results]
    assert rows == [("a", None, None, 0, None), ("b", None, None, 0, None), ("c", 8, 8, 3, None)]


def test_an_engine_without_its_environment_keeps_a_row_that_says_how_to_make_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(engines, "_ROOT", tmp_path)
    results = [Result(system=System("vllm", "vllm", "fp32", "engine"), **WORK)]

    def start(system):
        return start_system("json.tool", system, tmp_path, tmp_path, threads=1)

    with running(results, start, lambda process, own: None, print) as ready:
        assert not ready

    assert results[0].note == (
        "did not run: its environment is missing: make .venv/peers-vllm/stamp"
    )
    python = tmp_path / ".venv/peers-vllm/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert engines.interpreter("vllm") == python
    assert engines.interpreter("varlen") is None


@pytest.mark.parametrize("module", ["beam", "generate", "encoder"], ids=lambda name: name)
def test_a_worker_imports_only_the_libraries_of_its_engine(module):
    # other engines' environments do not have ours
    names = "{'torch', 'transformers', 'onnxruntime', 'openvino', 'ctranslate2', 'varlen', 'varlen_kernels', 'rich'}"
    code = f"import sys, varlen_bench.workers.{module}; print({names} & set(sys.modules))"

    # an engine that another system imports would count in its memory
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


@pytest.mark.parametrize(
    "benchmark, options, message",
    [
        ("beam", "--only vllm", "unknown name 'vllm'"),
        ("beam", "--model llama", "unknown name 'llama'"),
        ("beam", "--quick --repository none", "No such file"),
        ("generate", "--only llama.cpp", "unknown name 'llama.cpp'"),
        ("generate", "--models mistral", "unknown name 'mistral'"),
        ("generate", "--quick --repository none", "No such file"),
        ("memory", "--only minilm,gpt", "unknown name 'gpt'"),
    ],
)
def test_options_that_cannot_be_are_refused(benchmark, options, message):
    app = importlib.import_module(f"varlen_bench.{benchmark}").app

    done = CliRunner().invoke(app, options.split(), env={"COLUMNS": "200"})

    assert done.exit_code == 2
    assert message in done.output
