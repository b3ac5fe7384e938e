"""What killed commands leave behind: the next start removes it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.processes import is_gone
from tests.server.serve_process import serving
from tests.server.serving import TIMEOUT_SECONDS, shared_memory

from ..phase import Campaign
from ..report import Report


def killed_serve(campaign: Campaign, report: Report) -> None:
    """Kill `varlen serve`, and start it again."""
    temporary = _new_folder(campaign, "serve")
    checkpoint = str(campaign.checkpoints.minilm)
    environment = {"TMPDIR": str(temporary)}
    with serving(checkpoint, cache=campaign.scratch, environment=environment) as it:
        server = it.server_pid
        regions = shared_memory(server)
        it.process.kill()
        report.check(holds=is_gone(server), problem="the server outlives its command")
    report.count("folders of a killed serve", len(list(temporary.iterdir())))
    with serving(checkpoint, cache=campaign.scratch, environment=environment):
        pass
    _check_empty(report, temporary)
    _check_removed(report, regions)


def killed_server(campaign: Campaign, report: Report) -> None:
    """Kill the server and the processes of its models, and start it again."""
    checkpoint = str(campaign.checkpoints.minilm)
    with serving(checkpoint, cache=campaign.scratch) as it:
        regions = shared_memory(it.server_pid)
        os.killpg(it.server_pid, signal.SIGKILL)
        it.process.communicate(timeout=TIMEOUT_SECONDS)
    report.count("regions of a killed server", sum(region.exists() for region in regions))
    with serving(checkpoint, cache=campaign.scratch):
        pass
    _check_removed(report, regions)


def killed_fetch(campaign: Campaign, report: Report) -> None:
    """Kill a fetch while it copies, and fetch again."""
    folder = _new_folder(campaign, "fetch")
    command = [sys.executable, "-m", "varlen_tools.fetch", str(campaign.checkpoints.minilm)]
    command += ["--repository", str(folder / "models"), "--name", "it"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + TIMEOUT_SECONDS
        while not list(folder.glob(".fetch-*")) and time.monotonic() < until:
            time.sleep(0.001)
        process.kill()
    report.count("folders of a killed fetch", len(list(folder.glob(".fetch-*"))))
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    names = sorted(entry.name for entry in folder.iterdir())
    report.check(holds=names == ["models"], problem=f"a killed fetch leaves {names}")


def _new_folder(campaign: Campaign, name: str) -> Path:
    folder = campaign.scratch / name
    folder.mkdir()
    return folder


def _check_empty(report: Report, folder: Path) -> None:
    left = [entry.name for entry in folder.iterdir()]
    report.check(holds=not left, problem=f"temporary files are left: {left}")


def _check_removed(report: Report, regions: list[Path]) -> None:
    left = [region for region in regions if region.exists()]
    report.check(holds=not left, problem=f"shared memory is left: {left}")
