"""The memory benchmark: requests, systems, a tiny run of the whole, a real server."""

import re
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from tests.closeness import assert_close, encoder_roundings
from varlen.program.program import PackedBatch
from varlen.program.recorder import Recorder
from varlen_bench import memory
from varlen_bench.harness.resident import MIB
from varlen_bench.harness.worker import WorkerError
from varlen_bench.memory import (
    ENCODERS,
    EXACT,
    SERVER,
    STUB,
    MemorySubject,
    Soak,
    app,
    ask_worker,
    cases,
    empty_result,
    measure_case,
    measure_server,
    soak,
)
from varlen_bench.peers.checkpoints import MINILM, EncoderShape, save_random_checkpoint
from varlen_bench.workers.memory import (
    NO_ARENA,
    OURS,
    PEER,
    Case,
    NoArena,
    UnplannedProgram,
    allocated_bytes,
    asked_bytes,
    compare,
    load,
)

from .conftest import committed_columns, read_csv

pytestmark = pytest.mark.full

ENCODER = EncoderShape("tiny", hidden=32, layers=2, heads=2, features=64, vocabulary=50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_random_checkpoint(ENCODER, path, 32)
    return path


def a_case(*lengths, batch=2):
    return Case(ENCODER, batch, lengths or (5, 20, 3))


def test_the_stream_is_the_papers_and_the_same_each_time():
    small, *_, large = cases(ENCODERS["minilm"], quick=False)

    assert (small.batch, large.batch) == (1, 20)
    assert len(small.lengths) == 150
    assert small.lengths[:12] == (437, 202, 393, 460, 220, 25, 137, 499, 266, 253, 212, 475)
    assert large.max_tokens == 20 * max(large.lengths) <= 10_000
    assert max(large.lengths) == max(small.lengths)
    assert len(large.lengths) == 15
    assert large.ids(1).shape == (20, large.lengths[1])
    assert np.array_equal(large.ids(1), large.ids(1))
    assert not np.array_equal(small.ids(0)[:, :202], small.ids(1))


def test_a_quick_look_keeps_the_encoders_and_has_fewer_requests():
    for encoder in ENCODERS.values():
        whole, quick = (cases(encoder, quick=quick) for quick in (False, True))
        assert {case.encoder for case in [*whole, *quick]} == {encoder}
        assert {case.batch for case in quick} < {case.batch for case in whole}
        assert all(len(case.lengths) < 150 for case in quick)


def test_every_third_request_by_length_has_the_longest_and_keeps_their_order():
    assert a_case(4, 9, 1, 7, 3, 8).every(3).lengths == (4, 9)
    assert a_case(4).every(3).lengths == (4,)


@pytest.mark.parametrize("count", [1, 12, 150])
def test_rounds_hold_every_request_once(count):
    rounds = a_case(*range(1, count + 1)).rounds()

    assert sorted(number for numbers in rounds for number in numbers) == list(range(count))
    assert count < 20 or {len(numbers) for numbers in rounds} == {10}


def test_all_systems_give_the_same_vectors(folder):
    ids = a_case().longest()

    ours, without, theirs = (
        load(name, folder, "cpu", ids.size).embed(ids) for name in (OURS, NO_ARENA, PEER)
    )

    assert np.array_equal(ours, without)
    assert_close(ours, theirs, roundings=encoder_roundings(folder))


def test_without_an_arena_a_value_goes_after_its_last_use():
    alive = weakref.WeakSet()
    most_alive = []

    class Kernels:
        def tanh(self, x, *, limit=1.0, out=None):
            most_alive.append(len(alive))
            made = torch.tanh(x) if out is None else torch.tanh(x, out=out)
            alive.add(made)
            return made

    recorder, dims = Recorder(), {"tokens": 3, "sequences": 1}
    value = recorder.input("x", ("tokens", 4), torch.float32)
    for _ in range(6):
        value = recorder.tanh(value)
    program = UnplannedProgram(recorder.finish(value))
    region = NoArena(dims, torch.device("cpu")).allocate(dims)

    batch = PackedBatch({"x": torch.ones(3, 4)}, dims)
    (answer,) = program.run(batch, Kernels(), region)
    (placed,) = program.run(batch, Kernels(), region, out=[torch.empty(3, 4)])

    assert max(most_alive[:6]) == 1
    assert torch.equal(answer, placed)


def test_asked_bytes_are_those_of_every_op_without_an_arena(folder):
    ids = a_case().longest()

    ours, without = (
        asked_bytes(load(name, folder, "cpu", ids.size), ids) for name in (OURS, NO_ARENA)
    )

    # a layer's results: qkv, context, attended, norm, up with its activation, down, norm
    layer = ids.size * 4 * (ENCODER.hidden * (3 + 1 + 1 + 1 + 1 + 1) + ENCODER.features)
    assert without > ENCODER.layers * layer
    assert without - ours > ENCODER.layers * layer / 2


def test_an_arena_allocates_what_it_starts_with_and_grows_by():
    assert allocated_bytes([4, 10, 10, 6, 9]) == 4 + 6 + 3


def test_systems_take_turns_and_each_keeps_its_own_seconds():
    order = []

    def system(name):
        def answer(ids):
            order.append(name)
            return np.zeros(ids.shape, dtype=np.float32)

        return answer

    systems, ids = (system("with"), system("without")), np.zeros((1, 2), dtype=np.int32)
    spent = [compare(systems, ids, turn) for turn in range(2)]

    assert order == ["with", "without", "without", "with"]
    assert all(seconds > 0 for pair in spent for seconds in pair)
    with pytest.raises(RuntimeError, match=r"a request of shape \(1, 2\) differ"):
        compare((systems[0], lambda ids: ids + 1), ids, turn=0)


def test_the_whole_benchmark_on_a_tiny_encoder(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "ENCODERS", {ENCODER.name: ENCODER})
    monkeypatch.setattr(memory, "_STEPS", {ENCODER.name: {2: 1}})
    monkeypatch.setattr(memory, "_LONGEST", 20)
    monkeypatch.setattr(memory, "_REQUESTS", 12)
    output = tmp_path / "memory.csv"

    done = CliRunner().invoke(app, ["--served", "0", "--threads", "2", "--output", str(output)])

    assert done.exit_code == 0, done.output
    last = done.output.splitlines()[-1]
    assert last.startswith("BENCH memory: ")
    keys = "footprint_vs_bound vs_pytorch plan_share speed_vs_no_arena new_bytes_per_request rss_flatness"
    assert re.findall(r"(\w+)=", last) == keys.split()
    found = read_csv(output)
    assert list(found[0]) == committed_columns("memory")
    systems = (OURS, NO_ARENA, PEER, EXACT)
    assert [row["system"] for row in found] == [system.name for system in systems]
    assert [row["requests"] for row in found] == ["12", "4", "12", "12"]
    assert [row["note"] for row in found] == [""] * 4
    assert 1 <= float(found[0]["footprint_vs_bound"]) < 1.25
    assert float(found[0]["footprint_vs_bound_max"]) < 1.25
    assert float(found[3]["new_mib_per_request"]) < 1.25 * float(found[0]["bound_largest_mib"])
    assert float(found[0]["vs_no_arena"]) > 0
    assert all(float(row["asked_mib_longest"]) > 0 for row in found[:3])


def test_a_worker_that_fails_says_why(tmp_path):
    with pytest.raises(WorkerError, match=r"CheckpointError: .*config\.json"):
        ask_worker(OURS, a_case(), tmp_path, "cpu", threads=1)


def test_a_soak_samples_memory_between_parts_of_its_requests(monkeypatch, tmp_path):
    sent, resident = [], iter(range(10, 100, 10))
    server = SimpleNamespace(pid=1, grpc_url="grpc://here", wait_ready=lambda _: None)

    class FakeClient(nullcontext):
        def __init__(self, url, model, *, rows_per_request, concurrency, retry):
            super().__init__()
            assert (url, model, rows_per_request) == (server.grpc_url, "tiny", 1)

        def embed(self, texts, *, truncate):
            assert truncate
            sent.append([len(text.split()) for text in texts])

    fakes = {
        "LocalServer": lambda *_, **__: nullcontext(server),
        "Client": FakeClient,
        "model_process": lambda *_: 2,
        "resident_bytes": lambda _: MIB * next(resident),
        "family_bytes": lambda _: MIB * next(resident),
        "_REST_SECONDS": 0.0,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(memory, name, fake)
    (tmp_path / "tiny" / "1").mkdir(parents=True)
    (tmp_path / "tiny" / "1" / "tokenizer.json").write_text(
        Tokenizer(WordLevel({"cat": 0, "dog": 1, "[UNK]": 2}, "[UNK]")).to_str()
    )

    stub, process = soak(Soak(tmp_path, "tiny", requests=5, warmup=3, every=4, longest=9))

    assert [len(part) for part in sent] == [3, 4, 1]
    assert all(5 <= length <= 9 for part in sent for length in part)
    names = ("rss_least_mib", "rss_median_mib", "rss_most_mib", "peak_mib", "rss_flatness")
    assert [stub.median(name) for name in names] == [10, 30, 50, 50, 40 / 30]
    assert (process.median("rss_least_mib"), process.median("peak_mib")) == (20, 60)


@pytest.mark.server
def test_a_served_model_is_sampled_between_requests(kit, encoder, tmp_path):
    model = tmp_path / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "1").symlink_to(encoder, target_is_directory=True)
    (model / "config.pbtxt").write_text(
        'backend: "varlen" parameters { key: "warmup_seconds" value { string_value: "0" } }'
    )
    order = Soak(tmp_path / "models", "tiny", requests=60, warmup=20, every=20, longest=30)

    stub, server = soak(order)

    assert (stub.system, server.system) == (STUB, SERVER)
    assert stub.requests == 60
    least, median, most, peak = (
        stub.median(f"{name}_mib") for name in ("rss_least", "rss_median", "rss_most", "peak")
    )
    assert 1 < least <= median <= most <= peak
    assert server.median("rss_least_mib") > 1
    assert 0 <= stub.median("rss_flatness") < 1


def test_a_server_that_cannot_start_is_a_note(tmp_path):
    (stub,) = measure_server(Soak(tmp_path / "none", "tiny"), lambda _: None)

    assert stub.note.startswith("did not run: ")
    assert stub.median("rss_flatness") is None


CASE = Case(MINILM, 2, (1, 2, 3, 4))
SPEEDS = [1.0, 1.1, 1.2, 1.2, 1.3, 1.4]
FIGURES = {
    OURS: [
        {
            "weights_mib": 100.0,
            "footprint_vs_bound": 1.02,
            "new_mib_per_request": 3.0,
            "peak_mib": 20.0,
            "plan_share": 0.005,
        },
        {"new_mib_per_request": 5.0},
    ],
    NO_ARENA: [{"weights_mib": 100.0, "peak_mib": 30.0}],
    PEER: [{"weights_mib": 100.0, "peak_mib": 50.0}],
}


def measured(*failing):
    def ask(system, case):
        if system in failing:
            raise WorkerError(f"{system.name if system else 'speed'} is broken")
        return {"figures": map(dict, FIGURES[system])} if system else {"speeds": SPEEDS}

    return measure_case(CASE, "cpu", ask, lambda _: None)


def columns(results, *names):
    return [tuple(row[name] for name in names) for row in MemorySubject().rows(results)]


def test_a_case_has_a_row_for_each_system_and_the_exact_arena():
    results = measured()

    assert columns(results, "system", "requests", "vs_pytorch") == [
        ("varlen", 4, 0.4),
        ("varlen-no-arena", 2, 0.6),
        ("transformers", 4, 1.0),
        ("exact-arena", 4, None),
    ]
    assert set(columns(results, "encoder", "batch", "device")) == {("minilm", 2, "cpu")}
    speeds = columns(results, "vs_no_arena", "vs_no_arena_p20", "vs_no_arena_p80")
    assert speeds[0] == (1.2, 1.1, 1.3)
    assert columns(results, "new_mib_per_request")[-1] == (5.0,)


def test_the_bench_line_has_the_worst_of_each_figure():
    better = empty_result(OURS, "tiny", "cpu", 4)
    better.rounds.append({"footprint_vs_bound": 1.0, "vs_pytorch": 0.3})
    stub = Soak(Path(), "tiny").result(STUB)
    stub.rounds.append({"rss_flatness": 2 / 101})

    assert MemorySubject().figures([better, *measured(), stub]) == {
        "footprint_vs_bound": 1.02,
        "vs_pytorch": 0.4,
        "plan_share": 0.005,
        "speed_vs_no_arena": 1.2,
        "new_bytes_per_request": 3 * MIB,
        "rss_flatness": 0.0198,
    }


def test_a_peer_that_fails_leaves_its_reason_and_no_ratio():
    results = measured(PEER)

    assert results[0].median("peak_mib") == 20
    assert columns(results, "vs_pytorch") == [(None,)] * 4
    assert MemorySubject().figures(results)["vs_pytorch"] is None
    assert MemorySubject().figures(results)["speed_vs_no_arena"] == 1.2
    systems, arenas, *notes = MemorySubject().tables(results)
    assert notes == ["minilm 2 transformers: did not run: transformers is broken"]
    assert [line[3] for line in systems.lines] == [OURS.name, NO_ARENA.name]
    assert [line[3] for line in arenas.lines] == [OURS.name, EXACT.name]


def test_our_own_failure_leaves_a_row_too():
    results = measured(OURS, None)

    assert [result.system for result in results] == [OURS, NO_ARENA, PEER]
    assert results[0].note == "did not run: varlen is broken; no speed: speed is broken"
    assert set(MemorySubject().figures(results).values()) == {None}
