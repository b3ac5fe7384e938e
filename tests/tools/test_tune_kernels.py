"""The tuner picks the fastest right launch; the tests set the times."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

import typer

from varlen_bench import tune_kernels
from varlen_bench.harness.summary import Spread
from varlen_bench.kernels.machine import Budget
from varlen_bench.launch_choices import collect_choices
from varlen_bench.ops.table import op_call
from varlen_bench.tune_kernels import tune, tune_all, updated_tables
from varlen_kernels import tuning

pytestmark = pytest.mark.full

CPU = torch.device("cpu")
LAUNCHES = [{"ROWS": 4, "num_warps": 4}, {"ROWS": 1, "num_warps": 2}, {"ROWS": 8, "num_warps": 8}]
FAILS, WRONG = {"ROWS": 7, "num_warps": 1}, {"ROWS": 9, "num_warps": 1}
# microseconds by ROWS: the second launch is the fastest
TIMES = {4: 10.0, 1: 9.0, 8: 9.5}


@pytest.fixture(autouse=True)
def clear_cached_launches():
    tuning.clear()
    yield
    tuning.clear()


class Kernels:
    """Layer norm that stores its launch; ROWS = 7 fails, 9 is wrong."""

    def __init__(self, launches=LAUNCHES):
        self.launches = launches
        self.launch = None

    def add_layer_norm(self, x, residual, weight, bias, *, eps, out):
        key = (x.shape[1], x.dtype)
        self.launch = tuning.pick("add_layer_norm", key, lambda *_: self.launches)
        if self.launch["ROWS"] == 7:
            raise RuntimeError("out of resource: shared memory")
        total = torch.layer_norm(x + residual, weight.shape, weight, bias, eps)
        return out.copy_(total + (self.launch["ROWS"] == 9))


class Timer:
    """A timer whose microseconds are `microseconds(ROWS, tokens)`."""

    def __init__(self, kernels, microseconds):
        self.kernels, self.microseconds = kernels, microseconds

    def num_sets(self, bytes_moved):
        return 2

    def graph(self, call, sets, moved, *, verify=None):
        results = [call(inputs) for inputs in sets]
        if verify is not None:
            verify(results[0])
        time = self.microseconds(self.kernels.launch["ROWS"], len(sets[0]["x"]))
        return Spread(time, time, time, 1)


def machine_with(microseconds=lambda rows, tokens: TIMES[rows], launches=LAUNCHES):
    """Return a machine with these times and launches."""
    kernels = Kernels(launches)
    timer = Timer(kernels, microseconds)
    return SimpleNamespace(
        gpu="Mine", capability="sm_90", driver="1", device=CPU, kernels=kernels, timer=timer
    )


def calls(*tokens, hidden=8):
    return [
        op_call("add_layer_norm", torch.float32, tokens=count, hidden=hidden) for count in tokens
    ]


def choices_of(calls, machine):
    """Return the choices of calls that succeed."""
    failed = []
    found = collect_choices(calls, machine.kernels, failed.append)
    assert failed == []
    return found


def test_each_key_has_its_largest_middle_and_smallest_call_and_a_failed_call_is_reported():
    failing = op_call("beam_step", torch.float32, batch=8, vocabulary=320)
    mixed = [failing, *calls(1, 5, 2, 4, 3), *calls(6, hidden=16)]
    failed = []

    found = collect_choices(mixed, machine_with().kernels, failed.append)

    assert [(choice.op, choice.key) for choice in found] == [
        ("add_layer_norm", (8, torch.float32)),
        ("add_layer_norm", (16, torch.float32)),
    ]
    assert [call.tokens for call in found[0].calls] == [5, 3, 1]
    assert found[0].launches == LAUNCHES
    (line,) = failed
    assert line.startswith("beam_step 8x4x320 float32: failed: AttributeError")


@pytest.mark.parametrize(
    "launches, times, best, text",
    [
        (LAUNCHES, TIMES, LAUNCHES[1], "1.111x"),
        (LAUNCHES, {4: 10.0, 1: 9.8, 8: 12.0}, None, "the default stays"),
        ([LAUNCHES[0], FAILS, LAUNCHES[2]], {4: 10.0, 8: 9.0}, LAUNCHES[2], "out of resource"),
        ([LAUNCHES[0], WRONG, LAUNCHES[2]], {4: 10.0, 8: 9.0}, LAUNCHES[2], "an error of"),
        (LAUNCHES[:1], {}, None, ""),
    ],
    ids="fastest small_gain fails wrong one_candidate".split(),
)
def test_the_fastest_right_launch_wins_if_it_beats_the_default_by_three_percent(
    launches, times, best, text, capsys
):
    machine = machine_with(lambda rows, tokens: times[rows], launches)
    (choice,) = choices_of(calls(4), machine)

    assert tune(choice, machine) == best
    assert text in capsys.readouterr().out
    # no launch is forced any more
    assert tuning.pick("add_layer_norm", choice.key, lambda *_: LAUNCHES)["ROWS"] == 4


def test_inputs_that_depend_on_the_launch_are_filled_for_each_launch():
    filled = []

    def fill(kernels, inputs):
        filled.append(
            tuning.pick("add_layer_norm", (8, torch.float32), lambda *_: LAUNCHES)["ROWS"]
        )

    machine = machine_with()
    (choice,) = choices_of([replace(calls(4)[0], fill=fill)], machine)

    tune(choice, machine)

    # two sets of inputs; the fastest launch is compared with the default once more
    assert filled == [rows for rows in (4, 1, 8, 4, 1) for _ in range(2)]


def test_a_speedup_that_does_not_repeat_keeps_the_default():
    times = iter([10.0, 8.0, 9.0, 10.0, 9.9])
    machine = machine_with(lambda rows, tokens: next(times))
    (choice,) = choices_of(calls(4), machine)

    assert tune(choice, machine) is None
    assert list(times) == []


def test_a_launch_that_is_slower_on_smaller_batches_keeps_the_default(capsys):
    machine = machine_with(lambda rows, tokens: 11.0 if (rows, tokens) == (1, 2) else TIMES[rows])
    (choice,) = choices_of(calls(100, 2), machine)

    assert tune(choice, machine) is None
    assert "0.909x on add_layer_norm 2x8 float32" in capsys.readouterr().out


class Compiling:
    """Compilations that end after some seconds of a clock."""

    def __init__(self, now=None, seconds=0.0):
        self.now, self.seconds, self.waited = now or [0.0], seconds, []

    def wait(self, numbers, seconds):
        self.waited.append(list(numbers))
        self.now[0] += min(self.seconds, seconds)


def test_keys_past_the_budget_are_skipped_and_reported(capsys):
    now = [0.0]
    saved = []

    def save(best):
        saved.append(dict(best))
        now[0] = 10.0

    budget = Budget(5, clock=lambda: now[0])
    machine = machine_with()
    choices, compiling = choices_of([*calls(4), *calls(4, hidden=16)], machine), Compiling()
    best = tune_all(choices, machine, budget, compiling, save)

    # three launches each
    assert compiling.waited == [[0, 1, 2], [3, 4, 5]]
    assert best == {("add_layer_norm", "8/float32"): LAUNCHES[1]}
    assert saved == [best]
    assert "is spent: add_layer_norm 16/float32\n" in capsys.readouterr().out


def test_the_budget_counts_the_wait_for_compilations(capsys):
    now, machine = [0.0], machine_with()
    choices = choices_of(calls(4), machine)
    budget = Budget(5, clock=lambda: now[0])

    best = tune_all(choices, machine, budget, Compiling(now, seconds=60), lambda best: None)

    assert best == {}
    assert now == [5.0]
    assert "is spent: add_layer_norm 8/float32\n" in capsys.readouterr().out


def test_an_update_keeps_other_entries_and_removes_those_without_a_speedup():
    other = {"3.6": {"norm": {"8/float32": {"ROWS": 2}}}}
    before = {
        "sm_80": {"Mine": other},
        "sm_90": {
            "Mine": {"3.6": {"norm": {"8/float32": {"ROWS": 2}, "9/float32": {"ROWS": 3}}}},
            "Other": other,
        },
    }
    best = {
        ("norm", "8/float32"): None,
        ("gate", "8/float32"): {"ROWS": 5},
        ("beam", "1/float32"): None,
    }

    text = updated_tables(json.dumps(before), machine_with(), "3.6", best)

    mine = {"3.6": {"norm": {"9/float32": {"ROWS": 3}}, "gate": {"8/float32": {"ROWS": 5}}}}
    assert tuning.parse_tables(text) == {
        "sm_80": before["sm_80"],
        "sm_90": {"Mine": mine, "Other": other},
    }
    assert updated_tables(text, machine_with(), "3.6", {}) == text


def command(*arguments):
    app = typer.Typer()
    app.command()(tune_kernels.main)
    return CliRunner().invoke(app, arguments)


def test_the_command_skips_without_a_gpu_and_rejects_an_unknown_group(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    done, rejected = command(), command("--only", "conv")

    assert done.exit_code == 0
    assert done.output.strip() == "tune-kernels: skipped, torch finds no CUDA GPU"
    assert rejected.exit_code == 2
    assert "'conv'" in rejected.output


def test_the_command_writes_the_table_that_pick_reads(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Mine")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(tune_kernels, "gpu_machine", lambda passes: machine_with())
    monkeypatch.setattr(tune_kernels, "calls_of", lambda grid, groups, kinds: calls(4))
    # the candidates of these fake kernels are nothing to compile
    monkeypatch.setattr(tune_kernels, "cpu_count", lambda: 1)
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "tuning.json"
    monkeypatch.setattr(tuning, "_text", lambda: output.read_text() if output.exists() else "{}")

    done = command("--dtypes", "bf16", "--output", str(output))

    assert done.exit_code == 0, done.output
    version = tuning.minor_version()
    assert json.loads(output.read_text()) == {
        "sm_90": {"Mine": {version: {"add_layer_norm": {"8/float32": LAUNCHES[1]}}}}
    }
    assert (
        done.output.splitlines()[-1] == f"BENCH tuning: gpu=Mine triton={version} keys=1 faster=1"
    )
    tuning.clear()
    chosen = tuning.pick("add_layer_norm", (8, torch.float32), lambda *_: LAUNCHES)
    assert chosen.items() >= LAUNCHES[1].items()
