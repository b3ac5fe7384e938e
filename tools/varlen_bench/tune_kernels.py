"""Find the fastest launch of every kernel on this GPU: `python -m varlen_bench.tune_kernels`.

Runs the benchmark's calls and collects the launches that each could use. Every candidate is timed on the largest call
of its key, by the benchmark's own timer. A candidate that beats the default by more than 3 %, twice, and is at most
3 % slower on smaller calls of the key, is written into the table of this GPU and this version of Triton. Otherwise
the default stays and the table has no entry. A candidate that is wrong or fails is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from varlen_bench.harness.command import Only, select
from varlen_bench.harness.rows import Cell, bench_line
from varlen_bench.kernels.grid import FULL, Grid
from varlen_bench.kernels.groups import DTYPES, GROUPS, served_attention
from varlen_bench.kernels.machine import Budget, gpu_machine
from varlen_bench.kernels.measure import failed_note
from varlen_bench.kernels.timing import Timer
from varlen_bench.ops.call import OpCall
from varlen_kernels import tuning
from varlen_kernels.tuning import Key, Launch

TABLE = Path("kernels/varlen_kernels/tuning.json")

# Least time of the default over that of a better launch, and the least elsewhere.
GAIN = 1.03
_LOSS = 0.97
_MAX_CALLS = 3

# By op and by key as the table spells it.
Found = dict[tuple[str, str], Launch | None]


@dataclass(slots=True)
class Choice:
    """A key of an op, its candidate launches, and the calls that ask for it.

    Attributes:
        launches: the default first.
        calls: the largest first.
    """

    op: str
    key: Key
    launches: Sequence[Launch]
    calls: list[OpCall] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Op and key as the table spells them."""
        return f"{self.op} {tuning.spell(self.key)}"


@dataclass(frozen=True, slots=True)
class Bench:
    """What candidates are timed with, and where progress is printed."""

    kernels: object
    device: torch.device
    timer: Timer
    report: Callable[[str], None]


@torch.inference_mode()
def choices_of(calls: Iterable[OpCall], bench: Bench) -> list[Choice]:
    """Return every key that the calls ask for, each with its largest, its middle and its smallest call."""
    found: dict[tuple[str, Key], Choice] = {}
    for call in calls:
        try:
            with tuning.watch() as asked:
                call.run(bench.kernels, call.make(bench.device, 0))
        except Exception as error:  # other calls may succeed
            bench.report(f"{call.name}: {failed_note(error)}")
            continue
        for op, key, candidates in asked:
            choice = found.setdefault((op, key), Choice(op, key, candidates(*key)))
            if call not in choice.calls:
                choice.calls.append(call)
    for choice in found.values():
        choice.calls.sort(key=lambda call: -call.bytes_moved)
        if len(choice.calls) > _MAX_CALLS:
            middle = choice.calls[len(choice.calls) // 2]
            choice.calls = [choice.calls[0], middle, choice.calls[-1]]
    return list(found.values())


@torch.inference_mode()
def tune(choice: Choice, bench: Bench) -> Launch | None:
    """Return the launch that beats the default, or None."""
    if len(choice.launches) < 2:
        return None
    largest = _Stopwatch(choice, choice.calls[0], bench)
    default = largest.time(choice.launches[0])
    times = {at: largest.time(launch) for at, launch in enumerate(choice.launches[1:], start=1)}
    measured = {at: time for at, time in times.items() if time is not None}
    if default is None or not measured:
        bench.report(f"{choice.name}: nothing to compare")
        return None
    best = min(measured, key=lambda at: measured[at])
    launch = choice.launches[best]
    gain = default / measured[best]
    if gain > GAIN:
        gain = min(gain, largest.gain(launch))
    if gain <= GAIN:
        bench.report(f"{choice.name}: the default stays, the best of the others has {gain:.3f}x")
        return None
    for call in choice.calls[1:]:
        elsewhere = _Stopwatch(choice, call, bench).gain(launch)
        if elsewhere < _LOSS:
            text = f"the default stays, {launch} has {elsewhere:.3f}x on {call.name}"
            bench.report(f"{choice.name}: {text}")
            return None
    text = f"{launch} has {gain:.3f}x, {measured[best]:.2f} us on {choice.calls[0].name}"
    bench.report(f"{choice.name}: {text}")
    return launch


class _Stopwatch:
    """Times the launches of a choice on one call, whose inputs it makes once."""

    def __init__(self, choice: Choice, call: OpCall, bench: Bench) -> None:
        self._choice = choice
        self._call = call
        self._bench = bench
        count = bench.timer.num_sets(call.bytes_moved)
        self._sets = [call.make(bench.device, seed) for seed in range(count)]
        self._exact = call.exact(self._sets[0])

    def time(self, launch: Launch) -> float | None:
        """Return the microseconds of a call; None, with a line, if the launch is wrong or fails."""
        call, choice, timer = self._call, self._choice, self._bench.timer
        run = partial(call.run, self._bench.kernels)
        try:
            with tuning.forced(choice.op, choice.key, launch):
                spread = timer.graph(run, self._sets, call.bytes_moved, verify=self._check)
        except Exception as error:  # other launches may succeed
            note = failed_note(error)
            self._bench.report(f"{choice.name}: {launch} on {call.name}: {note}")
            return None
        return spread.median

    def gain(self, launch: Launch) -> float:
        """Return the default's time over the launch's, 0 if either fails."""
        default, other = self.time(self._choice.launches[0]), self.time(launch)
        return 0.0 if default is None or other is None else default / other

    def _check(self, result: object) -> None:
        error = self._call.error(result, self._sets[0], self._exact)
        if not error <= self._call.max_error:
            raise ValueError(f"an error of {error:.2g}, allowed {self._call.max_error:.2g}")


def updated_tables(
    text: str, gpu: str, version: str, found: Mapping[tuple[str, str], Launch | None]
) -> str:
    """Return the text of tuning.json with the launches found for one GPU and version of Triton.

    Args:
        text: of the file before.
        version: of Triton, such as "3.6".
        found: by op and spelled key; None removes an entry.

    Raises:
        ValueError: the text is no table.
    """
    tuning.parse_tables(text)
    tables = json.loads(text)
    versions = tables.setdefault(gpu, {})
    table = versions.setdefault(version, {})
    for (op, key), launch in found.items():
        table.setdefault(op, {}).pop(key, None)
        if launch is not None:
            table[op][key] = dict(launch)
    versions[version] = {op: keys for op, keys in table.items() if keys}
    return json.dumps(tables, indent=2, sort_keys=True) + "\n"


def calls_in_use(grid: Grid, groups: Sequence[str], dtype: torch.dtype) -> list[OpCall]:
    """Return the calls of these groups, and attention as a server calls it."""
    calls = [call for group in groups for call in GROUPS[group](grid, dtype)]
    return calls + (served_attention(grid, dtype) if "attention" in groups else [])


def tune_all(
    calls: Iterable[OpCall], bench: Bench, budget: Budget, done: Callable[[Found], None]
) -> Found:
    """Return the best launch of every key that the calls ask for, None for the default.

    Args:
        budget: keys beyond it keep their entry of the table, and a line names them.
        done: receives what was found so far, after each key.
    """
    found: Found = {}
    choices = choices_of(calls, bench)
    for at, choice in enumerate(choices):
        if not budget.allows():
            left = ", ".join(skipped.name for skipped in choices[at:])
            bench.report(f"skipped, since the budget of {budget.seconds:.0f} s is spent: {left}")
            break
        try:
            found[choice.op, tuning.spell(choice.key)] = tune(choice, bench)
        except Exception as error:  # other keys may succeed
            bench.report(f"{choice.name}: {failed_note(error)}")
            if bench.device.type == "cuda":
                # raises if the device is lost
                torch.cuda.synchronize()
            continue
        done(found)
    return found


def main(
    only: Only = "",
    dtypes: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = "bf16,fp16",
    budget: Annotated[float, typer.Option(min=1, help="Seconds.")] = 3000,
    passes: Annotated[int, typer.Option(min=1, help="Timed passes of each call.")] = 50,
    output: Annotated[Path, typer.Option(help="The table to write.")] = TABLE,
) -> None:
    """Time every candidate launch on this GPU and keep those that beat the default."""
    try:
        groups, kinds = select(only, GROUPS), select(dtypes, DTYPES)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not torch.cuda.is_available():
        print("tune-kernels: skipped, since torch sees no CUDA GPU here")
        return
    machine = gpu_machine(passes)
    bench = Bench(machine.kernels, machine.device, machine.timer, partial(print, flush=True))
    version = tuning.minor_version()
    bench.report(f"{machine.gpu}, driver {machine.driver}, triton {version}")
    before = TABLE.read_text(encoding="utf-8") if TABLE.is_file() else "{}"

    def write(found: Found) -> None:
        # after each key, so that a run that is cut short keeps what it found
        output.write_text(updated_tables(before, machine.gpu, version, found), encoding="utf-8")

    calls = [call for kind in kinds for call in calls_in_use(FULL, groups, DTYPES[kind])]
    found = tune_all(calls, bench, Budget(budget), write)
    faster = sum(launch is not None for launch in found.values())
    print(f"written: {output}")
    gpu = machine.gpu.replace(" ", "_")
    figures: dict[str, Cell] = {"gpu": gpu, "triton": version, "keys": len(found), "faster": faster}
    print(bench_line("tuning", figures))


if __name__ == "__main__":
    typer.run(main)
