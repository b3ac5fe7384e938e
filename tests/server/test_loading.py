"""Loading and unloading while the server runs, and refused configurations."""

import contextlib
import json
import shutil
import socket
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.checkpoints import set_fields
from tests.closeness import assert_close, encoder_roundings
from varlen_tools.local_server import LOOPBACK, LocalServer, find_command

from .clients import AnswerError, Client, GrpcClient, HttpClient, texts
from .serving import add_model, http_call, load, model_state, unload, wait_until

TEXT = {"name": "text", "data_type": "TYPE_STRING", "dims": [1]}
IDS = {"name": "input_ids", "data_type": "TYPE_INT64", "dims": [-1]}
# Complete configuration of the model `spare`, for a server without auto-completion.
COMPLETE: dict[str, Any] = {
    "name": "spare",
    "backend": "varlen",
    "max_batch_size": 8,
    "input": [TEXT | {"optional": True}],
    "output": [{"name": "sentence_embedding", "data_type": "TYPE_FP32", "dims": [32]}],
    "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
    "parameters": {"dtype": {"string_value": "fp32"}, "threads": {"string_value": "1"}},
}
UNKNOWN = {"model_name": {"string_value": "minilm"}}


def _spare(**fields: Any) -> dict[str, Any]:
    return {"name": "spare", "backend": "varlen", **fields}


def _with_parameters(**parameters: str) -> dict[str, Any]:
    return _spare(parameters={key: {"string_value": value} for key, value in parameters.items()})


def test_a_config_of_one_line_is_completed(server, grpc_client):
    try:
        assert load(server, "spare", _spare()) is None

        _, config = http_call(server, "GET", "/v2/models/spare/config")
        assert config["max_batch_size"] == 64
        inputs = {entry["name"]: entry for entry in config["input"]}
        assert list(inputs) == ["text", "input_ids", "attention_mask", "token_type_ids"]
        assert all(entry["optional"] for entry in inputs.values())
        outputs = {entry["name"]: list(map(int, entry["dims"])) for entry in config["output"]}
        assert outputs == {"sentence_embedding": [32], "num_tokens": [1]}
        assert grpc_client.infer("spare", texts("word1 word2")).shape == (1, 32)
    finally:
        unload(server, "spare")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        pytest.param(_with_parameters(task="classify"), "classify", marks=pytest.mark.full),
        pytest.param(
            _with_parameters(max_queued_tokens="-1"), "max_queued_tokens", marks=pytest.mark.full
        ),
        pytest.param(
            _spare(model_transaction_policy={"decoupled": True}),
            "decoupled",
            marks=pytest.mark.full,
        ),
        pytest.param(_spare(sequence_batching={}), "sequence_batching", marks=pytest.mark.full),
        pytest.param(
            _spare(instance_group=[{"count": 2, "kind": "KIND_CPU"}]),
            "2 instances",
            marks=pytest.mark.full,
        ),
        pytest.param(
            _spare(instance_group=[{"count": 1, "kind": "KIND_CPU", "passive": True}]),
            "passive",
            marks=pytest.mark.full,
        ),
        pytest.param(
            _spare(input=[{**TEXT, "reshape": {"shape": []}}]), "reshape", marks=pytest.mark.full
        ),
        pytest.param(_spare(input=[TEXT, IDS]), "required", marks=pytest.mark.full),
        (
            _spare(sequence_batching={}, input=[{**TEXT, "name": "TEXT"}], parameters=UNKNOWN),
            "3 problems: (1) sequence_batching is set; its state per client has no meaning here, and requests of"
            ' several rows would fail: remove it; (2) input "TEXT" is not a tensor of the task embed; allowed: text,'
            ' input_ids, attention_mask, token_type_ids; (3) unknown parameter "model_name". Allowed: task, ',
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_cannot_be_served_is_refused_with_the_reason(server, config, word):
    reason = load(server, "spare", config)

    assert reason is not None
    assert word in reason
    _check_no_path(reason)
    assert model_state(server, "spare") == "UNAVAILABLE"


@pytest.mark.full
def test_the_reason_of_a_refusal_is_shown_as_it_was_worded(server):
    reason = load(server, "spare", _with_parameters(max_batch_token="512"))

    hint = 'unknown parameter "max_batch_token". Did you mean "max_batch_tokens"? Allowed: task,'
    assert hint in (reason or "")


def _check_no_path(reason: str) -> None:
    """Fail if a load error contains a path of the server's machine."""
    assert "/" not in reason, reason
    assert ".py" not in reason, reason


@pytest.mark.full
@pytest.mark.parametrize("complete", [False, True], ids=["completed by us", "complete"])
def test_a_load_error_names_no_path(server, bare_server, tmp_path, complete):
    loading = bare_server if complete else server
    config = COMPLETE | {"name": "broken"} if complete else None
    add_model(loading.model_repository, "broken", tmp_path)

    # an empty folder, then a folder in place of the file
    reason = load(loading, "broken", config)
    assert reason is not None
    assert "config.json" in reason
    _check_no_path(reason)

    (tmp_path / "config.json").mkdir()
    reason = load(loading, "broken", config)
    assert reason is not None
    assert "config.json" in reason
    _check_no_path(reason)


@pytest.mark.full
def test_fields_of_a_checkpoint_are_ignored_where_nothing_reads_them_or_the_owner_says_so(
    server, grpc_client, tmp_path
):
    source = server.model_repository / "spare/1"
    folder = shutil.copytree(source.resolve(), tmp_path / "checkpoint")
    set_fields(folder, "config.json", tie_weights_=True, is_decoder=True)
    add_model(server.model_repository, "fields", folder)
    config = _with_parameters(ignore_config_fields="is_decoder", dtype="fp32", threads="1")
    try:
        reason = load(server, "fields")
        assert "has is_decoder true; allowed: false (the setting ignore_config_fields" in str(
            reason
        )

        assert load(server, "fields", config | {"name": "fields"}) is None
        assert load(server, "spare") is None
        answers = [grpc_client.infer(name, texts("word1 word2")) for name in ("fields", "spare")]
        # each load measures which products are fastest, and they round in different orders
        assert_close(answers[0], answers[1], roundings=encoder_roundings(folder))
    finally:
        unload(server, "fields")
        unload(server, "spare")


@pytest.mark.full
def test_a_model_may_ignore_the_timeout_of_requests(server, grpc_client):
    try:
        assert load(server, "spare", _with_parameters(ignore_request_timeout="true")) is None

        assert grpc_client.infer("spare", texts("word1"), {"timeout": 30}).shape == (1, 32)
    finally:
        unload(server, "spare")


@pytest.mark.full
def test_a_connection_that_was_open_during_a_load_is_closed_for_its_client(server):
    request = "GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: {}\r\n\r\n"
    with socket.create_connection((LOOPBACK, server.http_port), timeout=30) as connection:
        connection.sendall(request.format("keep-alive").encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert load(server, "spare") is None
        try:
            connection.sendall(request.format("close").encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")

            assert connection.recv(1000) == b""
        finally:
            unload(server, "spare")


@pytest.mark.full
def test_requests_during_unload_and_reload_are_answered_or_refused(
    server, grpc_client, http_client, roundings
):
    assert load(server, "spare") is None
    inputs = texts("word1 word2 word3")
    expected = grpc_client.infer("spare", inputs)
    stop = Event()

    askers = [(client, Counter[str]()) for client in (grpc_client, http_client) * 2]

    def ask_on(client: Client, seen: Counter[str]) -> None:
        """Send requests until told to stop; count answered and refused ones."""
        while not stop.is_set():
            answer = client.start("spare", inputs)
            error = answer.exception()
            if error is None:
                assert_close(answer.result(), expected, roundings=roundings["encoder"])
                seen["answered"] += 1
                continue
            assert isinstance(error, AnswerError)
            assert error.code in ("NOT_FOUND", "UNAVAILABLE"), error
            assert "spare" in error.message
            seen["refused"] += 1
            # leave the server some CPU time for loading
            stop.wait(0.05)

    def wait_until_each_was(outcome: str) -> None:
        before = [seen[outcome] for _, seen in askers]
        wait_until(
            lambda: all(
                seen[outcome] > count or thread.done()
                for (_, seen), count, thread in zip(askers, before, asking, strict=True)
            ),
            f"each client was {outcome} once more",
        )

    with ThreadPoolExecutor() as threads:
        asking = [threads.submit(ask_on, *asker) for asker in askers]
        try:
            for _ in range(2):
                wait_until_each_was("answered")
                unload(server, "spare")
                wait_until(lambda: model_state(server, "spare") == "UNAVAILABLE", "it is unloaded")
                wait_until_each_was("refused")
                assert load(server, "spare") is None
            wait_until_each_was("answered")
        finally:
            stop.set()
    for thread in asking:
        thread.result()
    unload(server, "spare")


CACHE = "caches/local/libtritoncache_local.so"


# A model that only the test of traces asks.
TRACED = "traced"


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """The files of the traces of `bare_server` begin with this name, and end with numbers."""
    return tmp_path_factory.mktemp("traces") / "trace"


@pytest.fixture(scope="module")
def bare_server(tmp_path_factory, checkpoints, traces):
    """A server that completes no configuration and keeps no metrics, as hardened deployments run it.

    It has a response cache, and traces every request.
    """
    folder = tmp_path_factory.mktemp("bare")
    for name in ("spare", TRACED):
        add_model(folder, name, checkpoints["encoder"])
    cache = tmp_path_factory.mktemp("cache")
    kit = Path(find_command("tritonserver")).resolve().parents[1] / "share/varlen/server"
    [wheel] = kit.glob("wheels/nvidia_pytriton-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        library = cache / CACHE
        library.parent.mkdir(parents=True)
        library.write_bytes(packed.read(f"pytriton/tritonserver/{CACHE}"))
    arguments = [
        *("--disable-auto-complete-config", "--allow-metrics=false"),
        *(f"--cache-directory={cache}/caches", "--cache-config=local,size=1048576"),
        *("--trace-config=mode=triton", f"--trace-config=triton,file={traces}"),
        *("--trace-config=rate=1", "--trace-config=level=TIMESTAMPS"),
        "--trace-config=triton,log-frequency=1",
    ]
    with LocalServer(folder, arguments=arguments, is_managed=True) as running:
        running.wait_ready()
        yield running


@pytest.mark.full
def test_a_complete_config_serves_without_auto_completion_and_without_metrics(
    bare_server, server, roundings
):
    assert load(bare_server, "spare", COMPLETE) is None

    assert load(server, "spare") is None
    with GrpcClient(bare_server) as bare, GrpcClient(server) as usual:
        assert_close(
            bare.infer("spare", texts("word7", "word8 word9")),
            usual.infer("spare", texts("word7", "word8 word9")),
            roundings=roundings["encoder"],
        )
        with pytest.raises(AnswerError, match="^INVALID_ARGUMENT: "):
            bare.infer("spare", texts("word7 " * 600))
    unload(server, "spare")
    unload(bare_server, "spare")
    wait_until(lambda: model_state(bare_server, "spare") == "UNAVAILABLE", "it is unloaded")


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"max_batch_size": 0}, "has no max_batch_size, and the server completes nothing"),
        ({"output": [{"name": "embedding", "data_type": "TYPE_FP32", "dims": [32]}]}, "embedding"),
        ({"input": [{"name": "text", "data_type": "TYPE_INT64", "dims": [1]}]}, "TYPE_INT64"),
        ({"response_cache": {"enable": True}}, "this server has a cache (--cache-config)"),
    ],
    ids=["max_batch_size", "output name", "input type", "cache of the server"],
)
def test_a_complete_config_is_checked_as_well(bare_server, change, word):
    assert word in (load(bare_server, "spare", COMPLETE | change) or "")


@pytest.mark.full
def test_a_config_of_one_line_says_what_to_add_where_the_server_completes_none(bare_server):
    config = bare_server.model_repository / "spare/config.pbtxt"
    before = config.read_text()
    reason = load(bare_server, "spare")

    assert reason is not None
    lines = reason.partition("(--disable-auto-complete-config): add ")[2].partition("\n")[0]
    config.write_text(f"{before}\n{lines}")
    try:
        assert load(bare_server, "spare") is None
        with GrpcClient(bare_server) as client:
            assert client.infer("spare", texts("word1")).shape == (1, 32)
    finally:
        config.write_text(before)
        unload(bare_server, "spare")


@pytest.mark.full
def test_a_traced_request_is_answered_and_its_trace_is_written(bare_server, traces):
    assert load(bare_server, TRACED, COMPLETE | {"name": TRACED}) is None
    with GrpcClient(bare_server) as client, HttpClient(bare_server) as http:
        for asking in (client, http):
            assert asking.infer(TRACED, texts("word1")).shape == (1, 32)
    unload(bare_server, TRACED)

    def stages() -> Counter[str]:
        """Return the stages in the files of this model's requests, by name.

        A file has the trace of one request, and is written some time after its answer.
        """
        found = Counter[str]()
        for file in traces.parent.iterdir():
            # a file may be written in this moment
            with contextlib.suppress(ValueError):
                entries = json.loads(file.read_text())
                if any(entry.get("model_name") == TRACED for entry in entries):
                    found.update(
                        each["name"] for entry in entries for each in entry.get("timestamps", ())
                    )
        return found

    expected = ("REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_END", "REQUEST_END")
    wait_until(
        lambda: all(stages()[stage] == 2 for stage in expected), "both requests are in the files"
    )
