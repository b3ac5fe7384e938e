"""NVIDIA's load generator against models of every task, over both protocols."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from varlen.tasks import ITERATIVE_TASKS
from varlen_tools.local_server import LOOPBACK, LocalServer, find_command
from varlen_tools.model_config import Inputs

from .serving import TIMEOUT_SECONDS, load_all, model_state, outcomes, unload, wait_until
from .task_models import TASK_MODELS, fetch_task_model

pytestmark = pytest.mark.full

REQUESTS = 60
FEW_REQUESTS = 10
# perf_analyzer asks a model that may stream only in this way.
STREAM = ("-i", "grpc", "--async", "--streaming")
BOTH = (("-i", "grpc"), ("-i", "http"))
# Ways to ask some models. It sends parameters of requests over gRPC only.
WAYS = dict.fromkeys(("tiny_gpt2", "tiny_dates", "only_prompts"), (STREAM,)) | {"pii": BOTH[:1]}
PROMPTS = ("--input-data", "prompts.json")

# Models with inputs of one kind, beside `TASK_MODELS`: token ids, prompts that stream, and
# source texts that get one response each.
ONE_KIND = ("only_ids", "only_prompts", "only_sources")
# Options by model, beside its protocols. Random texts hold no mask, and random integers are no token ids.
DATA = {
    "bert": ("--string-data", "the [MASK]"),
    "pii": ("--request-parameter", 'labels:["person"]:string'),
    "only_ids": ("--input-data", "ids.json"),
    # options and messages are inputs, for which there is no random data
    "tiny_gpt2": PROMPTS,
    "tiny_dates": PROMPTS,
}


@pytest.fixture(scope="module")
def models(task_server, repository, task_checkpoints):
    """The shared server with `TASK_MODELS` and `ONE_KIND`."""

    def add(name: str, source: str, inputs: Inputs) -> Path:
        return fetch_task_model(
            task_checkpoints[source], repository, name, TASK_MODELS[source], inputs
        )

    add("only_ids", "embedder", Inputs.ids)
    add("only_prompts", "tiny_gpt2", Inputs.text)
    config = add("only_sources", "tiny_dates", Inputs.text) / "config.pbtxt"
    config.write_text(config.read_text().replace("decoupled: true", "decoupled: false"))
    load_all(task_server, ONE_KIND)
    yield task_server
    for name in ONE_KIND:
        unload(task_server, name)
    # `varlen status`, which another test runs, reports a server that unloads a model as not ready
    gone = {"UNAVAILABLE"}
    wait_until(lambda: {model_state(task_server, name) for name in ONE_KIND} == gone, "unloaded")


def test_a_model_of_each_task_answers_what_perf_analyzer_makes(models, tmp_path):
    prompts = [{"text_input": ["the cat"]}, {"text_input": ["a river"]}]
    (tmp_path / "prompts.json").write_text(json.dumps({"data": prompts}))
    ids = {"content": [1] * 16, "shape": [16]}
    rows = [{"input_ids": ids}, {"input_ids": ids, "attention_mask": ids}]
    (tmp_path / "ids.json").write_text(json.dumps({"data": rows}))
    names = (*TASK_MODELS, *ONE_KIND)
    calls = [(name, protocol) for name in names for protocol in WAYS.get(name, BOTH)]

    def run(call: tuple[str, tuple[str, ...]]) -> str:
        name, protocol = call
        few = ("--request-count", str(FEW_REQUESTS), "-s", "999")
        return run_perf_analyzer(models, name, tmp_path, *protocol, *few, *DATA.get(name, ()))

    before = {name: outcomes(models, name) for name in names}
    with ThreadPoolExecutor(max_workers=len(calls)) as pool:
        errors = dict(zip(calls, pool.map(run, calls), strict=True))

    assert errors == dict.fromkeys(calls, "")
    assert {task for name, task in TASK_MODELS.items() if name in DATA} == {
        "fill_mask",
        "extract",
        *ITERATIVE_TASKS,
    }
    for name in names:
        after = outcomes(models, name)
        sent = sum(name == called for called, _ in calls) * FEW_REQUESTS
        assert after["ok"] - before[name]["ok"] >= sent
        assert after | {"ok": 0} == before[name] | {"ok": 0}


@pytest.mark.parametrize("protocol", BOTH, ids=lambda options: options[1])
def test_every_request_of_a_file_of_input_data_is_answered(server, tmp_path, protocol):
    data = [{"text": {"content": ["word " * count], "shape": [1]}} for count in (1, 3, 10, 40, 200)]
    (tmp_path / "texts.json").write_text(json.dumps({"data": data}))
    before = outcomes(server, "minilm")

    error = run_perf_analyzer(
        server,
        "minilm",
        tmp_path,
        *protocol,
        *("-b", "1", "--input-data", "texts.json", "--concurrency-range", "4"),
        # one window of REQUESTS requests, stable or not
        *("--request-count", str(REQUESTS), "-s", "999"),
        *("--profile-export-file", "profile.json"),
    )

    assert error == ""
    (experiment,) = json.loads((tmp_path / "profile.json").read_text())["experiments"]
    assert len(experiment["requests"]) >= REQUESTS
    assert all(request["response_timestamps"] for request in experiment["requests"])
    after = outcomes(server, "minilm")
    assert after["ok"] - before["ok"] >= REQUESTS
    assert after | {"ok": 0} == before | {"ok": 0}


def run_perf_analyzer(server: LocalServer, model: str, folder: Path, *options: str) -> str:
    """Return what perf_analyzer prints if it fails; empty if it does not fail."""
    port = server.http_port if "http" in options else server.grpc_port
    command = [find_command("perf_analyzer"), "-m", model, "-u", f"{LOOPBACK}:{port}", *options]
    try:
        run = subprocess.run(
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
    return run.stdout + run.stderr if run.returncode else ""
