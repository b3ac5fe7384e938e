"""The keys that the benchmark's calls pick a launch for, with their candidate launches.

Nothing is compiled or launched to find them, so a list takes a second.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from varlen_bench.dry_run import no_launches
from varlen_bench.kernels.grid import Grid, calls_of
from varlen_bench.kernels.measure import failed_note
from varlen_bench.ops.call import OpCall, kernels
from varlen_kernels import tuning
from varlen_kernels.tuning import Key, Launch

_MAX_CALLS = 3


@dataclass(slots=True)
class Choice:
    """A key of an op, its candidate launches, and the calls with this key.

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
        """Op and key, for messages."""
        return f"{self.op} {tuning.key_text(self.key)}"


@torch.inference_mode()
def collect_choices(
    calls: Iterable[OpCall], ops: object, report: Callable[[str], None]
) -> list[Choice]:
    """Return the keys of these calls, in the order in which they are met.

    Each has its largest, middle and smallest call.

    Args:
        ops: their launchers.
        report: receives a line per call that fails.
    """
    found: dict[tuple[str, Key], Choice] = {}
    for call in calls:
        try:
            with no_launches(), tuning.record_picks() as picks:
                call.run(ops, call.make_empty())
        except Exception as error:  # other calls may succeed
            report(f"{call.name}: {failed_note(error)}")
            continue
        for op, key, candidate_launches in picks:
            choice = found.setdefault((op, key), Choice(op, key, candidate_launches(*key)))
            if call not in choice.calls:
                choice.calls.append(call)
    for choice in found.values():
        choice.calls.sort(key=lambda call: -call.bytes_moved)
        if len(choice.calls) > _MAX_CALLS:
            middle = choice.calls[len(choice.calls) // 2]
            choice.calls = [choice.calls[0], middle, choice.calls[-1]]
    return list(found.values())


def candidate_runs(
    grid: Grid, groups: Sequence[str], dtypes: Sequence[str]
) -> list[Callable[[], object]]:
    """Return a call for each candidate launch, in the order of the choices."""
    # the caller has listed the same choices and reported the calls that fail
    failed: list[str] = []
    calls = calls_of(grid, groups, dtypes)
    choices = collect_choices(calls, kernels("fused"), failed.append)
    return [
        partial(_run_launch, choice, launch) for choice in choices for launch in choice.launches
    ]


def default_runs(
    grid: Grid, groups: Sequence[str], dtypes: Sequence[str]
) -> list[Callable[[], object]]:
    """Return one of those calls of these groups that launch the same kernels by default."""
    distinct: dict[object, OpCall] = {}
    for call in calls_of(grid, groups, dtypes):
        distinct.setdefault(_kernels_of(call), call)
    return [partial(run_empty, call) for call in distinct.values()]


def _kernels_of(call: OpCall) -> object:
    """Return what decides the kernels of a call: launches and widths."""
    inputs = call.make_empty()
    with no_launches(), tuning.record_picks() as picks:
        run_empty(call)
    widths = {
        name: (value.shape[1:], value.dtype)
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    }
    return call.op, str(call.options), str(widths), str([pick[:2] for pick in picks])


def _run_launch(choice: Choice, launch: Launch) -> None:
    with tuning.forced_launch(choice.op, choice.key, launch):
        run_empty(choice.calls[0])


@torch.inference_mode()
def run_empty(call: OpCall) -> None:
    """Run a call on unfilled inputs on the CPU, inside `dry_run` or `no_launches`."""
    ops, inputs = kernels("fused"), call.make_empty()
    call.prepare(ops, inputs)
    call.run(ops, inputs)
