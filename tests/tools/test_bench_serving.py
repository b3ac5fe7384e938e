"""The serving benchmark: generator, repositories, peers, and small runs."""

import asyncio
import importlib.util
import json
import os
import random
import sys
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen_bench.harness.generator import offer, saturate
from varlen_bench.peers import engines
from varlen_bench.serving import __main__ as run
from varlen_bench.serving import server
from varlen_bench.serving.__main__ import app
from varlen_bench.serving.server import SYSTEMS, Settings, chosen_systems, write_models
from varlen_bench.workers import serving as worker
from varlen_bench.workers.serving import Load, Row
from varlen_bench.workloads import named_mix
from varlen_tools.local_server import ServerError

from .conftest import committed_columns, read_csv, save_encoder
from .virtual_clock import on_virtual_clock

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
UTILS = "triton_python_backend_utils"


@pytest.fixture
def checkpoint(tmp_path):
    """Return the folder of a tiny encoder that pools by mean; it takes 40 tokens."""
    return save_encoder(tmp_path / "tiny", pooling="mean_tokens")


def answering(seconds, outcome="ok"):
    """Return a client that answers after some seconds; both may be functions of the number."""

    async def send(number):
        await asyncio.sleep(seconds(number) if callable(seconds) else seconds)
        return outcome(number) if callable(outcome) else outcome, f"request {number}"

    return send


def offered(due_times, send, max_waiting=1000, max_late=None):
    return on_virtual_clock(offer(due_times, send, max_waiting=max_waiting, max_late=max_late))


def test_arrivals_do_not_wait_for_answers_up_to_a_limit():
    due_times = [0.0, 0.1, 0.2, 0.3, 5.2]

    record = offered(due_times, answering(5.0), max_waiting=3)

    assert [request.due for request in record.requests] == [0.0, 0.1, 0.2, 5.2]
    assert [one.sent - one.due for one in record.requests] == pytest.approx([0.0] * 4)
    assert [request.latency() for request in record.requests] == pytest.approx([5.0] * 4)
    assert record.not_sent == [0.3]
    assert not record.is_given_up


def test_every_arrival_is_accounted_for_whatever_its_outcome():
    draw = random.Random(0)
    outcomes = [draw.choice(["ok", "refused", "failed", "unanswered"]) for _ in range(200)]
    due_times = sorted(draw.uniform(0, 4) for _ in outcomes)

    def delay(number):
        return 1e9 if outcomes[number] == "unanswered" else draw.uniform(0, 2)

    record = offered(due_times, answering(delay, outcomes.__getitem__), max_waiting=60)

    assert len(record.requests) + len(record.not_sent) == 200
    assert sorted([*(one.due for one in record.requests), *record.not_sent]) == due_times
    assert record.not_sent
    assert all(one.outcome == outcomes[one.number] for one in record.requests)
    assert all((one.done is None) == (one.outcome == "unanswered") for one in record.requests)
    assert [reason[:8] for reason in record.reasons] == ["request "] * 3


def test_a_load_is_given_up_once_too_many_are_late_answered_or_not():
    due_times = [0.25 * n for n in range(10)]

    record = offered(due_times, answering(0.7), max_late=1)

    # at 0.75 s the first was answered late, and the second is late
    assert [request.due for request in record.requests] == [0, 0.25, 0.5]
    assert record.not_sent == due_times[3:]
    assert record.is_given_up
    assert record.end == 0.5


def test_a_generator_that_falls_behind_records_its_lateness():
    async def send(number):
        if number == 0:
            asyncio.get_running_loop()._selector.now += 0.5
        return "ok", ""

    record = offered([0.0, 0.1, 1.0], send)

    assert [one.sent - one.due for one in record.requests] == pytest.approx([0, 0.4, 0])


def test_a_closed_loop_keeps_its_requests_in_flight():
    record = on_virtual_clock(saturate(3, answering(0.5), in_flight=4, seconds=1.9))

    sent = [request.sent for request in record.requests]
    assert sent == pytest.approx([0.0] * 4 + [0.5] * 4 + [1.0] * 4 + [1.5] * 4)
    assert {request.number for request in record.requests} == {0, 1, 2}
    assert all(request.done is not None for request in record.requests)


@pytest.mark.parametrize(
    "message, status, outcome",
    [
        ("4096 requests wait", "UNAVAILABLE", "refused"),
        ("deadline missed: the answer would come in 350 ms", "UNAVAILABLE", "refused"),
        ("failed to connect to all addresses", "UNAVAILABLE", "failed"),
        ("Socket closed", "UNAVAILABLE", "failed"),
        ("out of memory", "INTERNAL", "failed"),
    ],
)
def test_a_refusal_is_not_a_failure_nor_a_lost_connection(message, status, outcome):
    error = InferenceServerException(message, f"StatusCode.{status}")

    assert worker.outcome_of(error) == outcome


def test_the_process_answers_a_load_with_its_row_and_embeds(monkeypatch):
    sent = []

    async def infer(model, inputs, outputs, parameters=None):
        """Refuse every fourth request with a deadline, and all for the model `bad`."""
        assert [each.name() for each in outputs] == ["sentence_embedding"]
        tokens = inputs[0].shape()[1]
        sent.append(tokens)
        if model == "bad":
            raise InferenceServerException("no\nsuch model", "StatusCode.NOT_FOUND")
        if parameters == {"deadline_ms": 60_000} and len(sent) % 4 == 0:
            raise InferenceServerException("full", "StatusCode.UNAVAILABLE")
        await asyncio.sleep(0.01)
        return SimpleNamespace(as_numpy=lambda name: np.full((1, 2), tokens, np.float32))

    client = nullcontext(SimpleNamespace(infer=infer))

    def row_of(*load, **options):
        order = {"models": ["m"], "load": asdict(Load(*load, **options))}
        return Row(**json.loads(json.dumps(handle(json.loads(json.dumps(order))))))

    monkeypatch.setattr(worker.aio, "InferenceServerClient", lambda address: client)
    handle = worker.start({"address": "127.0.0.1:9", "vocabulary": 9})
    mix = named_mix("short", 40)

    row = row_of("overload", mix, 0.2, seed=0, rate=20.0, max_waiting=99, deadline_ms=60_000)

    assert sorted(sent) == sorted(mix.take(24, seed=0))
    assert (row.system, row.kind, row.offered) == ("m", "overload", 20.0)
    assert (row.sent, row.ok, row.refused, row.failed, row.lost) == (24, 18, 6, 0, 0)
    assert row.kept_deadline == 1.0
    closed = row_of("closed", mix, 0.2, seed=0)
    assert closed.sent == closed.ok > 8
    answers = {"models": ["m", "bad"], "load": asdict(Load("closed", mix, 0.2, seed=0))}
    half = Row(**handle(answers))
    assert half.failed == pytest.approx(half.ok, abs=8)
    requests = [[1, 2, 3], [4]]
    assert handle({"models": ["m"], "requests": requests}) == {"vectors": [[3, 3], [1, 1]]}
    assert "such model" in handle({"models": ["bad"], "requests": requests})["error"]


def settings(checkpoint, names=("varlen-dp",)):
    systems, mixes = [SYSTEMS[name] for name in names], [named_mix("uniform", 40)]
    options = {"seconds": 1.0, "turns": 1, "peer_batch": 12, "threads": 2, "seed": 0}
    return Settings(checkpoint, systems, mixes, quick=True, **options)


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=list(SYSTEMS))
def test_a_repository_holds_a_complete_configuration(system, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "exported", lambda model, engine, *rest: Path("/", engine))

    write_models(tmp_path / "models", system, settings(checkpoint))

    assert sorted(each.name for each in (tmp_path / "models").iterdir()) == system.models
    model = tmp_path / "models" / system.name
    config = text_format.Parse((model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    assert [one.name for one in config.input] == ["input_ids"]
    assert list(config.output[0].dims) == [16]
    (instances,) = config.instance_group
    expected = (2, "1") if system.per_core else (1, "2")
    assert (instances.count, parameters["threads"]) == expected
    if system.is_ours:
        assert config.backend == "varlen"
        assert (model / "1/config.json").samefile(checkpoint / "config.json")
        assert parameters["max_sequence_tokens"] == "40"
        named = parameters.get("policy") or parameters["dtype"]
        assert named in system.name.replace("-", "_")
        assert ("execution" in parameters) == ("padded" in system.name)
    else:
        is_dynamic = "dynamic" in system.name
        assert config.backend == "python"
        assert (model / "1/model.py").is_file()
        assert config.HasField("dynamic_batching") == is_dynamic
        assert config.input[0].allow_ragged_batch == is_dynamic
        assert config.max_batch_size == (12 if is_dynamic else 1)
        assert parameters["checkpoint"] == f"/{parameters['engine']}"
        assert "{engine}-{precision}".format(**parameters) in system.name


def test_systems_are_chosen_by_name_and_a_quick_run_leaves_some_out():
    assert [one.name for one in chosen_systems("varlen-dp", quick=True)] == ["varlen-dp"]
    assert chosen_systems("", quick=False) == list(SYSTEMS.values())
    quick = {one.name for one in chosen_systems("", quick=True)}
    assert {"varlen-dp", "varlen-fifo-padded", "onnxruntime-fp32-single"} <= quick
    assert "transformers-bf16-single" not in quick


def imported(name, path, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def fake_onnxruntime(checkpoint):
    """Return a library whose graph has the inputs of the exported one."""
    embed = engines.load("transformers", checkpoint, "fp32", cores=engines.Cores(1, 1))

    def run(outputs, feeds):
        ids, mask = feeds["input_ids"], feeds["attention_mask"]
        assert ids.dtype == mask.dtype == np.int64
        assert not ids[mask == 0].any()
        return [embed([list(row[kept == 1]) for row, kept in zip(ids, mask, strict=True)])]

    def session(path, options, providers):
        assert (path, options.intra_op_num_threads) == (f"{checkpoint}/model.onnx", 1)
        return SimpleNamespace(run=run)

    level = SimpleNamespace(ORT_ENABLE_ALL=99)
    return SimpleNamespace(
        SessionOptions=SimpleNamespace, GraphOptimizationLevel=level, InferenceSession=session
    )


@pytest.mark.parametrize(
    "engine, precision",
    [("transformers", "fp32"), ("transformers", "bf16"), ("onnxruntime", "fp32")],
)
def test_a_peer_answers_as_we_do(monkeypatch, checkpoint, engine, precision):
    pb_utils = imported(UTILS, ROOT / "tests/backend/fakes" / f"{UTILS}.py", monkeypatch)
    monkeypatch.setitem(sys.modules, "onnxruntime", fake_onnxruntime(checkpoint))
    batch = [[2, 5, 6, 7, 3], [2, 3], [2, *([5, 8] * 18), 3]]
    two_rows = [batch[0], batch[0][::-1]]
    arrays = [np.array([ids]) for ids in batch] + [np.array(two_rows)]
    values = {"engine": engine, "checkpoint": str(checkpoint), "precision": precision}
    strings = {k: {"string_value": v} for k, v in (values | {"threads": "1"}).items()}
    model = imported("peer", server.PEER, monkeypatch).TritonPythonModel()

    model.initialize({"model_config": json.dumps({"parameters": strings})})
    responses = model.execute(
        [pb_utils.InferenceRequest([pb_utils.Tensor("input_ids", array)]) for array in arrays]
    )

    vectors = [response.output_tensors()[0].as_numpy() for response in responses]
    assert [one.shape for one in vectors] == [(len(array), 16) for array in arrays]
    with Encoder.from_pretrained(checkpoint, device="cpu", dtype="fp32") as encoder:
        expected = encoder.embed([*batch, *two_rows], normalize=True)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    roundings = encoder_roundings(checkpoint, dtype)
    vectors = np.concatenate(vectors)
    assert_close(vectors, expected, roundings=roundings, dtype=dtype)
    # the peer sums 16 squares in fp32, and so does this
    assert_close(np.linalg.norm(vectors, axis=1), np.ones(len(vectors)), roundings=2 * 16)


CAPACITY = {
    "varlen-token-budget": 20.0,
    "varlen-dp": 22.0,
    "transformers-fp32-dynamic": 5.0,
}


@pytest.fixture
def invoke(checkpoint, monkeypatch, tmp_path):
    """Return a function that runs the command; the fake systems sustain 90 % of their capacity."""

    def measure(system, load):
        capacity = CAPACITY.get(system.name, 20.0)
        rate = load.rate or capacity
        p99 = 100.0 if rate <= 0.9 * capacity else 900.0
        figures = {"seconds": load.seconds, "served": min(rate, capacity), "share": 1.0, "lost": 0}
        latency = {"mean_ms": p99 / 2, "p50_ms": p99 / 2, "p99_ms": p99, "kept_deadline": 0.99}
        return Row(load.mix.label, system.name, load.kind, offered=load.rate, **figures, **latency)

    embed = engines.load("transformers", checkpoint, "fp32", cores=engines.Cores(1, 1))

    def serve(system, settings, scratch):
        return nullcontext(
            SimpleNamespace(
                system=system,
                address="127.0.0.1:9",
                measure=partial(measure, system),
                embed=embed,
                processes=lambda: [os.getpid()],
            )
        )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "serve", serve)
    analyzed = Row("uniform 5-40", "varlen-dp", "perf_analyzer")
    monkeypatch.setattr(run.perf_analyzer, "measure", lambda *asked: analyzed)
    return lambda *options: CliRunner().invoke(app, ["--model", str(checkpoint), *options])


def test_a_quick_run_appends_rows_of_the_committed_columns(invoke, tmp_path):
    done = invoke("--quick", "--only", ",".join(CAPACITY), "--output", "rows/serving.csv")

    assert done.exit_code == 0, done.output
    rows = read_csv("rows/serving.csv")
    assert list(rows[0]) == committed_columns("serving")
    kinds = {name: [row["kind"] for row in rows if row["system"] == name] for name in CAPACITY}
    searched, paired = ["closed", "load", "load", "load", "most", "result"], ["paired"] * 2
    assert kinds["varlen-token-budget"] == [*searched, "closed", *paired]
    assert kinds["varlen-dp"] == [*searched, "load", "perf_analyzer", *paired]
    assert kinds["transformers-fp32-dynamic"] == searched
    (result,) = (r for r in rows if r["kind"] == "result" and r["system"] == "varlen-dp")
    # 0.8 of the capacity is sustained, the middle between it and 1.15 of it is not
    assert float(result["sustained"]) == pytest.approx(0.8 * 22)
    assert float(result["cosine_min"]) == pytest.approx(1.0)
    assert [row["offered"] for row in rows if row["kind"] == "most"] == ["40", "44", "44"]
    assert rows[0]["command"].startswith("python -m varlen_bench.serving --model tiny --only ")
    assert Path("rows/serving.html").is_file()
    assert "BENCH serving: sustained_vs_dynamic_batcher=4.4 " in done.stdout.splitlines()[-1]


def test_a_quick_run_without_output_appends_no_rows(invoke, tmp_path):
    done = invoke("--quick", "--only", "transformers-fp32-dynamic")

    assert done.exit_code == 0, done.output
    assert list(tmp_path.rglob("*.csv")) == []


def test_turns_are_in_the_order_a_b_b_a(invoke):
    done = invoke("--paired", "2", "--lengths", "short", "--output", "serving.csv")

    assert done.exit_code == 0, done.output
    rows = [row for row in read_csv("serving.csv") if row["kind"] == "paired"]
    order = ["varlen-token-budget", "varlen-dp"]
    assert [row["system"] for row in rows] == order * 2 + order[::-1] * 2
    assert [row["turn"] for row in rows] == ["0"] * 4 + ["1"] * 4
    assert [float(row["offered"]) for row in rows] == pytest.approx([12, 12, 16, 16] * 2)
    assert "short_dp_mean_vs_token_budget=1 " in done.stdout.splitlines()[-1]
    assert Path("serving-paired.html").is_file()


def test_more_than_two_systems_take_turns(invoke):
    names = ["varlen-token-budget", "varlen-dp", "varlen-none"]
    done = invoke(
        *("--paired", "2", "--lengths", "mixed", "--only", ",".join(names)),
        *("--output", "serving.csv"),
    )

    assert done.exit_code == 0, done.output
    rows = [row for row in read_csv("serving.csv") if row["kind"] == "paired"]
    assert [row["system"] for row in rows] == names * 2 + names[::-1] * 2


def test_an_older_commit_is_compared_beside_other_work(invoke):
    done = invoke(
        *("--paired", "1", "--baseline", "3fcb3b0", "--busy"),
        *("--lengths", "short", "--output", "serving.csv"),
    )

    assert done.exit_code == 0, done.output
    rows = [row for row in read_csv("serving.csv") if row["kind"] == "paired"]
    assert [row["system"] for row in rows] == ["varlen-before", "varlen-dp"] * 2
    assert {row["note"] for row in rows} == {"beside half a busy core"}
    assert "short_mean_vs_before=1 " in done.stdout.splitlines()[-1]


def test_the_backend_of_a_commit_is_extracted_once(tmp_path):
    backends = server.backends_at("HEAD", tmp_path)

    assert str(tmp_path / "HEAD" / "backend") in (backends / "varlen" / "model.py").read_text()
    assert (tmp_path / "HEAD" / "backend" / "varlen" / "scheduling" / "engine.py").is_file()
    assert (
        tmp_path / "HEAD" / "kernels" / "varlen_kernels" / "reference" / "__init__.py"
    ).is_file()
    assert server.backends_at("HEAD", tmp_path) == backends
    with pytest.raises(RuntimeError, match="no-such-commit"):
        server.backends_at("no-such-commit", tmp_path)


def test_requests_one_by_one_are_measured_in_turns_forth_and_back(invoke):
    ours, peer = "varlen-fp32", "openvino-fp32-single"

    done = invoke("--lone", "--only", f"{ours},{peer}", "--output", "serving.csv")

    assert done.exit_code == 0, done.output
    rows = read_csv("serving.csv")
    # the positions of the model end at 40
    lengths = [row["lengths"] for row in rows[::2]]
    assert lengths == ["lone 3", "lone 16", "lone 40"] * 3
    assert [row["system"] for row in rows[:6]] == [ours, peer] * 3
    assert [row["system"] for row in rows[6:12]] == [peer, ours] * 3
    assert {row["kind"] for row in rows} == {"lone"}
    assert done.stdout.splitlines()[-1] == (
        "BENCH serving_lone: lone_3_fp32_vs_fp32_peer=1 lone_3_int8_vs_int8_peer=n/a "
        "lone_16_fp32_vs_fp32_peer=1 lone_16_int8_vs_int8_peer=n/a "
        "lone_40_fp32_vs_fp32_peer=1 lone_40_int8_vs_int8_peer=n/a lost=0"
    )


def test_an_overload_is_twice_the_capacity_with_deadlines(invoke):
    done = invoke("--overload", "--quick", "--output", "serving.csv")

    assert done.exit_code == 0, done.output
    closed, overload = read_csv("serving.csv")
    columns = ("kind", "seconds", "offered")
    assert [closed[name] for name in columns] == ["closed", "4", "n/a"]
    assert [overload[name] for name in columns] == ["overload", "10", "44"]
    assert done.stdout.splitlines()[-1] == (
        "BENCH serving_overload: refused_p99_ms=n/a kept_deadline=0.99 rss_flatness=n/a failed=0 lost=0"
    )


@pytest.mark.parametrize("option", ["--only", "--lengths", "--trace"])
def test_a_bad_option_is_reported(invoke, option):
    done = invoke("--quick", option, "unknown.csv")

    assert done.exit_code == 2
    assert "unknown.csv" in done.output


def parts_of(settings, scratch):
    """Return the rows of each part of a run."""
    return list(run.LoadTest(settings, scratch, report=print).compare())


def test_a_system_without_a_server_is_a_row_and_the_others_go_on(checkpoint, monkeypatch, tmp_path):
    log = """I1121 model_lifecycle.cc:472] "loading: x:1"
E1121 model_lifecycle.cc:642] "failed to load 'x' version 1: Internal: ConfigError: unknown parameter\\n\\nAt:\\n f"
error: creating server"""

    def no_server(*given, **named):
        raise ServerError(f"the server ended with exit code 1\n{log}")

    monkeypatch.setattr(server, "LocalServer", no_server)
    names = ["varlen-dp", "transformers-fp32-single"]
    (ours,), (theirs,) = parts_of(settings(checkpoint, names), tmp_path)

    assert [ours.system, theirs.system] == names
    assert ours.note == "did not run on: Internal: ConfigError: unknown parameter"
    assert ours.kind == "failed"


@pytest.mark.parametrize("value", [1.0, 0.0, np.nan])
def test_wrong_answers_are_not_timed(checkpoint, monkeypatch, tmp_path, value):
    vectors = np.full((8, 16), value, np.float32)
    served = SimpleNamespace(system=SYSTEMS["varlen-fp32"], embed=lambda requests: vectors)
    monkeypatch.setattr(run, "serve", lambda system, settings, scratch: nullcontext(served))

    with np.errstate(invalid="ignore"):
        ((row,),) = parts_of(settings(checkpoint), tmp_path)

    assert row.kind == "failed"
    assert row.note.startswith("did not run on: answers are wrong: ")


@pytest.mark.server
@pytest.mark.timeout(300)
def test_a_small_run_against_real_servers(kit, checkpoint, tmp_path, monkeypatch):
    assert kit.is_dir()
    monkeypatch.chdir(tmp_path)
    names = ["varlen-token-budget", "transformers-fp32-dynamic"]
    options = ["--quick", "--seconds", "1", "--output", "serving.csv", "--only", ",".join(names)]

    done = CliRunner().invoke(app, ["--model", str(checkpoint), *options])

    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1].endswith("lost=0")
    kinds = {"closed", "load", "most", "result"}
    rows = [row for row in read_csv("serving.csv") if row["kind"] in kinds]
    assert {(row["system"], row["kind"]) for row in rows} == set(product(names, kinds))
    for row in rows:
        if row["kind"] == "result":
            assert float(row["cosine_min"]) > 0.999
            # 0 on a machine too busy for any load
            assert float(row["sustained"]) >= 0
        else:
            assert int(row["sent"]) == int(row["ok"]) + int(row["refused"]) > 0
            assert row["failed"] == row["lost"] == "0"
    assert Path("serving.html").is_file()
    assert str(tmp_path) not in Path("serving.csv").read_text()
