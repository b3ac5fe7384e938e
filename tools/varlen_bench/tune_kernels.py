"""Find the fastest launch of every kernel on this GPU: `python -m varlen_bench.tune_kernels`.

Every candidate launch of a key is timed on the largest of the benchmark's calls with that key, with the benchmark's
timer. Other processes compile the candidates meanwhile, in the order in which they are timed. The fastest candidate
goes into the table of this GPU and Triton version if it beats the default by more than 3 %, twice, and is at most 3 %
slower on smaller calls of the key. Otherwise the key has no entry, so that the default is used. A candidate that is
wrong or fails is skipped.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
import typer

from varlen_bench.harness.command import Only, refused, select
from varlen_bench.harness.machine import cpu_count
from varlen_bench.harness.rows import Cell, bench_line
from varlen_bench.kernels.grid import DTYPES, FULL, GROUPS, calls_of
from varlen_bench.kernels.machine import Budget, Machine, finds_gpu, gpu_machine
from varlen_bench.kernels.measure import failed_note
from varlen_bench.launch_choices import (
    Choice,
    CompileAhead,
    candidate_runs,
    collect_choices,
    compile_ahead,
)
from varlen_bench.ops.call import OpCall
from varlen_kernels import tuning
from varlen_kernels.tuning import Launch

TABLE = Path("kernels/varlen_kernels/tuning.json")

# A better launch must exceed this speedup over the default.
_MIN_SPEEDUP = 1.03
# It must reach this speedup on smaller calls.
_MIN_SPEEDUP_ELSEWHERE = 0.97
# One core is left for this process; more processes than this find nothing to do.
_MAX_PROCESSES = 16

_report = partial(print, flush=True)

# The best launch by op and key text; None for the default.
BestLaunches: TypeAlias = dict[tuple[str, str], Launch | None]


@torch.inference_mode()
def tune(choice: Choice, machine: Machine) -> Launch | None:
    """Return the launch that beats the default, or None."""
    default, *others = choice.launches
    if not others:
        return None
    largest = _LaunchTimer(choice, choice.calls[0], machine)
    default_time = largest.time(default)
    times = [(time, launch) for launch in others if (time := largest.time(launch)) is not None]
    if default_time is None or not times:
        _report(f"{choice.name}: nothing to compare")
        return None
    time, best = min(times, key=lambda timed: timed[0])
    speedup = default_time / time
    if speedup > _MIN_SPEEDUP:
        speedup = min(speedup, largest.speedup(best))
    if speedup <= _MIN_SPEEDUP:
        _report(f"{choice.name}: the default stays, the best candidate has {speedup:.3f}x")
        return None
    for call in choice.calls[1:]:
        elsewhere = _LaunchTimer(choice, call, machine).speedup(best)
        if elsewhere < _MIN_SPEEDUP_ELSEWHERE:
            reason = f"{best} has {elsewhere:.3f}x on {call.name}"
            _report(f"{choice.name}: the default stays, {reason}")
            return None
    figures = f"{speedup:.3f}x, {time:.2f} us on {choice.calls[0].name}"
    _report(f"{choice.name}: {best} has {figures}")
    return best


class _LaunchTimer:
    """Times the launches of a choice on the same inputs of one call."""

    def __init__(self, choice: Choice, call: OpCall, machine: Machine) -> None:
        self._choice = choice
        self._call = call
        self._machine = machine
        count = machine.timer.num_sets(call.bytes_moved)
        self._sets = [call.make(machine.device, seed) for seed in range(count)]
        self._exact = call.exact(self._sets[0])

    def time(self, launch: Launch) -> float | None:
        """Return the microseconds of a call; report a wrong or failed launch and return None."""
        call, choice, timer = self._call, self._choice, self._machine.timer
        run = partial(call.run, self._machine.kernels)
        try:
            with tuning.forced_launch(choice.op, choice.key, launch):
                for inputs in self._sets:
                    call.prepare(self._machine.kernels, inputs)
                spread = timer.graph(run, self._sets, call.bytes_moved, verify=self._verify)
        except Exception as error:  # other launches may succeed
            _report(f"{choice.name}: {launch} on {call.name}: {failed_note(error)}")
            return None
        return spread.median

    def speedup(self, launch: Launch) -> float:
        """Return the default's time over the launch's, 0 if either fails."""
        default, other = self.time(self._choice.launches[0]), self.time(launch)
        return 0.0 if default is None or other is None else default / other

    def _verify(self, result: object) -> None:
        error = self._call.error(result, self._sets[0], self._exact)
        if not error <= self._call.max_error:
            raise ValueError(f"an error of {error:.2g}, allowed {self._call.max_error:.2g}")


def updated_tables(
    text: str, machine: Machine, version: str, best: Mapping[tuple[str, str], Launch | None]
) -> str:
    """Return the text of tuning.json with new launches for one GPU and Triton version.

    Args:
        best: best launch by op and key text; None removes an entry.

    Raises:
        ValueError: the text is not a valid table.
    """
    tuning.parse_tables(text)
    tables = json.loads(text)
    gpus = tables.setdefault(machine.capability, {})
    versions = gpus.setdefault(machine.gpu, {})
    table = versions.setdefault(version, {})
    for (op, key), launch in best.items():
        table.setdefault(op, {}).pop(key, None)
        if launch is not None:
            table[op][key] = dict(launch)
    versions[version] = {op: launches for op, launches in table.items() if launches}
    return json.dumps(tables, indent=2, sort_keys=True) + "\n"


def tune_all(
    choices: Sequence[Choice],
    machine: Machine,
    budget: Budget,
    compiling: CompileAhead,
    save: Callable[[BestLaunches], None],
) -> BestLaunches:
    """Return the best launch of every choice.

    Args:
        budget: choices that do not fit keep their entry of the table and are reported.
        compiling: the candidate launches of all choices, in order.
        save: called after each choice with the launches so far.
    """
    best: BestLaunches = {}
    ends = list(accumulate((len(choice.launches) for choice in choices), initial=0))
    for index, choice in enumerate(choices):
        compiling.wait(range(ends[index], ends[index + 1]), budget.left)
        if not budget.allows():
            names = ", ".join(skipped.name for skipped in choices[index:])
            _report(f"{budget.spent_note}: {names}")
            break
        try:
            best[choice.op, tuning.key_text(choice.key)] = tune(choice, machine)
        except Exception as error:  # other choices may succeed
            _report(f"{choice.name}: {failed_note(error)}")
            machine.stop_if_lost(choice.name)
            continue
        save(best)
    return best


def main(
    only: Only = "",
    dtypes: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = "bf16,fp16",
    budget: Annotated[float, typer.Option(min=1, help="Seconds, compilations among them.")] = 3000,
    passes: Annotated[int, typer.Option(min=1, help="Timed passes of each call.")] = 50,
    output: Annotated[Path, typer.Option(help="The table to write.")] = TABLE,
) -> None:
    """Time every candidate launch on this GPU and store those that beat the default."""
    with refused():
        groups, kinds = select(only, GROUPS), select(dtypes, DTYPES)
    if not finds_gpu("tune-kernels"):
        return
    limit = Budget(budget)
    machine = gpu_machine(passes)
    version = tuning.minor_version()
    _report(f"{machine.gpu}, driver {machine.driver}, triton {version}")
    before = TABLE.read_text(encoding="utf-8") if TABLE.is_file() else "{}"

    def save(best: BestLaunches) -> None:
        output.write_text(updated_tables(before, machine, version, best), encoding="utf-8")

    choices = collect_choices(calls_of(FULL, groups, kinds), machine.kernels, _report)
    runs = partial(candidate_runs, FULL, groups, kinds)
    count = sum(len(choice.launches) for choice in choices)
    processes = min(cpu_count() - 1, _MAX_PROCESSES)
    with compile_ahead(runs, count, machine.capability, processes) as compiling:
        best = tune_all(choices, machine, limit, compiling, save)
    faster = sum(launch is not None for launch in best.values())
    print(f"written: {output}")
    gpu = machine.gpu.replace(" ", "_")
    figures: dict[str, Cell] = {"gpu": gpu, "triton": version, "keys": len(best), "faster": faster}
    print(bench_line("tuning", figures))


if __name__ == "__main__":
    typer.run(main)
