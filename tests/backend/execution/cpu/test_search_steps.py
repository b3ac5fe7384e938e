"""Steps of searches without the host between them choose what steps op by op choose."""

import random
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest

from tests.checkpoints import change_tensors, save_checkpoint
from varlen.execution.cpu import runner as cpu_runner
from varlen.execution.cpu.runner import SearchSteps, StepCores
from varlen.in_process.generator import Generator
from varlen.request.generation import GenerationOptions
from varlen.scheduling.device_plan import NOT_TAKEN
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops, run_calls

pytestmark = pytest.mark.skipif(not has_compiled_ops(), reason="numba compiles the functions")
END = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_checkpoint(
        tmp_path_factory.mktemp("marian"),
        "MarianMTModel",
        encoder_layers=1,
        decoder_layers=1,
        eos_token_id=END,
    )

    def favor_the_end(tensors):
        for tensor in tensors.values():
            if tensor.ndim == 2 and len(tensor) == 263:
                tensor[END] *= 3

    change_tensors(folder, favor_the_end)
    return folder


def translations(folder):
    """Return the answers to some sources, whose searches are of several sizes."""
    rng = random.Random(0)
    generator = Generator.from_pretrained(
        folder,
        device="cpu",
        dtype="fp32",
        threads=2,
        kv_block_tokens=8,
        max_running_sequences=40,
        max_step_tokens=128,
        max_sequence_tokens=40,
    )
    with generator:
        futures = [
            generator.submit(
                [rng.randrange(3, 263) for _ in range(rng.randint(1, 9))],
                GenerationOptions(
                    max_tokens=rng.randint(2, 20),
                    min_tokens=rng.choice([0, 1]),
                    num_beams=beams,
                    n=beams,
                    length_penalty=rng.choice([0.5, 1.0]),
                    early_stopping=rng.choice([True, False]),
                ),
            )
            for beams in (4, 1, 3, 5, 2, 4)
        ]
        return [[(each.token_ids, each.score) for each in future.result(60)] for future in futures]


@pytest.fixture(scope="module")
def expected(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SearchSteps, "runs", lambda *_: False)
        return translations(folder)


@pytest.fixture
def counts(monkeypatch):
    """Return the steps that each search takes in each launch of any length."""
    run, found = SearchSteps.run, []

    def counted(self, step, logits):
        chosen = run(self, step, logits)
        found.append((chosen.ends[:, :, 0] != NOT_TAKEN).sum(0).tolist())
        return chosen

    monkeypatch.setattr(SearchSteps, "run", counted)
    monkeypatch.setattr("varlen.scheduling.device_plan.LAUNCH_SECONDS", 1e6)
    return found


@pytest.mark.parametrize("cores", [1, 3])
def test_answers_are_those_of_steps_op_by_op(folder, expected, counts, cores, monkeypatch):
    monkeypatch.setattr(StepCores, "run", lambda _, step, *__: step(cores))

    assert translations(folder) == expected
    assert max(map(max, counts)) > 1


def test_sources_are_encoded_in_the_first_step_of_a_search(folder, expected, monkeypatch):
    run, encoded = SearchSteps.run, []

    def noted(self, step, logits):
        encoded.append(len(step.sources.get("cu_seqlens", [0])) - 1)
        return run(self, step, logits)

    monkeypatch.setattr(SearchSteps, "run", noted)

    assert translations(folder) == expected
    assert sum(encoded) == len(expected)


@pytest.mark.parametrize("policy", ["reserve", "optimistic"])
def test_a_search_begins_and_goes_on_in_one_launch(folder, counts, policy):
    generator = Generator.from_pretrained(
        folder, device="cpu", dtype="fp32", max_sequence_tokens=40, kv_policy=policy
    )
    with generator:
        counts.clear()
        generator.generate([[5, 6, 7]], max_tokens=20, num_beams=4)

    assert counts[0][0] > 1


def test_a_kept_part_takes_all_numbers_of_another_launch(folder, monkeypatch):
    run, make, parts, others = SearchSteps.run, SearchSteps._part, [], []
    options = GenerationOptions(max_tokens=20, min_tokens=10, num_beams=4)

    def beside_another(self, step, logits):
        # it comes while the first launch runs, so the next one goes on and begins
        if not others:
            others.append(generator.submit([8, 9], options))
        return run(self, step, logits)

    def noted(self, *arguments):
        parts.append(make(self, *arguments))
        return parts[-1]

    monkeypatch.setattr(SearchSteps, "run", beside_another)
    monkeypatch.setattr(SearchSteps, "_part", noted)
    monkeypatch.setattr(StepCores, "run", lambda _, step, *__: step(1))
    generator = Generator.from_pretrained(
        folder, device="cpu", dtype="fp32", max_sequence_tokens=40
    )
    with generator:
        generator.submit([5, 6, 7], options).result(60)
        others[0].result(60)
    part = next(each for each in parts if each.first is not each.step and each.first.beams)

    # searches in another order have arrays of the same shapes, and other rows in the first step
    given = deepcopy((part.first, part.step))
    numbers = cpu_runner._arrays(*given)
    for number, array in enumerate(numbers):
        array[...] = number
    part.take(*given)

    for own, wanted in zip(cpu_runner._arrays(part.first, part.step), numbers, strict=True):
        assert (own == wanted).all()


def test_parts_of_a_launch_end_together_once_its_time_is_over(monkeypatch):
    monkeypatch.setattr("varlen.scheduling.device_plan.LAUNCH_SECONDS", 1000.0)
    later, nothing = np.zeros((7, 1, 2), np.float32), np.zeros(1, np.uint8)
    launch = cpu_runner._Launch(later, nothing, [])
    launch.began -= 600
    launch.furthest = 1
    # one that is behind, and one whose step probably ends after 900 seconds
    assert launch._goes_on(1)
    assert launch._goes_on(2)

    launch.began -= 300
    launch.furthest = 2
    assert not launch._goes_on(3)
    assert launch._goes_on(2)
    assert launch.last == 2


def test_a_launch_takes_two_steps_after_one_in_which_a_search_has_ended(monkeypatch):
    monkeypatch.setattr("varlen.scheduling.device_plan.LAUNCH_SECONDS", 1e6)
    # two searches with a beam each
    found = np.zeros(2 * 2 + 6 * 2, np.int32)
    step = SimpleNamespace(
        searches={"divisors": np.zeros((2, 2), np.float32)},
        beams={"given": np.zeros((2, 2), np.int32)},
    )
    part = cpu_runner._Part(slice(0, 2), step, step, None, None, None, [], found)
    launch = cpu_runner._Launch(np.zeros((7, 2, 2), np.float32), np.zeros(1, np.uint8), [part])
    # the first one runs on in vain
    ended = iter([(0, 0), (1, 0), (0, 0), (1, 0)])

    def run_step(*_):
        found[:4:2] = next(ended)

    monkeypatch.setattr(cpu_runner, "run_calls", run_step)
    launch.run(0, 1)

    ends = launch.chosen().ends
    assert ends[:, 0, 0].tolist() == [0, 1, *[NOT_TAKEN] * 6]
    assert ends[:, 1, 0].tolist() == [0, 0, 0, 0, *[NOT_TAKEN] * 4]


def test_a_part_ends_with_its_searches(monkeypatch):
    step = SimpleNamespace(searches={"divisors": None})
    part = cpu_runner._Part(slice(0, 1), step, step, None, None, None, [], np.ones(8, np.int32))
    launch = cpu_runner._Launch(np.zeros((7, 1, 2), np.float32), np.zeros(1, np.uint8), [part])
    runs = []
    monkeypatch.setattr(cpu_runner, "run_calls", lambda *_: runs.append(1))

    launch.run(0, 1)

    assert runs == [1]


def test_a_launch_ends_when_a_request_has_come(folder, expected, counts, monkeypatch):
    run = SearchSteps.run

    def interrupted(self, step, logits):
        self.arrived[0] = 1
        return run(self, step, logits)

    monkeypatch.setattr(SearchSteps, "run", interrupted)

    assert translations(folder) == expected
    assert {count for launch in counts for count in launch} == {1}


def test_a_step_without_memory_is_taken_by_a_later_launch(folder, expected, counts, monkeypatch):
    monkeypatch.setattr(StepCores, "run", lambda _, step, *__: step(2))
    run, left = SearchSteps.run, []

    def with_a_failure(self, step, logits):
        # of the same searches as the first step, or the first one of others
        left[:] = [False, "later" in step.searches]
        return run(self, step, logits)

    def one_after_another(run, bounds):
        run(bounds[0], bounds[-1])

    def fail_once(*arguments):
        if left and left.pop(0):
            raise MemoryError
        return run_calls(*arguments)

    monkeypatch.setattr(SearchSteps, "run", with_a_failure)
    monkeypatch.setattr(cpu_runner, "run_parts", one_after_another)
    monkeypatch.setattr(cpu_runner, "run_calls", fail_once)

    assert translations(folder) == expected
