"""NVIDIA's load generator against the server, over both protocols, with texts of every length."""

import json
import subprocess
from pathlib import Path

import pytest

from varlen_tools.fetch import fetch
from varlen_tools.local_server import LOOPBACK, LocalServer, find_command

from .serving import TIMEOUT_SECONDS, load, outcomes, unload

REQUESTS = 60
# Random integers are not valid token ids, so it sends zeros, in rows of one length.
IDS_OPTIONS = ["--shape", "input_ids:16", "--input-data", "zero"]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_perf_analyzer_gets_an_answer_to_every_request(
    server: LocalServer, tmp_path: Path, protocol: str
) -> None:
    data = [{"text": {"content": ["word " * count], "shape": [1]}} for count in (1, 3, 10, 40, 200)]
    (tmp_path / "texts.json").write_text(json.dumps({"data": data}))
    before = outcomes(server, "minilm")
    port = server.grpc_port if protocol == "grpc" else server.http_port

    command = [
        find_command("perf_analyzer"),
        *("-m", "minilm", "-b", "1", "-i", protocol, "-u", f"{LOOPBACK}:{port}"),
        *("--input-data", "texts.json", "--concurrency-range", "4"),
        # one window of REQUESTS requests, stable or not
        *("--request-count", str(REQUESTS), "-s", "999"),
        *("--profile-export-file", "profile.json"),
    ]
    run = run_perf_analyzer(command, tmp_path, server, "minilm")

    assert run.returncode == 0, run.stdout + run.stderr
    (experiment,) = json.loads((tmp_path / "profile.json").read_text())["experiments"]
    assert len(experiment["requests"]) >= REQUESTS
    assert all(request["response_timestamps"] for request in experiment["requests"])
    after = outcomes(server, "minilm")
    assert after["ok"] - before["ok"] >= REQUESTS
    assert after | {"ok": 0} == before | {"ok": 0}


@pytest.mark.parametrize("inputs, options", [("text", []), ("ids", IDS_OPTIONS)])
def test_a_model_with_inputs_of_one_kind_needs_no_input_data(
    server: LocalServer,
    repository: Path,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    inputs: str,
    options: list[str],
) -> None:
    """With all inputs optional, perf_analyzer asks for input data before it sends anything."""
    model = f"only_{inputs}"
    settings = {"device": "cpu", "warmup_seconds": "0"}
    checkpoint = str(checkpoints["encoder"])
    fetch(checkpoint, repository=repository, name=model, inputs=inputs, settings=settings)
    assert load(server, model) is None
    command = [find_command("perf_analyzer"), "-m", model, "-i", "grpc"]
    command += ["-u", f"{LOOPBACK}:{server.grpc_port}", *options]
    command += ["--request-count", str(REQUESTS), "-s", "999"]

    run = run_perf_analyzer(command, tmp_path, server, model)

    assert run.returncode == 0, run.stdout + run.stderr
    after = outcomes(server, model)
    assert after["ok"] >= REQUESTS
    assert after == dict.fromkeys(after, 0) | {"ok": after["ok"]}
    unload(server, model)


def run_perf_analyzer(
    command: list[str], folder: Path, server: LocalServer, model: str
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        # `outcomes` fails if the model has not answered a request that reached it
        answered = outcomes(server, model)
        pytest.fail(f"perf_analyzer does not end; the model has answered all it got: {answered}")
