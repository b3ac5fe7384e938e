"""Floods of the gateway by clients without a key: `/health` answers beside each."""

import json
import resource
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.server.serving import wait_until
from varlen_tools.local_server import LOOPBACK, LocalServer, reserved_port

from ..attacks.http_floods import FLOODS, Address, health_beside
from ..models import ENCODER
from ..phase import Campaign
from ..report import Report
from ..target import READY_SECONDS

# Length of each flood, and of the one that shows that a flood works.
_SECONDS, _PROOF_SECONDS = 60.0, 8.0
# Longest time that `/health` may take.
_LONGEST_SECONDS = 0.25
# The usual limit of a service; the floods have about as many connections.
_OPEN_FILES = 1024
_KEY = "doors"
_START_SECONDS = 60.0

# The same application on uvicorn's own connections, whose parser is in Python.
_UNLIMITED = """
import sys, uvicorn
from varlen_client.gateway.app import create_app
from varlen_client.gateway import GatewaySettings
url, port, key = sys.argv[1:]
uvicorn.run(create_app(GatewaySettings(url=url, api_keys=(key,))), port=int(port), http="h11", log_level="error")
"""


def gateway_floods(campaign: Campaign, report: Report) -> None:
    """Flood a gateway in each way, and ask for its health meanwhile."""
    repository = campaign.checkpoints.repository(campaign.scratch / "flooded", [ENCODER])
    with LocalServer(repository) as server:
        server.wait_ready(READY_SECONDS)
        url = server.grpc_url
        with _gateway(["-c", _UNLIMITED, url], [_KEY]) as address:
            proof = health_beside(FLOODS["one_byte_chunks"], address, _PROOF_SECONDS)
            longest = proof.longest
            works = longest > _LONGEST_SECONDS
            report.check(holds=works, problem=f"the flood does nothing: {longest:.3f} s")
        serve = ["-m", "varlen_client.cli.main", "serve-http", "--url", url, "--port"]
        with _gateway(serve, ["--api-key", _KEY]) as address:
            for name, flood in FLOODS.items():
                campaign.progress(f"{report.name}: {name}")
                times = health_beside(flood, address, _SECONDS)
                for figure, seconds in (("median", times.median), ("longest", times.longest)):
                    report.notes[f"ms of health beside {name}, {figure}"] = _milliseconds(seconds)
                report.check(
                    holds=times.longest <= _LONGEST_SECONDS,
                    problem=f"/health beside {name}: {times.longest:.3f} s, {times.failed} failed",
                )
                vectors = _embedded(address)
                report.check(holds=vectors == 1, problem=f"{vectors} vectors after {name}")


@contextmanager
def _gateway(begin: Sequence[str], end: Sequence[str]) -> Iterator[Address]:
    """Run a gateway, and yield its address.

    Args:
        begin, end: arguments of Python before and after the port.
    """
    # free again for uvicorn, which shares no port
    with reserved_port() as port:
        pass
    command = [sys.executable, *begin, str(port), *end]
    process = subprocess.Popen(command)
    # long before it has imported what reads the limit
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
    try:
        wait_until(lambda: _is_healthy(port), "the gateway is healthy", _START_SECONDS)
        yield LOOPBACK, port
    finally:
        process.terminate()
        process.wait(_START_SECONDS)


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/health", timeout=5.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _embedded(address: Address) -> int:
    """Return the number of vectors that a good request gets."""
    body = json.dumps({"model": ENCODER, "input": "a"}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_KEY}"}
    request = urllib.request.Request("http://{}:{}/v1/embeddings".format(*address), body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30.0) as response:
            return len(json.load(response)["data"])
    except OSError:
        return 0


def _milliseconds(seconds: float) -> int:
    # a failed probe has no time
    return round(seconds * 1e3) if seconds < float("inf") else -1
