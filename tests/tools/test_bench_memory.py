"""The memory benchmark: its requests, its gauge, its systems, one tiny run of the whole, and a real server."""

import csv
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.closeness import assert_close, encoder_roundings
from varlen.memory.arena import MemoryUse
from varlen.program.program import PackedBatch
from varlen.program.recorder import Recorder
from varlen_bench.harness import resident
from varlen_bench.harness.resident import ResidentPeak
from varlen_bench.kernels.encoder_peers import save_random_checkpoint
from varlen_bench.kernels.grid import TINY
from varlen_bench.memory import cases, memory
from varlen_bench.memory.__main__ import app
from varlen_bench.memory.cases import NO_ARENA, OURS, PEER, Case
from varlen_bench.memory.process import WorkerError, ask
from varlen_bench.memory.rows import EXACT
from varlen_bench.memory.run import measure_server
from varlen_bench.memory.soak import Soak, soak
from varlen_bench.memory.speed import compare
from varlen_bench.memory.systems import load
from varlen_bench.memory.unplanned import NoArena, UnplannedProgram
from varlen_bench.memory.worker import Order

MIB = 1 << 20
ENCODER = TINY.encoders[0]
KEYS = [
    "footprint_vs_bound",
    "vs_pytorch",
    "plan_share",
    "speed_vs_no_arena",
    "new_bytes_per_request",
    "rss_flatness",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a tiny random checkpoint."""
    path = tmp_path_factory.mktemp("tiny")
    save_random_checkpoint(ENCODER, path, TINY.positions)
    return path


def a_case(*lengths, batch=2):
    return Case(ENCODER, batch, lengths or (5, 20, 3))


def test_the_stream_is_the_papers_and_the_same_each_time():
    small, *_, large = cases.cases(cases.encoders("minilm")[0], quick=False)

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
    for encoder in cases.encoders(""):
        whole, quick = (cases.cases(encoder, quick=quick) for quick in (False, True))
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


def test_a_case_survives_its_json():
    case = a_case(3, 4)

    assert Case.from_json(case.to_json()) == case


def test_an_unknown_encoder_is_refused():
    with pytest.raises(ValueError, match="no encoder is called 'gpt'; there are"):
        cases.encoders("minilm, gpt")


@pytest.mark.parametrize("kernel_counts", [True, False])
def test_a_peak_is_seen_though_its_memory_is_given_back(monkeypatch, kernel_counts):
    if not kernel_counts:
        monkeypatch.setattr(resident, "reset_peak", lambda: False)

    with ResidentPeak() as taking:
        taken = torch.ones(64 * MIB, dtype=torch.uint8)
        # a sampler looks every millisecond
        for _ in range(20):
            taken.add_(1)
        del taken
    with ResidentPeak() as idle:
        pass

    assert 60 * MIB < taking.above < 100 * MIB
    assert idle.above < 8 * MIB


def test_another_process_can_be_looked_at():
    assert 0 < resident.resident_bytes(1) <= resident.peak_resident_bytes(1)


def test_all_systems_give_the_same_vectors(folder):
    ids = a_case().longest()

    ours, without, theirs = (
        load(name, folder, "cpu", ids.size).run(ids) for name in (OURS, NO_ARENA, PEER)
    )

    assert np.array_equal(ours, without)
    assert_close(ours, theirs, roundings=encoder_roundings(folder))


def test_without_an_arena_a_value_goes_after_its_last_use():
    alive = weakref.WeakSet()
    most_alive = []

    class Kernels:
        def tanh(self, x, out=None):
            most_alive.append(len(alive))
            made = torch.tanh(x) if out is None else torch.tanh(x, out=out)
            alive.add(made)
            return made

    recorder, dims = Recorder(), {"tokens": 3, "sequences": 1}
    value = recorder.input("x", ("tokens", 4), torch.float32)
    for _ in range(6):
        value = recorder.tanh(value)
    program = UnplannedProgram(recorder.finish(value))
    region = NoArena(dims, torch.device("cpu")).allocate_whole(dims)

    batch = PackedBatch({"x": torch.ones(3, 4)}, dims)
    (answer,) = program.run(batch, Kernels(), region)
    (placed,) = program.run(batch, Kernels(), region, out=[torch.empty(3, 4)])

    assert max(most_alive[:6]) == 1
    assert torch.equal(answer, placed)


def test_asked_bytes_are_those_of_every_op_without_an_arena(folder):
    ids = a_case().longest()

    ours, without = (
        memory.asked_bytes(load(name, folder, "cpu", ids.size), ids) for name in (OURS, NO_ARENA)
    )

    # a layer's results: qkv, context, attended, norm, up, its activation, down, norm
    layer = ids.size * 4 * (ENCODER.hidden * (3 + 1 + 1 + 1 + 1 + 1) + 2 * ENCODER.features)
    assert without > ENCODER.layers * layer
    assert without - ours > ENCODER.layers * layer / 2


def test_new_bytes_are_what_the_arena_grew_by():
    held = iter([4, 4, 10, 10, 10, 10, 6, 6, 9])
    arena = SimpleNamespace(
        use=lambda: MemoryUse(next(held), 0, 0), layout=SimpleNamespace(plan_seconds=0.0)
    )
    stream = memory._Stream(lambda ids: ids, arena)

    for _ in range(4):
        stream.run(np.zeros((1, 1), dtype=np.int32))

    assert stream.new == 4 + 6 + 3
    assert stream.reserved == 10


def test_plans_of_the_tiny_encoder_are_close_to_their_bound(folder):
    loaded, case = load(OURS, folder, "cpu", 40), a_case()

    figures = memory.plan_figures(loaded.program, loaded.device, case)

    assert 1 <= figures.ratio <= figures.ratio_most < 1.25
    assert 0 < figures.footprint < figures.bound_largest * 1.25


def test_systems_take_turns_and_each_keeps_its_own_seconds():
    order = []

    def system(name):
        def answer(ids):
            order.append(name)
            return np.zeros(ids.shape, dtype=np.float32)

        return answer

    runs, ids = (system("with"), system("without")), np.zeros((1, 2), dtype=np.int32)
    spent = [compare(runs, ids, turn) for turn in range(2)]

    assert order == ["with", "without", "without", "with"]
    assert all(seconds > 0 for pair in spent for seconds in pair)


def test_answers_that_differ_are_an_error():
    runs = tuple(lambda ids, value=value: ids + value for value in (0, 1))

    with pytest.raises(RuntimeError, match=r"a request of shape \(1, 2\) differ"):
        compare(runs, np.zeros((1, 2), dtype=np.int32), turn=0)


def test_the_whole_benchmark_on_a_tiny_encoder(monkeypatch, tmp_path):
    monkeypatch.setattr(cases, "FULL", SimpleNamespace(encoders=(ENCODER,)))
    monkeypatch.setattr(cases, "_BATCHES", {ENCODER.name: (2,)})
    monkeypatch.setattr(cases, "LONGEST", 20)
    monkeypatch.setattr(cases, "REQUESTS", 12)
    output = tmp_path / "memory.csv"

    done = CliRunner().invoke(app, ["--served", "0", "--threads", "2", "--output", str(output)])

    assert done.exit_code == 0, done.output
    last = done.output.splitlines()[-1]
    assert last.startswith("BENCH memory: ")
    assert [word.partition("=")[0] for word in last.split()[2:]] == KEYS
    with output.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["system"] for row in found] == [OURS, NO_ARENA, PEER, EXACT]
    assert [row["requests"] for row in found] == ["12", "4", "12", "12"]
    assert [row["note"] for row in found] == [""] * 4
    assert float(found[0]["footprint_vs_bound"]) >= 1
    assert float(found[0]["vs_no_arena"]) > 0
    assert all(float(row["asked_mib_longest"]) > 0 for row in found[:3])


def test_a_worker_tells_why_it_failed(tmp_path):
    order = Order("memory", OURS, str(tmp_path), a_case().to_json(), "cpu", 1)

    with pytest.raises(WorkerError, match=r"CheckpointError: .*config\.json"):
        ask(order)


def test_a_worker_that_takes_too_long_is_given_up(tmp_path):
    order = Order("memory", OURS, str(tmp_path), a_case().to_json(), "cpu", 1)

    with pytest.raises(WorkerError, match=r"no figures within 0\.01 s"):
        ask(order, timeout_seconds=0.01)


@pytest.mark.server
def test_a_served_model_is_watched_while_it_answers(kit, encoder, tmp_path):
    assert kit.is_dir()
    model = tmp_path / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "1").symlink_to(encoder, target_is_directory=True)
    (model / "config.pbtxt").write_text('backend: "varlen"')
    order = Soak(tmp_path / "models", "tiny", requests=60, warmup=20, every=20, longest=30)

    stub, server = soak(order)

    assert (stub.process, server.process) == ("stub", "server")
    assert len(stub.samples) == len(server.samples) == 4
    assert all(sample > MIB for sample in stub.samples + server.samples)
    assert stub.peak >= max(stub.samples)
    assert 0 <= stub.value < 1


def test_a_server_that_cannot_start_is_a_note(tmp_path):
    (row,) = measure_server(Soak(tmp_path / "none", "tiny"), lambda _: None)

    assert row.note.startswith("did not run: ")
    assert row.rss_flatness is None
