"""Steps of one decoder on an emulated GPU, captured once for all tests."""

from array import array
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.checkpoints import save_checkpoint
from varlen.execution.executor import SkippedStepError
from varlen.execution.runner import Runner
from varlen.request.generation import GenerationOptions
from varlen.scheduling.batch import Chunk
from varlen.scheduling.device_plan import SampledToken
from varlen_bench.gpu_report.decoders import decode_chunks, prompt_chunk, step_of

from .fake_cuda import FakeCuda, emulated_gpu
from .test_fake_cuda import (
    DECODER,
    KINDS,
    chosen,
    step_runner,
    tokens_one_by_one,
)

# What a decode step of two sequences costs: its inputs and the graph, then the tokens, for which the host waits.
_STEP = {"pinned copies to the device": 1, "replays": 1}
_TOKENS = {"pinned copies to the host": 1, "waits": 1}
# The copy of blocks of all layers.
_BLOCK_LAUNCHES = 1
DECODE_STEPS = {
    "greedy": {
        **_STEP,
        **_TOKENS,
        "pinned copies to the device": 2,
        "launches": _BLOCK_LAUNCHES,
    },
    "sampled": {
        **_STEP,
        **_TOKENS,
        # another graph, which draws the tokens
        "pinned copies to the device": 2,
        "launches": _BLOCK_LAUNCHES,
    },
    "beams": {
        **_STEP,
        **_TOKENS,
        # the numbers of blocks, and what the search needs
        "pinned copies to the device": 3,
        # beams follow others, their blocks are copied; two kernels of the beam step, and the one that chooses
        "launches": _BLOCK_LAUNCHES + 5,
    },
}


@pytest.fixture(scope="module")
def gpu() -> Iterator[FakeCuda]:
    with emulated_gpu() as gpu:
        yield gpu


@pytest.fixture(scope="module")
def runners(gpu: FakeCuda, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Runner]]:
    """The decoder on a CPU and on the GPU."""
    folder = save_checkpoint(tmp_path_factory.mktemp("decoder"), "GPT2LMHeadModel", **DECODER)
    runners = [step_runner(folder, device) for device in ("cpu", "cuda")]
    yield runners
    for runner in runners:
        runner.close()


def test_generation_gives_the_tokens_of_the_cpu_in_few_launches_copies_and_waits(
    gpu: FakeCuda, runners: list[Runner]
) -> None:
    # decode steps of one, two and, with a short one, three sequences; steps of eight tokens
    assert [runner.graph_use.count for runner in runners] == [0, 4]

    found: dict[str, Counter[str]] = {}
    for kind, options in KINDS.items():
        tokens = []
        for runner in runners:
            prompt = prompt_chunk(runner, 3, options)
            first = runner.run_batch(step_of((prompt,)))
            # two tokens after the prompt, whose block is copied for the second one, or two beams
            chunks = decode_chunks(runner, 2, 4, options)
            if options.is_search:
                chunks = (beams_after(prompt),)
            with gpu.counted() as found[kind]:
                second = runner.run_batch(replace(step_of(chunks), copies=((0, 1),)))
            tokens.append((chosen(first), chosen(second)))
        assert tokens[0] == tokens[1]

    assert found == DECODE_STEPS


# Two steps after a prompt, each launched before the tokens of the one before it are read.
_DRAWN_STEP = {**_STEP, "replays": 2}
AHEAD = {
    "greedy": ({"temperature": 0.0}, _STEP),
    "sampled": ({"temperature": 0.8, "seed": 1}, _STEP),
    # the kernel that edits, and the graph of the draw alone
    "penalties": (
        {"temperature": 0.8, "seed": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {**_DRAWN_STEP, "launches": 1},
    ),
    "greedy with penalties": (
        {"temperature": 0.0, "repetition_penalty": 4.0},
        {**_DRAWN_STEP, "launches": 1},
    ),
    "biases": (
        {"temperature": 0.0, "logit_bias": ((7, 90.0), (9, 89.0)), "presence_penalty": 2.0},
        {**_DRAWN_STEP, "launches": 1},
    ),
    # the host chooses the tokens before, so the step only waits in a queue
    "log probabilities": ({"temperature": 0.8, "seed": 1, "logprobs": 1}, {}),
}


@pytest.mark.parametrize(
    ("options", "launch"),
    [
        pytest.param(*each, id=name, marks=() if name == "sampled" else pytest.mark.full)
        for name, each in AHEAD.items()
    ],
)
def test_a_step_starts_before_the_tokens_that_it_takes_are_read(
    gpu: FakeCuda, runners: list[Runner], options: dict[str, Any], launch: dict[str, int]
) -> None:
    cpu, cuda = runners
    expected = tokens_one_by_one(cpu, GenerationOptions(**options), steps=4)

    prompt = prompt_chunk(cuda, 3, GenerationOptions(**options))
    waiting, found = deque([cuda.launch_batch(step_of((prompt,)))]), list[int]()
    for number in range(1, 4):
        chunk = prompt._replace(start=2 + number, token_ids=(0,), follows=0)
        step = replace(step_of((chunk,)), number=number, after=number - 1)
        with gpu.counted() as counts:
            waiting.append(cuda.launch_batch(step))
        assert counts == ({"pinned copies to the host": 1, **launch} if launch else {})
        (token,) = waiting.popleft()()
        assert isinstance(token, SampledToken)
        found.append(token.token_id)
        prompt.sequence.token_ids.append(token.token_id)
    (last,) = waiting.popleft()()

    assert [*found, last.token_id] == expected


def beams_after(prompt: Chunk, count: int = 0, *, known: bool = True) -> Chunk:
    """Return the tokens of two beams after this number of them."""
    blocks = array("i", [0, 1 if known else 0])
    return prompt._replace(start=3 + count, token_ids=(0, 0), block_ids=blocks, beams=2)


def test_a_step_of_beams_starts_before_it_is_known_what_they_continue(
    gpu: FakeCuda, runners: list[Runner]
) -> None:
    options = GenerationOptions(num_beams=2, max_tokens=4, ignore_eos=True)
    answers = []
    for runner in runners:
        prompt = prompt_chunk(runner, 3, options)
        steps = [prompt, *(beams_after(prompt, count, known=count == 0) for count in range(3))]
        batches = [
            replace(step_of((chunk,)), number=number, after=number - 1)
            for number, chunk in enumerate(steps)
        ]
        if runner.device.type == "cpu":
            *_, last = [runner.run_batch(batch) for batch in batches]
        else:
            waiting = deque([runner.launch_batch(batches[0])])
            for batch in batches[1:]:
                with gpu.counted() as counts:
                    waiting.append(runner.launch_batch(batch))
                # the inputs, and what the search needs; beams follow, blocks; candidates, and the choice
                assert counts == {
                    "pinned copies to the device": 2,
                    "pinned copies to the host": 1,
                    "replays": 1,
                    "launches": 5,
                }
                waiting.popleft()()
            last = waiting.popleft()()
        answers.append(chosen(last))

    assert len(answers[0][0][0]) == 4
    assert answers[0] == answers[1]


def test_a_step_after_one_that_fails_does_not_count(runners: list[Runner]) -> None:
    runner = runners[1]
    chunk = prompt_chunk(runner, 3, KINDS["greedy"])
    expected = chosen(runner.run_batch(step_of((chunk,))))

    # no graph has room for nine tokens
    broken = replace(step_of((chunk._replace(token_ids=(1,) * 9),)), number=11)
    outputs = [
        runner.launch_batch(step)
        for step in (broken, replace(step_of((chunk,)), number=12, after=11))
    ]

    with pytest.raises(ValueError, match="a batch of 9 tokens; allowed: up to 8"):
        outputs[0]()
    with pytest.raises(SkippedStepError):
        outputs[1]()
    # what follows does not need it
    assert chosen(runner.run_batch(replace(step_of((chunk,)), number=13))) == expected
