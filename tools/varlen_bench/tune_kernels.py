"""Finds the fastest launch of every kernel on this GPU: `python -m varlen_bench.tune_kernels`.

Runs the benchmark's cases and asks which launches they chose among. Every candidate is tried on the largest case of
its key, by the benchmark's own clock. One that beats the default by more than 3 %, twice, and is no more than 3 %
slower on smaller cases of the key, is written into the table of this GPU and this version of Triton; where none
does, the default stays and the table says nothing. A candidate that is wrong or does not start is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated

import torch
import typer

from varlen_bench.harness import rows as bench_report
from varlen_bench.kernels.case import Case, Inputs, as_tensor
from varlen_bench.kernels.grid import FULL, Grid
from varlen_bench.kernels.groups import GROUPS, served_attention
from varlen_bench.kernels.machine import Budget, gpu_machine
from varlen_bench.kernels.timing import Timer
from varlen_kernels import tuning
from varlen_kernels.tuning import Key, Launch

TABLE = Path("kernels/varlen_kernels/tuning.json")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# How much faster a launch must be than the default, and how much slower it may be elsewhere.
GAIN = 1.03
_LOSS = 0.97
_MOST_CASES = 3

Say = Callable[[str], None]
# By op and by key as the table spells it.
Found = dict[tuple[str, str], Launch | None]


@dataclass(slots=True)
class Choice:
    """A key of an op, and where it matters.

    Attributes:
        op: the launcher's name.
        key: what its launch depends on.
        launches: its candidates, the default first.
        cases: that ask for it, the largest first.
    """

    op: str
    key: Key
    launches: Sequence[Launch]
    cases: list[Case] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Op and key as the table spells them."""
        return f"{self.op} {tuning.spell(self.key)}"


@dataclass(frozen=True, slots=True)
class Bench:
    """What candidates are timed with."""

    kernels: ModuleType
    device: torch.device
    timer: Timer
    say: Say


@torch.inference_mode()
def choices_of(cases: Sequence[Case], bench: Bench) -> list[Choice]:
    """Return every key that the cases ask for, each with its largest, its middle and its smallest case."""
    found: dict[tuple[str, Key], Choice] = {}
    for case in cases:
        try:
            inputs = case.make(bench.device, 0)
            with tuning.watch() as asked:
                case.call(bench.kernels, inputs)
        except Exception as error:  # the other cases may do
            bench.say(f"{case.name}: {_first_line(error)}")
            continue
        for op, key, candidates in asked:
            if (op, key) not in found:
                found[op, key] = Choice(op, key, candidates(*key))
            if case not in found[op, key].cases:
                found[op, key].cases.append(case)
    for choice in found.values():
        choice.cases.sort(key=lambda case: -case.bytes_moved)
        if len(choice.cases) > _MOST_CASES:
            middle = choice.cases[len(choice.cases) // 2]
            choice.cases = [choice.cases[0], middle, choice.cases[-1]]
    return list(found.values())


@torch.inference_mode()
def tune(choice: Choice, bench: Bench) -> Launch | None:
    """Return the launch that beats the default, or None."""
    if len(choice.launches) < 2:
        return None
    largest = _Stopwatch(choice, choice.cases[0], bench)
    default = largest.time(choice.launches[0])
    times = {at: largest.time(launch) for at, launch in enumerate(choice.launches[1:], start=1)}
    measured = {at: time for at, time in times.items() if time is not None}
    if default is None or not measured:
        bench.say(f"{choice.name}: nothing to compare")
        return None
    best = min(measured, key=lambda at: measured[at])
    launch = choice.launches[best]
    gain = default / measured[best]
    if gain > GAIN:
        gain = min(gain, largest.gain(launch))
    if gain <= GAIN:
        bench.say(f"{choice.name}: the default stays, the best of the others has {gain:.3f}x")
        return None
    for case in choice.cases[1:]:
        elsewhere = _Stopwatch(choice, case, bench).gain(launch)
        if elsewhere < _LOSS:
            bench.say(
                f"{choice.name}: the default stays, {launch} has {elsewhere:.3f}x on {case.name}"
            )
            return None
    bench.say(
        f"{choice.name}: {launch} has {gain:.3f}x, {measured[best]:.2f} us on {case_name(choice)}"
    )
    return launch


def case_name(choice: Choice) -> str:
    """Return what a choice's largest case is called."""
    return choice.cases[0].name


class _Stopwatch:
    """Times the launches of a choice on one case, whose inputs it makes once."""

    def __init__(self, choice: Choice, case: Case, bench: Bench) -> None:
        self._choice = choice
        self._case = case
        self._bench = bench
        count = bench.timer.num_sets(case.bytes_moved)
        self._sets = [case.make(bench.device, seed) for seed in range(count)]
        self._exact = case.exact(self._sets[0])

    def time(self, launch: Launch) -> float | None:
        """Return the microseconds of a call; None, with a line, if the launch is wrong or fails."""
        case, choice = self._case, self._choice
        read = case.read or as_tensor

        def check(result: object) -> None:
            error = case.error(read(result, self._sets[0]), self._exact)
            if not error <= case.most_error():
                raise ValueError(f"an error of {error:.2g}, allowed {case.most_error():.2g}")

        def call(inputs: Inputs) -> object:
            return case.call(self._bench.kernels, inputs)

        try:
            with tuning.forced(choice.op, choice.key, launch):
                timing = self._bench.timer.graph(call, self._sets, case.bytes_moved, verify=check)
        except Exception as error:  # the other launches may do
            self._bench.say(f"{choice.name}: {launch} on {case.name}: {_first_line(error)}")
            return None
        return timing.median

    def gain(self, launch: Launch) -> float:
        """Return the default's time over the launch's, 0 if either fails."""
        default, other = self.time(self._choice.launches[0]), self.time(launch)
        return 0.0 if default is None or other is None else default / other


def updated_tables(
    text: str, gpu: str, version: str, found: Mapping[tuple[str, str], Launch | None]
) -> str:
    """Return the text of tuning.json with what was found for one GPU and version of Triton.

    Args:
        text: of the file before.
        gpu: its name.
        version: of Triton, such as "3.6".
        found: by op and spelled key; None removes what the table had.

    Raises:
        ValueError: the text is no table.
    """
    tables = {
        name: {
            number: {op: dict(keys) for op, keys in table.items()} for number, table in of.items()
        }
        for name, of in tuning.parse_tables(text).items()
    }
    table = tables.setdefault(gpu, {}).setdefault(version, {})
    for (op, key), launch in found.items():
        table.setdefault(op, {}).pop(key, None)
        if launch is not None:
            table[op][key] = dict(launch)
    tables[gpu][version] = {op: keys for op, keys in table.items() if keys}
    return json.dumps(tables, indent=2, sort_keys=True) + "\n"


def cases_in_use(grid: Grid, groups: Sequence[str], dtype: torch.dtype) -> list[Case]:
    """Return the cases of these groups, and attention as a server calls it."""
    cases = [case for group in groups for case in GROUPS[group](grid, dtype)]
    if "attention" in groups:
        cases += served_attention(grid, dtype)
    return cases


def tune_all(
    cases: Sequence[Case], bench: Bench, budget: Budget, done: Callable[[Found], None]
) -> Found:
    """Return the best launch of every key that the cases ask for, None where the default is.

    Args:
        cases: what is timed.
        bench: with what.
        budget: keys that it has no time for keep what the table has, and a line says so.
        done: gets what was found so far, after each key.
    """
    found: Found = {}
    choices = choices_of(cases, bench)
    for at, choice in enumerate(choices):
        if not budget.allows():
            left = ", ".join(skipped.name for skipped in choices[at:])
            bench.say(f"skipped, since the budget of {budget.seconds:.0f} s is spent: {left}")
            break
        try:
            found[choice.op, tuning.spell(choice.key)] = tune(choice, bench)
        except Exception as error:  # the other keys may do
            bench.say(f"{choice.name}: {_first_line(error)}")
            if bench.device.type == "cuda":
                # raises if the device is lost
                torch.cuda.synchronize()
            continue
        done(found)
    return found


def main(
    only: Annotated[
        str, typer.Option(help=f"Of {', '.join(GROUPS)}, by comma; all when empty.")
    ] = "",
    dtypes: Annotated[str, typer.Option(help=f"Of {', '.join(_DTYPES)}.")] = "bf16,fp16",
    budget: Annotated[float, typer.Option(min=1, help="Seconds.")] = 3000,
    passes: Annotated[int, typer.Option(min=1, help="Timed passes, of which the median.")] = 50,
    output: Annotated[Path, typer.Option(help="The table that is written.")] = TABLE,
) -> None:
    """Time every candidate launch on this GPU and keep those that beat the default."""
    groups = [name.strip() for name in only.split(",") if name.strip()] or list(GROUPS)
    kinds = [name.strip() for name in dtypes.split(",") if name.strip()]
    if unknown := [name for name in groups if name not in GROUPS]:
        raise typer.BadParameter(f"{unknown[0]!r} is no group; there are {', '.join(GROUPS)}")
    if unknown := [name for name in kinds if name not in _DTYPES]:
        raise typer.BadParameter(f"{unknown[0]!r} is no dtype; there are {', '.join(_DTYPES)}")
    if not torch.cuda.is_available():
        print("tune-kernels: skipped, since torch sees no CUDA GPU here")
        return
    machine = gpu_machine(passes)
    bench = Bench(machine.kernels, machine.device, machine.timer, _print)
    version = tuning.minor_version()
    print(f"{machine.gpu}, driver {machine.driver}, triton {version}", flush=True)
    before = TABLE.read_text(encoding="utf-8") if TABLE.is_file() else "{}"

    def write(found: Found) -> None:
        # after each key, so that a run that is cut short keeps what it found
        output.write_text(updated_tables(before, machine.gpu, version, found), encoding="utf-8")

    cases = [case for kind in kinds for case in cases_in_use(FULL, groups, _DTYPES[kind])]
    found = tune_all(cases, bench, Budget(budget), write)
    faster = sum(launch is not None for launch in found.values())
    print(f"written: {output}")
    figures: dict[str, bench_report.Cell] = {"gpu": machine.gpu.replace(" ", "_")}
    figures |= {"triton": version, "keys": len(found), "faster": faster}
    print(bench_report.bench_line("tuning", figures))


def _print(line: str) -> None:
    print(line, flush=True)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:160]}"


if __name__ == "__main__":
    typer.run(main)
