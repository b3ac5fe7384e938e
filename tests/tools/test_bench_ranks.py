"""The benchmark of ranks: a tiny run of the whole, wrong sums, lost ranks."""

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("rich")

from varlen_bench import ranks as benchmark
from varlen_bench.peers.checkpoints import GeneratorShape
from varlen_bench.ranks import MEASUREMENTS, SYSTEMS, app
from varlen_bench.workers import ranks as exchange
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.reference.rank_memory import LONGEST_WAIT, rank_words

from .conftest import committed_columns, read_csv

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not has_compiled_ops(), reason="exchanges of steps are compiled"),
]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_writes_a_row_for_each_shape_and_system(ranks, tmp_path, monkeypatch):
    output = tmp_path / "rows.csv"
    monkeypatch.setattr(benchmark, "SHAPES", ((1, 7), (3, 33)))
    options = ["--quick", "--only", "all_reduce", "--ranks", str(ranks), "--output", str(output)]

    result = CliRunner().invoke(app, options)

    assert result.exit_code == 0, result.output
    rows = read_csv(output)
    assert [(row["case"], row["system"]) for row in rows] == [
        (case, system) for case in ("1x7 fp32", "3x33 fp32") for system in SYSTEMS
    ]
    assert all(0 < float(row["least"]) <= float(row["median"]) for row in rows)
    assert {row["ranks"] for row in rows} == {str(ranks)}
    assert list(rows[0]) == committed_columns("ranks")
    assert "BENCH ranks: all_reduce_1x7_fp32_step=" in result.output


def test_a_run_says_how_long_stages_wait(tmp_path, monkeypatch):
    tiny = GeneratorShape("tiny", 64, 2, 4, positions=128, vocabulary=300)
    output = tmp_path / "rows.csv"
    monkeypatch.setattr(benchmark, "GPT2_SMALL", tiny)
    monkeypatch.setattr(benchmark, "SEQUENCES", (3,))
    monkeypatch.setattr(benchmark, "DTYPES", ("fp32",))

    result = CliRunner().invoke(app, ["--quick", "--only", "stages", "--output", str(output)])

    assert result.exit_code == 0, result.output
    rows = {(row["measurement"], row["system"]): row for row in read_csv(output)}
    assert rows.keys() == {("token", "one process"), ("token", "stages"), ("bubble", "stages")}
    assert rows["bubble", "stages"]["unit"] == "%"
    assert 0 < float(rows["bubble", "stages"]["median"]) < 100
    assert float(rows["token", "stages"]["median"]) > 0


def test_an_unknown_measurement_is_refused_with_all_names():
    result = CliRunner().invoke(app, ["--only", "prefill"])

    assert result.exit_code == 2
    assert all(name in result.output for name in ("prefill", *MEASUREMENTS))


def test_a_wrong_sum_ends_the_run():
    with pytest.raises(RuntimeError, match=r"rank 1 got a wrong sum of \(2, 3\) numbers"):
        exchange.check(lambda x, count: x.add_(count), (2, 3), rank=1, size=3)


@pytest.mark.parametrize("way", [exchange.in_step, exchange.as_op])
def test_a_rank_that_does_not_come_ends_the_run(way):
    memory = torch.zeros(rank_words(2), dtype=torch.int64)
    memory[LONGEST_WAIT] = 10_000_000
    exchange_alone = way(memory, 0, 2)

    with pytest.raises(RuntimeError, match="rank 1 did not come"):
        exchange_alone(torch.zeros(2, 3), 4)


def test_a_sample_is_the_time_of_one_exchange(monkeypatch):
    clock, exchanges = iter(range(0, 100, 5)), []
    monkeypatch.setattr(exchange.time, "perf_counter", lambda: next(clock))

    found = exchange.samples(lambda _, count: exchanges.append(count), (1, 1), 3, 20)

    assert found == [5 / 20] * 3
    assert exchanges[1:] == [20] * 3
