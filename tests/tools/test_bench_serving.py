"""The load lab: its arrivals, its generator on a clock of its own, its repositories, its peers, and one tiny run."""

import asyncio
import csv
import importlib.util
import json
import random
import sys
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
from varlen_bench.peers import engines
from varlen_bench.serving import arrivals, run, served
from varlen_bench.serving.__main__ import app
from varlen_bench.serving.arrivals import Mix, model_limits, poisson, trace_mix, uniform_mix
from varlen_bench.serving.client import outcome_of
from varlen_bench.serving.generator import Bounds, Offering, Sent, offer, saturate
from varlen_bench.serving.repository import Checkpoint, write_model
from varlen_bench.serving.systems import SYSTEMS, chosen_systems, system
from varlen_tools.local_server import ServerError

from .conftest import save_encoder
from .virtual_clock import on_virtual_clock

FAKES = Path(__file__).parents[1] / "backend" / "fakes"
UTILS = "triton_python_backend_utils"
PEERS = Path(run.__file__).parent / "peers"
EASY = Bounds(outstanding=1000)


@pytest.fixture
def checkpoint(tmp_path):
    """Return the folder of a tiny encoder that pools by mean and normalises, and takes 40 tokens."""
    folder = save_encoder(tmp_path / "tiny")
    (folder / "1_Pooling/config.json").write_text(
        json.dumps({"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True})
    )
    modules = json.loads((folder / "modules.json").read_text())
    kind = "sentence_transformers.models.Normalize"
    modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": kind})
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


# arrivals


def test_as_many_arrive_as_were_asked_for_and_the_same_ones_each_time():
    dues = poisson(20, 10, seed=3)

    assert len(dues) == 200
    assert dues == sorted(dues) == poisson(20, 10, seed=3) != poisson(20, 10, seed=4)
    assert 0 <= dues[0] < dues[-1] < 10
    gaps = np.diff(poisson(100, 200, seed=0))
    # the gaps of a Poisson process are as far apart as they are long
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.05)


def test_lengths_of_one_count_are_the_same_work_in_another_order():
    mix = uniform_mix("uniform", 512)

    one, other = mix.take(100, seed=1), mix.take(100, seed=2)

    assert one != other
    assert sorted(one) == sorted(other)
    assert one == mix.take(100, seed=1)
    assert min(one) >= 5
    assert max(one) <= 500
    assert np.mean(one) == pytest.approx(252.5, abs=1)


def test_lengths_are_cut_to_what_the_model_takes():
    assert uniform_mix("uniform", 40).label == "uniform 5-40"
    assert max(uniform_mix("uniform", 40).take(50, 0)) <= 40
    assert uniform_mix("short", 512).lengths == tuple(range(2, 101))
    with pytest.raises(ValueError, match="no lengths are called 'long'; there are uniform, short"):
        uniform_mix("long", 512)


def test_a_trace_is_its_first_column_of_whole_numbers_in_order(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,Other\n2023-11-16 18:15:46,7,1\n2023-11-16 18:15:47,0,1\n"
    )

    mix = trace_mix(path, 512)

    assert mix == Mix("trace", "trace azure", (7, 1), in_order=True)
    assert mix.take(5, seed=0) in ([7, 1, 7, 1, 7], [1, 7, 1, 7, 1])


def test_a_trace_that_is_too_long_is_divided_and_its_tail_cut(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text("tokens\n" + "\n".join(map(str, [*range(1, 100), 100_000])))

    mix = trace_mix(path, 33)

    assert mix.label == "trace long / 3"
    assert mix.lengths == (1, 1, 1, 1, 2, *(round(n / 3) for n in range(6, 100)), 33)


def test_a_file_without_lengths_is_refused(tmp_path):
    (tmp_path / "words.csv").write_text("a,b\nx,1.5\n")

    with pytest.raises(ValueError, match=r"words\.csv has no column of whole numbers"):
        trace_mix(tmp_path / "words.csv", 512)


def test_ids_are_of_the_vocabulary_and_never_padding():
    ids = arrivals.token_ids([3, 500], 9, seed=0)

    assert [len(one) for one in ids] == [3, 500]
    assert set(ids[1]) == set(range(1, 9))


# the generator


def answering(seconds, outcome="ok"):
    """Return a client that answers each request after so many seconds, by its number if that is a function."""

    async def send(number):
        delay = seconds(number) if callable(seconds) else seconds
        await asyncio.sleep(delay)
        return outcome(number) if callable(outcome) else outcome, f"request {number}"

    return send


def test_arrivals_do_not_wait_for_answers():
    dues = [0.0, 0.1, 0.2, 0.3]

    offering = on_virtual_clock(offer(dues, answering(5.0), EASY))

    assert [one.sent for one in offering.sent] == pytest.approx(dues)
    assert [one.done for one in offering.sent] == pytest.approx([due + 5 for due in dues])
    assert {one.outcome for one in offering.sent} == {"ok"}
    assert offering.not_sent == []
    assert not offering.is_given_up


def test_every_arrival_is_accounted_for_whatever_becomes_of_it():
    draw = random.Random(0)
    fates = [draw.choice(["ok", "refused", "failed", "unanswered"]) for _ in range(200)]
    dues = sorted(draw.uniform(0, 4) for _ in fates)

    def delay(number):
        return 1e9 if fates[number] == "unanswered" else draw.uniform(0, 2)

    offering = on_virtual_clock(
        offer(dues, answering(delay, fates.__getitem__), Bounds(60, patience=30))
    )

    assert len(offering.sent) + len(offering.not_sent) == 200
    assert sorted([*(one.due for one in offering.sent), *offering.not_sent]) == dues
    assert offering.not_sent
    assert all(one.outcome == fates[one.number] for one in offering.sent)
    assert all((one.done is None) == (one.outcome == "unanswered") for one in offering.sent)
    assert len(offering.reasons) == 3
    assert all(reason.startswith("request ") for reason in offering.reasons)


def test_no_more_wait_than_may_and_what_is_due_meanwhile_is_not_sent():
    offering = on_virtual_clock(offer([0.0, 0.1, 0.2, 1.5], answering(1.0), Bounds(2)))

    assert [one.due for one in offering.sent] == [0.0, 0.1, 1.5]
    assert offering.not_sent == [0.2]
    assert not offering.is_given_up


def test_offering_is_given_up_once_too_many_are_late_answered_or_not():
    dues = [float(n) for n in range(10)]
    bounds = Bounds(1000, late_seconds=1.5, late_most=1)

    offering = on_virtual_clock(offer(dues, answering(2.0), bounds))

    # at 3 s the first was answered late and the second is late
    assert [one.due for one in offering.sent] == [0, 1, 2]
    assert offering.not_sent == dues[3:]
    assert offering.is_given_up
    assert offering.end == 2
    assert {one.outcome for one in offering.sent} == {"ok"}


def test_a_generator_that_falls_behind_says_by_how_much():
    async def slow_to_send():
        loop = asyncio.get_running_loop()

        async def send(number):
            if number == 0:
                loop._selector.now += 0.5
            return "ok", ""

        return await offer([0.0, 0.1, 1.0], send, EASY)

    offering = on_virtual_clock(slow_to_send())

    assert [one.sent - one.due for one in offering.sent] == pytest.approx([0, 0.4, 0])


def test_a_closed_loop_keeps_so_many_in_flight():
    in_flight, most = 0, 0

    async def send(number):
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0.5)
        in_flight -= 1
        return "ok", ""

    offering = on_virtual_clock(saturate(3, send, in_flight=4, seconds=1.9))

    assert most == 4
    assert len(offering.sent) == 16
    assert {one.number for one in offering.sent} == {0, 1, 2}
    assert all(one.done is not None for one in offering.sent)


def test_an_offering_survives_its_json():
    offering = Offering([Sent(0, 1.0, 1.5, 2.0, "ok"), Sent(1, 2.0, 2.0)], [3.0], 2.0, ["why"])

    assert Offering.from_json(json.loads(json.dumps(offering.to_json()))) == offering


@pytest.mark.parametrize(
    "message, status, outcome",
    [
        ("4096 requests wait", "StatusCode.UNAVAILABLE", "refused"),
        ("deadline missed: the answer would come in 350 ms", "StatusCode.UNAVAILABLE", "refused"),
        ("failed to connect to all addresses", "StatusCode.UNAVAILABLE", "failed"),
        ("Socket closed", "StatusCode.UNAVAILABLE", "failed"),
        ("out of memory", "StatusCode.INTERNAL", "failed"),
    ],
)
def test_a_refusal_is_not_a_failure_nor_a_lost_connection(message, status, outcome):
    assert outcome_of(InferenceServerException(message, status)) == outcome


# repositories


@pytest.mark.parametrize("name", [one.name for one in SYSTEMS])
def test_a_repository_holds_a_complete_configuration(name, checkpoint, tmp_path):
    served_as = Checkpoint(
        checkpoint, {}, max_tokens=40, peer_batch=12, threads=2, warmup_seconds=3
    )

    write_model(tmp_path / "models", system(name), served_as)

    model = tmp_path / "models" / name
    config = text_format.Parse((model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    assert [one.name for one in config.input] == ["input_ids"]
    assert list(config.output[0].dims) == [16]
    if system(name).is_ours:
        assert config.backend == "varlen"
        assert (model / "1/config.json").samefile(checkpoint / "config.json")
        assert config.parameters["max_sequence_tokens"].string_value == "40"
        assert config.parameters["policy"].string_value in name.replace("-", "_")
    else:
        assert config.backend == "python"
        assert (model / "1/model.py").is_file()
        assert config.HasField("dynamic_batching") == ("dynamic" in name)
        assert config.input[0].allow_ragged_batch == ("dynamic" in name)
        assert config.max_batch_size == (12 if "dynamic" in name else 1)
        assert config.parameters["threads"].string_value == "2"
        assert config.parameters["dtype"].string_value in name


def test_systems_are_chosen_by_the_beginning_of_their_names():
    assert chosen_systems("", quick=False) == list(SYSTEMS)
    assert {one.engine for one in chosen_systems("varlen, onnx", quick=True)} == {
        "varlen",
        "onnxruntime",
    }
    assert [one.name for one in chosen_systems("varlen-dp", quick=False)] == ["varlen-dp"]
    quick = {one.name for one in chosen_systems("", quick=True)}
    assert "transformers-bf16-single" not in quick
    assert {"varlen-dp", "varlen-fifo-padded", "onnxruntime-fp32-single"} <= quick
    with pytest.raises(ValueError, match="no system is called 'tei'"):
        chosen_systems("tei", quick=False)


# the peers' models


@pytest.fixture
def pb_utils(monkeypatch):
    """Return the stand-in for what the server gives to its models."""
    spec = importlib.util.spec_from_file_location(UTILS, FAKES / f"{UTILS}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, UTILS, module)
    spec.loader.exec_module(module)
    return module


def answers(pb_utils, engine, parameters, batch):
    """Return a peer's vectors for requests of one row each, and one request of two rows."""
    spec = importlib.util.spec_from_file_location("peer", PEERS / f"{engine}_model.py")
    peer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer)
    model = peer.TritonPythonModel()
    strings = {name: {"string_value": value} for name, value in parameters.items()}
    model.initialize({"model_config": json.dumps({"parameters": strings})})
    arrays = [np.array([ids]) for ids in batch] + [np.array([batch[0], batch[0][::-1]])]
    requests = [
        pb_utils.InferenceRequest([pb_utils.Tensor("input_ids", array)]) for array in arrays
    ]
    responses = model.execute(requests)
    found = [response.output_tensors()[0].as_numpy() for response in responses]
    assert [one.shape for one in found] == [(len(array), 16) for array in arrays]
    return np.concatenate(found)


def expected(checkpoint, batch):
    with Encoder.from_pretrained(checkpoint, device="cpu", dtype="fp32") as encoder:
        return encoder.embed([*batch, batch[0], batch[0][::-1]], normalize=True)


BATCH = [[2, 5, 6, 7, 3], [2, 3], [2, *([5, 8] * 18), 3]]


@pytest.mark.parametrize(
    "dtype, precision", [("fp32", torch.float32), ("bf16", torch.bfloat16)], ids=["fp32", "bf16"]
)
def test_the_transformers_peer_answers_as_we_do(pb_utils, checkpoint, dtype, precision):
    parameters = {"checkpoint": str(checkpoint), "dtype": dtype, "threads": "1"}

    vectors = answers(pb_utils, "transformers", parameters, BATCH)

    roundings = encoder_roundings(checkpoint, precision)
    assert_close(vectors, expected(checkpoint, BATCH), roundings=roundings, dtype=precision)
    # the peer sums 16 squares in fp32, and so does this
    assert_close(np.linalg.norm(vectors, axis=1), np.ones(len(vectors)), roundings=2 * 16)


def test_the_onnxruntime_peer_answers_as_we_do(pb_utils, checkpoint, monkeypatch):
    embed = engines.load("transformers", checkpoint, checkpoint, "fp32", threads=1)
    asked = []

    class Session:
        """A graph that takes what the exported one takes, and minds its mask."""

        def __init__(self, path, options, providers):
            asked.append((path, options.intra_op_num_threads, providers))

        def run(self, outputs, feeds):
            ids, mask = feeds["input_ids"], feeds["attention_mask"]
            assert ids.dtype == mask.dtype == np.int64
            assert not ids[mask == 0].any()
            return [embed([list(row[kept == 1]) for row, kept in zip(ids, mask, strict=True)])]

    fake = SimpleNamespace(
        SessionOptions=SimpleNamespace,
        GraphOptimizationLevel=SimpleNamespace(ORT_ENABLE_ALL=99),
        InferenceSession=Session,
    )
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    parameters = {"checkpoint": "/exported", "dtype": "fp32", "threads": "3"}

    vectors = answers(pb_utils, "onnxruntime", parameters, BATCH)

    assert asked == [("/exported/model.onnx", 3, ["CPUExecutionProvider"])]
    assert_close(vectors, expected(checkpoint, BATCH), roundings=encoder_roundings(checkpoint))


# a run


def settings(checkpoint, systems):
    limit, vocabulary = model_limits(checkpoint)
    shared = Checkpoint(checkpoint, {}, limit, peer_batch=8, threads=1, warmup_seconds=1)
    effort = run.Effort(closed_seconds=0.2, seconds=0.3, steps=1, most_seconds=0.3)
    efforts = run.Plan(effort, effort, effort, paired_seconds=0.0)
    mixes = [uniform_mix("uniform", limit)]
    return run.Settings([system(name) for name in systems], mixes, shared, vocabulary, efforts, 0)


def test_a_system_that_cannot_start_is_a_row_and_the_others_go_on(checkpoint, monkeypatch):
    log = """I1121 model_lifecycle.cc:472] "loading: x:1"
E1121 model_lifecycle.cc:642] "failed to load 'x' version 1: Internal: ConfigError: unknown parameter\\n\\nAt:\\n f"
error: creating server"""

    class NoServer:
        def __init__(self, *given, **named):
            raise ServerError(f"the server ended with exit code 1\n{log}")

    monkeypatch.setattr(served, "LocalServer", NoServer)

    with run.lab(settings(checkpoint, ["varlen-dp", "transformers-fp32-single"]), print) as lab:
        ours, theirs = list(lab.measure())

    assert [row.system for row in (*ours, *theirs)] == ["varlen-dp", "transformers-fp32-single"]
    assert ours[0].note == "did not run on: Internal: ConfigError: unknown parameter"
    assert ours[0].kind == "failed"


def test_wrong_answers_are_not_timed(checkpoint):
    given = settings(checkpoint, ["varlen-dp"])
    lab = run.Lab(given, checkpoint, run.reference(given), print)

    class Wrong:
        def check(self, one, wanted):
            assert wanted.vectors.shape == (8, 16)
            return float("nan")

    with pytest.raises(run.WrongAnswersError, match="answers are wrong: cosine nan"):
        lab._check(Wrong(), system("varlen-dp"))


@pytest.mark.server
@pytest.mark.timeout(300)
def test_a_small_run_against_real_servers(kit, checkpoint, tmp_path, monkeypatch):
    assert kit.is_dir()
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "out" / "serving.csv"
    arguments = ["--model", str(checkpoint), "--quick", "--seconds", "1", "--output", str(output)]

    done = CliRunner().invoke(
        app, [*arguments, "--only", "varlen-token-budget,transformers-fp32-dynamic"]
    )

    assert done.exit_code == 0, done.output
    last = done.stdout.splitlines()[-1]
    assert last.startswith("BENCH serving: sustained_vs_dynamic_batcher=n/a")
    assert last.endswith("lost=0")
    with output.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["system"] for row in rows} == {"varlen-token-budget", "transformers-fp32-dynamic"}
    assert {"closed", "load", "most", "result"} <= {row["kind"] for row in rows}
    for row in rows:
        if row["kind"] in {"load", "most"}:
            told = {name: int(row[name]) for name in ("sent", "ok", "refused", "failed", "lost")}
            assert told.pop("sent") == sum(told.values()) > 0
            assert told["failed"] == told["lost"] == 0
        if row["kind"] == "result":
            assert float(row["cosine_min"]) > 0.999
            assert float(row["sustained"]) > 0
    assert output.with_suffix(".html").is_file()
    assert str(tmp_path) not in output.read_text()
