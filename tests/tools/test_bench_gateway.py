"""The serving benchmark of the gateway: generator, rows and figures."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2, service_pb2
from typer.testing import CliRunner

from varlen_bench.serving import gateway
from varlen_bench.serving.__main__ import app
from varlen_bench.serving.gateway import Route, figures, text_mix, texts_of
from varlen_bench.serving.server import SYSTEMS, Settings, write_models
from varlen_bench.workers import serving, sockets
from varlen_bench.workers.serving import Load, Row

from .conftest import InProcess, committed_columns, read_csv, save_encoder

pytestmark = pytest.mark.full


class Answers(BaseHTTPRequestHandler):
    """Answers a text with its length and 1, and an empty one with 503."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
        content = json.dumps({"data": [{"embedding": [float(len(text)), 1.0]}]}).encode()
        self.send_response(200 if text else 503)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def http_port():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as answering:
        thread = threading.Thread(target=answering.serve_forever)
        thread.start()
        try:
            yield answering.server_port
        finally:
            answering.shutdown()
            thread.join()


def infer(message, context):
    """Answer as `Answers`, but the text "long" with a megabyte."""
    request = service_pb2.ModelInferRequest.FromString(message)
    text = request.raw_input_contents[0][4:]
    assert [each.name for each in request.outputs] == ["sentence_embedding", "num_tokens"]
    if not text:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the text is empty")
    values = np.zeros(1 << 18) if text == b"long" else [len(text), 1]
    answer = service_pb2.ModelInferResponse()
    answer.outputs.add(name="sentence_embedding", datatype="FP32", shape=[1, len(values)])
    answer.raw_output_contents.append(np.asarray(values, np.float32).tobytes())
    return answer.SerializeToString()


@contextmanager
def grpc_port():
    method = grpc.unary_unary_rpc_method_handler(infer)
    service = {"ModelInfer": method}
    answering = grpc.server(ThreadPoolExecutor(4))
    answering.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("inference.GRPCInferenceService", service)]
    )
    port = answering.add_insecure_port("127.0.0.1:0")
    answering.start()
    try:
        yield port
    finally:
        answering.stop(None).wait()


PORTS = {"http": http_port, "grpc": grpc_port}
PATHS = {"http": "/v1/embeddings", "grpc": "/inference.GRPCInferenceService/ModelInfer"}


def route_to(protocol, port, system="a system"):
    return Route(system, protocol, port, PATHS[protocol], "model", {})


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch):
    """Measure from the first request."""
    monkeypatch.setattr(serving, "WARMUP_SECONDS", 0.0)


@pytest.mark.parametrize("protocol", PORTS)
def test_requests_are_in_flight_on_each_connection_and_all_are_counted(protocol):
    texts = ["a cat", "", "the river"]
    handle = sockets.start({"texts": texts})
    load = Load("gateway", text_mix(40), 0.2, seed=0, max_waiting=5)

    with PORTS[protocol]() as port:
        route = asdict(route_to(protocol, port))
        answer = handle({"route": route, "load": json.loads(json.dumps(asdict(load)))})
        refused = handle({"route": route})

    row = Row(**answer["row"])
    assert (row.system, row.kind, row.lost) == ("a system", "gateway", 0)
    assert row.sent == row.ok + row.refused + row.failed >= 5
    bad = row.refused if protocol == "http" else row.failed
    assert row.sent - row.ok == bad == (row.sent + 1) // 3
    assert answer["seconds"] > 0
    assert "error" in refused


@pytest.mark.parametrize("protocol", PORTS)
def test_the_vectors_of_all_texts_are_read(protocol):
    with PORTS[protocol]() as port:
        answer = sockets.start({"texts": ["a cat", "a"]})(
            {"route": asdict(route_to(protocol, port))}
        )

    assert answer == {"vectors": [[5.0, 1.0], [1.0, 1.0]]}


def test_answers_may_be_larger_than_all_windows_of_http2_together():
    with grpc_port() as port:
        connection = sockets.GrpcConnection(port, PATHS["grpc"])
        for _ in range(20):
            connection.send(sockets.grpc_body("model", "long"))
            while (answer := connection.receive()) is None:
                pass
            assert answer[0] == "ok"
            assert len(answer[1]) > 1 << 20
        connection.socket.close()


def test_a_server_gets_texts_as_the_gateway_sends_them(tmp_path):
    checkpoint = save_encoder(tmp_path / "tiny", pooling="mean_tokens")
    system = gateway.replace(SYSTEMS["varlen-fp32"], takes_texts=True)
    settings = Settings(
        checkpoint, [system], [], seconds=1, turns=1, quick=True, peer_batch=8, threads=2, seed=0
    )

    write_models(tmp_path / "models", system, settings)

    written = (tmp_path / "models/varlen-fp32/config.pbtxt").read_text()
    config = text_format.Parse(written, model_config_pb2.ModelConfig())
    assert [each.name for each in config.input] == ["text"]
    assert [each.name for each in config.output] == ["sentence_embedding", "num_tokens"]


def test_texts_have_the_lengths_of_the_mix():
    mix = text_mix(9)

    texts = texts_of(mix, seed=0)

    assert mix.label == "texts 5-9"
    assert sorted({len(text.split()) for text in texts}) == [3, 4, 5, 6, 7]
    assert texts == texts_of(mix, seed=0)


def a_row(system, clients, turn, served, p50_ms, note=""):
    label = f"texts 5-30, {clients} at once"
    figures = {"served": served, "p50_ms": p50_ms, "lost": 0, "turn": turn, "note": note}
    return Row(label, system, "gateway", **figures)


def test_figures_are_medians_over_the_turns():
    rows = [
        a_row(f"varlen-fp32{ending}", 16, turn, served + turn * step, p50_ms, note)
        for turn in range(3)
        for ending, served, step, p50_ms, note in (
            ("-grpc", 100.0, 0, 5.0, "processor time of a request: 5.000 ms server"),
            ("-gateway", 80.0, 5, 7.0, f"processor time of a request: 0.{turn + 1}00 ms gateway"),
        )
    ]

    found = figures([*rows, a_row("infinity-fp32", 16, 1, 17.0, 50.0)])

    assert {name: found[f"{name}_16_at_once"] for name in ("requests_vs_grpc", "gateway_ms")} == {
        "requests_vs_grpc": 0.85,
        "gateway_ms": 0.2,
    }
    assert found["p50_ms_above_grpc_16_at_once"] == 2
    assert found["requests_vs_infinity_16_at_once"] == 5
    assert found["requests_vs_grpc_1_at_once"] is None
    (table,) = gateway.tables(rows)
    assert table.lines[1][0] == "varlen-fp32-gateway"
    assert table.lines[1][-1] == "0.20 gateway"


@pytest.mark.parametrize("wrong", [False, True])
def test_a_run_appends_rows_of_all_routes_and_times_no_wrong_answers(tmp_path, monkeypatch, wrong):
    checkpoint = save_encoder(tmp_path / "tiny", pooling="mean_tokens")

    def reference(settings, texts):
        return np.array([[1.0 if wrong else len(text), 1.0] for text in texts], np.float32)

    @contextmanager
    def own_routes(system, settings, scratch):
        with grpc_port() as grpc_, http_port() as http_:
            names = f"{system.name}-grpc", f"{system.name}-gateway"
            yield [route_to("grpc", grpc_, names[0]), route_to("http", http_, names[1])]

    def no_infinity(settings, scratch):
        raise RuntimeError("its environment is missing")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gateway, "_reference", reference)
    monkeypatch.setattr(gateway, "_own_routes", own_routes)
    monkeypatch.setattr(gateway, "_infinity", no_infinity)
    monkeypatch.setattr(gateway, "WorkerProcess", InProcess)
    options = ["--gateway", "--quick", "--seconds", "1", "--output", "serving.csv"]

    done = CliRunner().invoke(app, ["--model", str(checkpoint), *options])

    rows = read_csv("serving.csv")
    assert list(rows[0]) == committed_columns("serving")
    assert (rows[0]["system"], rows[0]["kind"]) == ("infinity-fp32", "failed")
    if wrong:
        assert done.exit_code == 1
        assert "answers are wrong" in rows[1]["note"]
        assert len(rows) == 2
        return
    assert done.exit_code == 0, done.output
    expected = [
        (f"texts 5-30, {clients} at once", f"varlen-fp32-{ending}")
        for clients in (16, 1)
        for ending in ("grpc", "gateway")
    ]
    assert [(row["lengths"], row["system"]) for row in rows[1:]] == expected
    assert all(row["sent"] == row["ok"] for row in rows[1:])
    last = done.stdout.splitlines()[-1]
    assert last.startswith("BENCH serving_gateway: requests_vs_grpc_16_at_once=")
    assert last.endswith("lost=0")
