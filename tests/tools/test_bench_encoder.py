"""The encoder benchmark: workloads, batches, figures, and a small run of the whole."""

import threading
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from tests.checkpoints import SMALL_ENCODERS, pooling_files, save_checkpoint
from varlen.models.checkpoint_folder import Checkpoint
from varlen_bench import encoder
from varlen_bench.compare.systems import System
from varlen_bench.encoder import (
    BASELINE,
    SYSTEMS,
    EncoderResult,
    EncoderSubject,
    app,
    grid_workloads,
    rerank_workload,
    short_workload,
    uniform_workload,
)
from varlen_bench.peers import random_encoders
from varlen_bench.peers.engines import pad
from varlen_bench.workers.encoder import EncoderWorker, Workload

from .conftest import committed_columns, read_csv, save_encoder

pytestmark = pytest.mark.full

POSITIONS = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("models") / "tiny", pooling="mean_tokens")


def result(name, speeds, *, cosine=1.0, workload="uniform", note=""):
    made = EncoderResult(system=SYSTEMS[name], workload=workload, requests=4, work=100, note=note)
    made.rounds = [{"tokens_per_second": speed, "peak_rss_mib": 0.0} for speed in speeds]
    made.cosine_mean = made.cosine_min = cosine
    return made


def worker(name, embed, *sequences):
    made = EncoderWorker(SYSTEMS[name], lambda: embed, SYSTEMS[name].cores(2).instances)
    made.workloads["uniform"] = Workload("uniform", list(sequences), (1, 2), ())
    return made


def test_uniform_lengths_stay_in_range_and_repeat_for_a_seed(checkpoint):
    one, again = uniform_workload(checkpoint, 200), uniform_workload(checkpoint, 200)

    assert one == again
    assert one != uniform_workload(checkpoint, 200, seed=1)
    lengths = [len(sequence) for sequence in one.sequences]
    assert min(lengths) >= 5
    assert max(lengths) <= POSITIONS
    assert len(set(lengths)) > 30
    assert all(s[0] == 2 and s[-1] == 3 and min(s[1:-1]) > 4 for s in one.sequences)


def test_short_queries_are_3_to_30_tokens_and_repeat_for_a_seed(checkpoint):
    one = short_workload(checkpoint, 50)

    assert one == short_workload(checkpoint, 50)
    assert all(3 <= len(sequence) <= 30 for sequence in one.sequences)
    assert len({tuple(sequence) for sequence in one.sequences}) > 10


def test_a_tokenizer_that_knows_no_word_is_refused(tmp_path):
    Tokenizer(models.BPE({"b": 0}, [])).save(str(tmp_path / "tokenizer.json"))

    with pytest.raises(ValueError, match='no token for the text "a"'):
        uniform_workload(tmp_path, 1)


def test_a_thinned_workload_spans_the_lengths_and_keeps_the_order_of_arrival():
    whole = Workload("uniform", [[0] * n for n in (9, 1, 8, 2, 7, 3, 6, 4)], (), ())

    part, kept = whole.thinned(4)

    assert kept == [2, 5]
    assert [len(sequence) for sequence in part.sequences] == [8, 3]
    assert whole.thinned(1) == (whole, list(range(8)))
    assert Workload("uniform", [[0]], (), ()).thinned(8)[1] == [0]


@pytest.mark.parametrize("order", ["engine", "arrival", "sorted"])
@pytest.mark.parametrize("unit, size", [("sequences", 3), ("tokens", 10)])
def test_a_split_has_every_sequence_once(order, unit, size):
    sequences = [[0] * length for length in (4, 1, 9, 30, 2, 2, 7)]

    batches = System("", "varlen", "fp32", order, unit).split(sequences, size)

    assert sorted(i for batch in batches for i in batch) == list(range(len(sequences)))
    if unit == "tokens" and order != "engine":
        padded = [max(len(sequences[i]) for i in b) * len(b) for b in batches if len(b) > 1]
        assert all(tokens <= size for tokens in padded)


def test_a_sorted_split_goes_from_the_longest_to_the_shortest():
    sequences = [[0] * length for length in (4, 1, 9)]

    assert SYSTEMS["onnxruntime-fp32-sorted"].split(sequences, 2) == [[2, 0], [1]]
    assert SYSTEMS[BASELINE].split(sequences, 2) == [[0, 1], [2]]


def test_padding_is_masked():
    ids, mask = pad([[5, 6, 7], [8]])

    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_a_worker_returns_vectors_in_order_of_arrival_whatever_the_batches():
    seen = []

    def embed(batch):
        seen.append([len(sequence) for sequence in batch])
        return np.array([[len(sequence)] for sequence in batch], dtype=np.float32)

    made = worker("transformers-fp32-sorted", embed, *([1] * n for n in (3, 1, 2, 5)))
    speeds = made.calibrate("uniform")
    seen.clear()

    assert set(speeds) == {"1 sequences", "2 sequences"}
    made.sizes["uniform"] = 2
    assert made.answer_all("uniform").tolist() == [[3], [1], [2], [5]]
    assert seen == [[5, 3], [2, 1]]


def test_a_system_with_an_instance_per_core_runs_batches_at_the_same_time():
    together = threading.Barrier(2, timeout=60)

    def embed(batch):
        together.wait()
        return np.array([[len(sequence)] for sequence in batch], dtype=np.float32)

    made = worker("openvino-fp32-per-core", embed, *([1] * n for n in (3, 1, 2, 5)))
    made.sizes["uniform"] = 1

    assert made.answer_all("uniform").tolist() == [[3], [1], [2], [5]]


def test_a_fixed_batch_is_not_calibrated():
    made = worker(BASELINE, lambda batch: np.ones((len(batch), 1)), [1], [2])

    assert made.calibrate("uniform") == {}
    assert made.sizes["uniform"] == 20


def test_bench_figures_compare_only_systems_of_one_precision():
    figures = EncoderSubject().figures(
        [
            result("varlen-fp32", [600.0, 660.0]),
            result("varlen-bf16", [900.0, 900.0], cosine=0.9),
            result("varlen-int8", [1200.0, 1200.0], cosine=0.995),
            result(BASELINE, [100.0, 110.0]),
            result("onnxruntime-fp32-sorted", [300.0, 330.0]),
            result("ctranslate2-int8-sorted", [800.0, 800.0], cosine=0.99),
            result("onnxruntime-int8-blocks-sorted", [400.0, 400.0], cosine=0.999),
            result("ctranslate2-fp32-sorted", [], note="did not run: not installed"),
        ]
    )

    assert figures["fp32_vs_fifo"] == 6.0
    assert (figures["fp32_vs_peer"], figures["fp32_peer"]) == (2.0, "onnxruntime-fp32-sorted")
    assert (figures["fp32_cosine"], figures["fp32_peer_cosine"]) == (1.0, 1.0)
    # no peer ran in bf16
    assert (figures["bf16_vs_peer"], figures["bf16_peer"]) == (None, None)
    assert figures["bf16_cosine"] == 0.9
    assert (figures["int8_vs_peer"], figures["int8_peer"]) == (1.5, "ctranslate2-int8-sorted")
    assert (figures["int8_cosine"], figures["int8_peer_cosine"]) == (0.995, 0.99)
    assert figures["short_fp32_vs_peer"] is None


def test_int8_in_blocks_is_compared_with_int8():
    figures = EncoderSubject().figures(
        [
            result("varlen-int8", [1200.0], workload="rerank"),
            result("onnxruntime-int8-blocks-sorted", [400.0], workload="rerank"),
        ]
    )

    assert figures["rerank_int8_vs_peer"] == 3.0
    assert figures["rerank_int8_peer"] == "onnxruntime-int8-blocks-sorted"


def test_pairs_are_60_to_250_tokens_or_the_limit(checkpoint):
    pairs = rerank_workload(checkpoint, 20)

    # the tiny model has no more positions
    assert {len(sequence) for sequence in pairs.sequences} == {POSITIONS}
    assert pairs == rerank_workload(checkpoint, 20)


def test_a_system_that_did_not_run_keeps_a_row_with_its_reason():
    failed = result("ctranslate2-fp32-sorted", [], note="did not run: not installed")

    subject = EncoderSubject(model=Path("models/tiny/1"))
    results = [failed, result(BASELINE, [100.0, 120.0])]

    rows = subject.rows(results)

    assert [row["system"] for row in rows] == ["ctranslate2-fp32-sorted", BASELINE]
    assert {row["model"] for row in rows} == {"tiny"}
    assert rows[0]["tokens_per_second"] is None
    assert rows[0]["note"] == "did not run: not installed"
    assert rows[1]["tokens_per_second"] == 110
    assert rows[1]["ratio_to_fifo"] == 1.0
    assert rows[1]["sequences_per_second"] == pytest.approx(4.4)
    (uniform,) = subject.tables(results)
    assert [line[0] for line in uniform.lines] == [BASELINE, "ctranslate2-fp32-sorted"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--only", "tensorflow"], "unknown name 'tensorflow'"),
        (["--model", "none"], "not a folder"),
        ([], "pools by max"),
    ],
)
def test_options_that_cannot_be_are_refused(checkpoint, tmp_path, options, message):
    model = checkpoint if options else save_encoder(tmp_path / "max", pooling="max_tokens")

    done = CliRunner().invoke(app, ["--model", str(model), *options], env={"COLUMNS": "200"})

    assert done.exit_code == 2
    assert message in done.output


def test_a_random_encoder_is_made_once_with_the_tokenizer_of_another(tmp_path, monkeypatch):
    tiny = ("RobertaConfig", SMALL_ENCODERS["Roberta"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(random_encoders._ENCODERS, "roberta-base", tiny)
    other = save_checkpoint(tmp_path / "other", files={"tokenizer_config.json": {}})

    folder = random_encoders.random_encoder("roberta-base", tokenizer=other)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    again = random_encoders.random_encoder("roberta-base", tokenizer=other)

    assert again == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert Checkpoint.open(folder).vocab_size == Checkpoint.open(other).vocab_size
    assert (folder / "tokenizer.json").read_text() == (other / "tokenizer.json").read_text()


def test_batches_of_equal_sequences_are_compared_by_length(
    tmp_path, monkeypatch, checkpoint, peers_in_process
):
    monkeypatch.setattr(encoder, "_GRID_TOKENS", (4, 9))
    monkeypatch.setattr(encoder, "_GRID_PASS_TOKENS", 16)
    output = tmp_path / "encoder.csv"
    systems = f"varlen-fp32,{BASELINE}"
    arguments = ["--model", str(checkpoint), "--grid", "--rounds", "1", "--only", systems]

    done = CliRunner().invoke(app, [*arguments, "--threads", "1", "--output", str(output)])

    assert done.exit_code == 0, done.output
    rows = [row for row in read_csv(output) if row["system"] == "varlen-fp32"]
    found = [(row["workload"], row["sequences"], row["tokens"]) for row in rows]
    assert found == [
        ("1x4", "1", "4"),
        ("1x9", "1", "9"),
        ("20x4", "20", "80"),
        ("20x9", "20", "180"),
    ]
    last = done.output.strip().splitlines()[-1]
    keys = dict(word.split("=", 1) for word in last.split()[2:])
    assert last.startswith("BENCH encoder_grid: ")
    assert keys["batch_20_vs_transformers"] == keys["batch_20_vs_best_peer"]
    times = [each.times for each in grid_workloads(checkpoint)]
    assert times == [4, 2, 1, 1]


def test_a_reused_run_neither_calibrates_nor_asks_the_reference_again(
    tmp_path, monkeypatch, checkpoint, peers_in_process
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = []
    ask = encoder._ask

    def listening(process, order, *rest, **more):
        asked.append(order)
        return ask(process, order, *rest, **more)

    monkeypatch.setattr(encoder, "_ask", listening)
    arguments = ["--model", str(checkpoint), "--rounds", "1", "--only", "transformers-fp32-sorted"]
    arguments += ["--sequences", "6", "--queries", "6", "--pairs", "0", "--threads", "1", "--reuse"]
    rows = []
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        output = tmp_path / f"{name}.csv"
        done = CliRunner().invoke(app, [*arguments, "--seed", str(seed), "--output", str(output)])
        assert done.exit_code == 0, done.output
        rows.append(read_csv(output))

    once = ["prepare", "calibrate", "prepare"]
    assert asked == [*once, "prepare", *once]
    for key in ("batch", "calibration", "cosine_mean"):
        assert [row[key] for row in rows[0]] == [row[key] for row in rows[1]]
    assert all("1 sequences: " in row["calibration"] for row in rows[0])


def test_a_small_run_of_another_family_measures_appends_and_ends_with_the_bench_line(
    tmp_path, monkeypatch, peers_in_process
):
    fields = SMALL_ENCODERS["Roberta"]
    files = pooling_files(
        word_embedding_dimension=fields["hidden_size"], pooling_mode_cls_token=True
    )
    checkpoint = save_checkpoint(tmp_path / "roberta", "RobertaModel", files=files, **fields)

    def export(model, engine, *rest):
        if engine == "onnxruntime":
            raise RuntimeError("export failed")
        return model

    monkeypatch.setattr(encoder, "exported", export)
    output = tmp_path / "encoder.csv"
    arguments = ["--model", str(checkpoint), "--rounds", "2"]
    arguments += ["--sequences", "6", "--queries", "6", "--pairs", "6"]
    arguments += ["--only", f"varlen-fp32,{BASELINE},onnxruntime-int8-sorted", "--threads", "1"]

    done = CliRunner().invoke(app, [*arguments, "--output", str(output)])

    assert done.exit_code == 0, done.output
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("BENCH encoder: fp32_vs_fifo=")
    keys = dict(word.split("=", 1) for word in last.split()[2:])
    assert keys["fp32_peer"] == keys["rerank_fp32_peer"] == BASELINE
    assert float(keys["fp32_cosine"]) > 0.99999
    rows = read_csv(output)
    assert list(rows[0]) == committed_columns("encoder")
    assert len(rows) == 9
    assert {row["note"] for row in rows[6:]} == {"did not run: export failed"}
    assert all(float(row["tokens_per_second"]) > 0 for row in rows[:6])
    assert all(float(row["peak_rss_mib"]) > 10 for row in rows[:6])
    assert str(tmp_path) not in output.read_text()
