"""What all phases share: their campaign, their report, the checks at their end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tests.server.serving import remove_shared_memory, shared_memory, wait_until

from .counters import Counters
from .drive import Bounds, Share, send_all
from .known import Known
from .log import unexpected_lines
from .report import Report
from .state import left_over, role_of, settled
from .target import Checkpoints, Target, running

# Part of the time of a mix after which the state of the server counts as that before.
_WARM_UP = 0.2
# Requests after the attack, with which the server comes back to its usual state.
_TAIL = Bounds(20.0, 60)
_END_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Campaign:
    """One run of all phases.

    Attributes:
        seed: decides every request.
        known: inputs and their answers.
        checkpoints: folders of the models.
        scratch: an empty folder.
        requests: largest number of requests of each phase.
        progress: prints a line.
        logs: folder that gets the log of each server, if there is one.
    """

    seed: int
    known: Known
    checkpoints: Checkpoints
    scratch: Path
    requests: int
    progress: Callable[[str], None]
    logs: Path | None = None


# Runs one phase of a campaign for about some seconds.
Phase: TypeAlias = Callable[[Campaign, Report, float], None]


def run_phase(name: str, phase: Phase, campaign: Campaign, seconds: float) -> Report:
    """Run a phase and return its report; a phase that fails reports why."""
    report, began = Report(name), time.monotonic()
    try:
        phase(campaign, report, seconds)
    except Exception as error:
        # the figures of the other phases are worth keeping
        report.ledger.report(f"the phase ended early: {error!r}")
    report.ledger.close()
    report.seconds = time.monotonic() - began
    return report


@contextmanager
def attacked_server(
    campaign: Campaign,
    report: Report,
    models: Sequence[str],
    *,
    allowed_log: Sequence[str] = (),
    loses_processes: bool = False,
    arguments: Sequence[str] = (),
    command: Path | None = None,
) -> Iterator[Target]:
    """Yield a server of these models for a phase; check its log and its end.

    Args:
        campaign, report: campaign and report of the phase.
        models: names of the models to serve.
        allowed_log: patterns of lines in the log that the attacks explain.
        loses_processes: whether the phase kills the process of a model, after which this server cannot end well.
        arguments: more ones of the server.
        command: see `LocalServer`.
    """
    repository = campaign.checkpoints.repository(campaign.scratch / report.name, models)
    with running(
        repository, campaign.known, models, arguments=arguments, command=command
    ) as target:
        server = target.server
        try:
            yield target
        finally:
            # also of a phase that has failed
            if campaign.logs is not None:
                campaign.logs.joinpath(f"{report.name}.log").write_text(server.log())
        target.close()
        report.check(holds=server.is_running, problem="the server ended")
        regions = shared_memory(server.pid)
        code = _stop(target, report, loses_processes=loses_processes)
        remove_shared_memory(regions) if loses_processes else None
        if campaign.logs is not None:
            campaign.logs.joinpath(f"{report.name}.log").write_text(server.log())
        for problem in unexpected_lines(server.log(), allowed_log):
            report.ledger.report(problem)
        if loses_processes:
            return
        report.check(holds=code == 0, problem=f"the server ended with code {code}")
        regions = [region for region in regions if region.exists()]
        report.check(holds=not regions, problem=f"{len(regions)} shared memory regions are left")
        remove_shared_memory(regions)


def _stop(target: Target, report: Report, *, loses_processes: bool) -> int | None:
    """End a server and return its exit code; report processes that outlive it.

    Args:
        target: the server.
        report: report of the phase.
        loses_processes: whether the server may leave the processes that are in its group, or not end at all.
    """
    server, began = target.server, time.monotonic()
    if server.is_running:
        os.kill(server.pid, signal.SIGTERM)
    with suppress(AssertionError):
        wait_until(lambda: not server.is_running, "the server has ended", _END_SECONDS)
    report.notes["seconds to stop"] = round(time.monotonic() - began)
    # the end of its group hides what it leaves
    left = [] if loses_processes else left_over(target.mark)
    code = server.stop(timeout=0)
    left = left or left_over(target.mark)
    roles = ", ".join(f"{role_of(pid)} {pid}" for pid in left)
    report.check(holds=not left, problem=f"processes are left: {roles}")
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return code


def send_mix(
    campaign: Campaign,
    report: Report,
    target: Target,
    mix: Sequence[Share[Target]],
    seconds: float,
    *,
    is_complete: bool = True,
    before: Callable[[], object] | None = None,
    beside: AbstractContextManager[object] | None = None,
) -> None:
    """Send a mix of requests; check counters, and what the server holds afterwards.

    Args:
        campaign, report: campaign and report of the phase.
        target: the server.
        mix: the kinds of requests.
        seconds: duration of sending.
        is_complete: whether clients know every request that a model got.
        before: sends other requests first, which count as well.
        beside: action on the server meanwhile, after the warm-up.
    """
    server, ledger = target.server, report.ledger
    counters, _ = Counters.settled(server, target.models)
    if before is not None:
        before()
    name = f"{campaign.seed} {report.name}"
    warm_up = Bounds(_WARM_UP * seconds, max(1, int(_WARM_UP * campaign.requests)))
    sent = send_all(target, mix, warm_up, ledger, name=f"{name} warm-up")
    Counters.settled(server, target.models)
    report.before = settled(target.mark)
    campaign.progress(f"{report.name}: {sent} requests of warm-up")

    rest = Bounds((1 - _WARM_UP) * seconds, campaign.requests - sent)
    with beside or nullcontext():
        sent += send_all(target, mix, rest, ledger, name=name)
    sent += send_all(target, mix, _TAIL, ledger, name=f"{name} tail")

    campaign.progress(f"{report.name}: {sent} requests")
    after, busy = Counters.settled(server, target.models)
    report.after = settled(target.mark, report.before)
    found = counters.disagreements(after, ledger.by_model, is_complete=is_complete)
    for problem in (*busy, *found, *report.before.growth(report.after)):
        ledger.report(problem)
    ledger.check_least({share.kind: share.least for share in mix})
