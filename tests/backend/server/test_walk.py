"""The files that one step passes, and that a reader opens too.

A call counts with its file, a comprehension does not. A change of file is a call in another file than the call before.
"""

import json
import threading
from collections import defaultdict
from itertools import chain, pairwise
from pathlib import Path
from statistics import median_low

import pytest

import varlen
import varlen_kernels
from tests.backend.model_configs import model_config
from tests.backend.requests import text

_MODELS = Path(__file__).parents[3] / "model_repository"
_OURS = tuple(f"{each}/" for module in (varlen, varlen_kernels) for each in module.__path__)
_ENGINE = "scheduling/engine.py"

# Most files and changes of file: the figures of 2026-11-30 plus up to 10 %.
_BOUNDS = {
    "embed": (22, 82),
    "generate": (25, 66),
    "translate": (26, 94),
}


@pytest.fixture
def traced(monkeypatch):
    """Return a function that runs another and returns the calls of each thread."""
    calls = defaultdict(list)
    is_on = False

    def note(frame, event, _):
        code = frame.f_code
        if is_on and event == "call" and code.co_filename.startswith(_OURS):
            calls[threading.current_thread().name].append((code.co_name, code.co_filename))

    def traced(run):
        nonlocal is_on
        calls.clear()
        is_on = True
        run()
        is_on = False
        return {
            thread: [each for each in seen if not each[0].startswith("<")]
            for thread, seen in calls.items()
        }

    # for the threads of the models that this test loads
    threading.setprofile(note)
    yield traced
    threading.setprofile(None)


def _steps(calls):
    """Return the files that each round of the engine's thread passes."""
    starts = [
        at for at, (name, file) in enumerate(calls) if name == "step" and file.endswith(_ENGINE)
    ]
    return [[file for _, file in calls[begin:end]] for begin, end in pairwise(starts)]


def _changes(files):
    """Return the number of changes of file."""
    return sum(before != after for before, after in pairwise(files))


@pytest.mark.parametrize(
    "task, folder, options",
    [
        ("embed", "minilm", None),
        (
            "generate",
            "tiny_gpt2",
            {"max_tokens": 8, "temperature": 0.8, "ignore_eos": True, "seed": 1},
        ),
        ("translate", "tiny_dates", {"num_beams": 4, "n": 2}),
    ],
    ids=["embed batch", "decode step", "translate step"],
)
def test_a_step_passes_few_files(task, folder, options, load, ask, traced, monkeypatch):
    if not (_MODELS / folder / "1/model.safetensors").is_file():
        pytest.fail(f"model_repository/{folder}/1 has no weights; run `make setup` to make them")
    # each launch of searches has one step
    monkeypatch.setattr("varlen.scheduling.device_plan.LAUNCH_SECONDS", 0.0)
    given = model_config(
        task, hidden=384, parameters={"dtype": "fp32", "threads": "1", "warmup_seconds": "0"}
    )
    if options is not None:
        given |= {"model_transaction_policy": {"decoupled": True}, "max_batch_size": 0}
    model = load(_MODELS / folder / "1", given)

    def run():
        if options is None:
            request = ask(text=text("a cat sits on the mat"), outputs=("sentence_embedding",))
        else:
            prompt = {"generate": "The list of", "translate": "the 3rd of March, 2021"}[task]
            tensors = {
                "text_input": text(prompt)[0],
                "sampling_parameters": text(json.dumps(options))[0],
            }
            request = ask(outputs=(), decoupled=True, **tensors)
        model.execute([request])
        assert request.answered.wait(20.0)

    # the first ones compile and measure
    run()
    run()
    calls = traced(run)

    if task == "embed":
        threads = [calls["varlen-engine"], calls["varlen-executor-0"]]
        paths = [[file for _, file in seen] for seen in threads]
        found = len({*chain(*paths)}), sum(map(_changes, paths))
    else:
        steps = _steps(calls["varlen-engine"])[1:-1]
        assert len(steps) > 4
        found = median_low(len({*step}) for step in steps), median_low(map(_changes, steps))
    most_files, most_changes = _BOUNDS[task]
    is_short = found[0] <= most_files and found[1] <= most_changes
    assert is_short, (
        f"{found[0]} files and {found[1]} changes of file; at most {most_files} and {most_changes}. See 'The way of a"
        " step' in docs/concepts/architecture.md: a new call belongs into a file that the step passes anyway"
    )
