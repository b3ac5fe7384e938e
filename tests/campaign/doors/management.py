"""Calls that change a server, and its shared memory, tried as another user."""

from functools import partial
from pathlib import Path

from tests.processes import NOBODY, as_user
from tests.server.management import answered_calls, load_code
from tests.server.serve_process import serving
from tests.server.serving import shared_memory
from varlen_client import Client
from varlen_tools.local_server import LocalServer

from ..models import ENCODER
from ..phase import Campaign
from ..report import Report
from ..target import READY_SECONDS

_SECRET = "a sentence that only its client may read"


def code_of_a_page(campaign: Campaign, report: Report) -> None:
    """Load a model from the body of a request, as a page sends it."""
    marker = campaign.scratch / "marker"
    repository = campaign.checkpoints.repository(campaign.scratch / "managed", [ENCODER])
    with LocalServer(repository, is_managed=True) as server:
        server.wait_ready(READY_SECONDS)
        as_user(NOBODY, partial(load_code, server.http_url, marker))
        report.check(holds=marker.exists(), problem="the code of the page does not run anywhere")
        report.count("calls open before", len(_answered(server)))
    marker.unlink(missing_ok=True)

    checkpoint = str(campaign.checkpoints.minilm)
    with serving(checkpoint, "--api-key", "KEY", cache=campaign.scratch) as it:
        answer = as_user(NOBODY, partial(load_code, it.server_url, marker))
        report.check(holds="not allowed" in answer, problem=f"a model is loaded: {answer}")
        report.check(holds=not marker.exists(), problem="code of another user ran")
        found = answered_calls(it.server_url, it.address("grpc"), "minilm")
        report.count("calls open after", len(found))
        report.check(holds=not found, problem=f"calls that change the server: {found}")


def _answered(server: LocalServer) -> list[str]:
    return answered_calls(server.http_url, server.grpc_url, "none")


def texts_in_shared_memory(campaign: Campaign, report: Report) -> None:
    """Read the shared memory of a model, with the server's mode and with ours."""
    repository = campaign.checkpoints.repository(campaign.scratch / "memory", [ENCODER])
    with LocalServer(repository) as server:
        server.wait_ready(READY_SECONDS)
        with Client(server.grpc_url, ENCODER) as client:
            # many rows: the memory of some is used again
            client.embed([f"{_SECRET} {number}" for number in range(64)])
        [region] = shared_memory(server.pid)
        ours = region.stat().st_mode & 0o777
        found = as_user(NOBODY, partial(_holds_secret, region))
        report.check(holds="PermissionError" in found, problem=f"another user reads texts: {found}")
        # as the server makes it
        region.chmod(0o644)
        found = as_user(NOBODY, partial(_holds_secret, region))
        region.chmod(ours)
        report.check(holds=found == "True", problem=f"the text is not in the region: {found}")
        report.count("texts read before", int(found == "True"))


def _holds_secret(region: Path) -> bool:
    return _SECRET.encode() in region.read_bytes()
