"""The encoder benchmark: its workloads, its arithmetic, and one tiny run of the whole."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.closeness import assert_close
from varlen_bench.encoder import report
from varlen_bench.encoder.process import WorkerError, WorkerProcess
from varlen_bench.encoder.report import Result
from varlen_bench.encoder.run import chosen_systems
from varlen_bench.encoder.systems import BASELINE, SYSTEMS, Batching, split, system
from varlen_bench.encoder.worker import Worker
from varlen_bench.encoder.workload import (
    Workload,
    every_kth_by_length,
    short_workload,
    uniform_workload,
)
from varlen_bench.harness import rows as bench_report
from varlen_bench.peers.engines import pad

POSITIONS = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return the folder of a two-layer BERT with random weights, as sentence-transformers lays it out."""
    import torch
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("tiny")
    letters = "abcdefghijklmnopqrstuvwxyz0123456789?,"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + c for c in letters)]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
    )
    BertModel(config).save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling")])
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def result(name, speeds, *, cosine=1.0, workload="uniform", failed=False):
    return Result(
        system(name),
        workload,
        sequences=4,
        tokens=100,
        batching="8 sequences",
        speeds=speeds,
        cosines=np.full(4, cosine, dtype=np.float32),
        failed=failed,
    )


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


def test_a_tokenizer_without_cls_is_refused(tmp_path, checkpoint):
    Tokenizer(models.WordPiece({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))

    with pytest.raises(ValueError, match=r"no \[CLS\] and \[SEP\]"):
        uniform_workload(tmp_path, 1)


def test_every_kth_by_length_keeps_the_order_of_arrival_and_spans_lengths():
    sequences = [[0] * n for n in (9, 1, 8, 2, 7, 3, 6, 4)]

    assert every_kth_by_length(sequences, 4) == [2, 5]
    assert every_kth_by_length(sequences[:1], 8) == [0]


@pytest.mark.parametrize("order", ["arrival", "sorted"])
@pytest.mark.parametrize(
    "batching", [Batching("whole"), Batching("sequences", 3), Batching("tokens", 10)], ids=str
)
def test_a_split_holds_every_sequence_once(order, batching):
    lengths = [4, 1, 9, 30, 2, 2, 7]

    batches = split(lengths, order, batching)

    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    if batching.kind == "tokens":
        padded = [max(lengths[i] for i in b) * len(b) for b in batches if len(b) > 1]
        assert all(tokens <= batching.size for tokens in padded)


def test_a_sorted_split_goes_from_the_longest_to_the_shortest():
    assert split([4, 1, 9], "sorted", Batching("sequences", 2)) == [[2, 0], [1]]
    assert split([4, 1, 9], "arrival", Batching("sequences", 2)) == [[0, 1], [2]]


def test_padding_is_masked():
    ids, mask = pad([[5, 6, 7], [8]])

    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_a_worker_returns_vectors_in_order_of_arrival_whatever_the_batches():
    workload = Workload("uniform", [[1] * n for n in (3, 1, 2, 5)], (1, 2), ())
    seen = []

    def embed(batch):
        seen.append([len(sequence) for sequence in batch])
        return np.array([[len(sequence)] for sequence in batch], dtype=np.float32)

    worker = Worker(system("transformers-fp32-sorted"), embed, {"uniform": workload}, {})
    speeds = worker.calibrate("uniform")
    seen.clear()

    assert set(speeds) == {"1 sequences", "2 sequences"}
    worker.batchings["uniform"] = Batching("sequences", 2)
    assert worker.run("uniform").tolist() == [[3], [1], [2], [5]]
    assert seen == [[5, 3], [2, 1]]


def test_a_fixed_batch_is_not_calibrated():
    workload = Workload("uniform", [[1], [2]], (1, 2), ())
    worker = Worker(
        system(BASELINE), lambda batch: np.ones((len(batch), 1)), {"uniform": workload}, {}
    )

    assert worker.calibrate("uniform") == {}
    assert worker.batchings["uniform"] == Batching("sequences", 20)


def test_cosines_ignore_length_and_see_direction():
    reference = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=np.float32)
    vectors = np.array([[3.0, 0.0], [1.0, 0.0], [-1.0, -1.0]], dtype=np.float32)

    assert_close(report.cosines(vectors, reference), [1, 0, -1], roundings=2 * 2)


def test_cosines_refuse_nan_and_another_shape():
    with pytest.raises(ValueError, match="not finite"):
        report.cosines(np.array([[np.nan]], dtype=np.float32), np.ones((1, 1), np.float32))
    with pytest.raises(ValueError, match="shape"):
        report.cosines(np.ones((2, 1), np.float32), np.ones((1, 1), np.float32))


def test_ratios_are_paired_by_round():
    # The machine halves its speed in the second round: the ratio does not move.
    assert report.paired_ratio([200, 100, 220], [100, 50, 100]) == 2.0


def test_bench_figures_compare_only_systems_of_equal_quality():
    results = [
        result("varlen-fp32", [600.0, 660.0]),
        result("varlen-bf16", [900.0, 900.0], cosine=0.9),
        result(BASELINE, [100.0, 110.0]),
        result("onnxruntime-fp32-sorted", [300.0, 330.0]),
        result("ctranslate2-int8-sorted", [800.0, 800.0], cosine=0.99),
        result("ctranslate2-fp32-sorted", [], failed=True),
    ]

    figures = report.bench_figures(results)

    assert figures["ours"] == "varlen-fp32"
    assert figures["best_peer"] == "onnxruntime-fp32-sorted"
    assert figures["vs_best_peer"] == 2.0
    assert figures["vs_transformers_fifo_fp32"] == 6.0
    assert figures["vs_transformers_best"] == 6.0
    assert figures["cosine"] == 1.0
    assert figures["short_vs_best_peer"] is None


def test_a_system_that_did_not_run_keeps_a_row_with_its_reason():
    failed = result("ctranslate2-fp32-sorted", [], failed=True)
    failed.note = "did not run: not installed"

    rows = report.csv_rows([result(BASELINE, [100.0, 120.0]), failed], "tiny")

    assert [row["system"] for row in rows] == [BASELINE, "ctranslate2-fp32-sorted"]
    assert rows[0]["tokens_per_second"] == 110
    assert rows[0]["ratio_to_fifo"] == 1.0
    assert rows[0]["sequences_per_second"] == pytest.approx(4.4)
    assert rows[1]["tokens_per_second"] is None
    assert rows[1]["note"] == "did not run: not installed"
    assert report.table([failed], "uniform").row_count == 1


def test_systems_are_chosen_by_the_beginning_of_their_names():
    assert chosen_systems("") == SYSTEMS
    assert [s.name for s in chosen_systems("varlen-fp32, onnx")][:2] == [
        "varlen-fp32",
        "onnxruntime-fp32-arrival",
    ]
    with pytest.raises(ValueError, match="'tensorflow'"):
        chosen_systems("tensorflow")


def test_rows_are_appended_under_one_header_and_other_columns_are_refused(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    run = bench_report.provenance(
        threads=2, packages=["numpy", "no-such-package"], command="x", root=tmp_path
    )

    bench_report.append_rows(path, run, [{"a": 1.23456789, "b": None}])
    bench_report.append_rows(path, run, [{"a": 2, "b": "two"}])

    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["a"], row["b"]) for row in rows] == [("1.23457", "n/a"), ("2", "two")]
    assert rows[0]["revision"] == "uncommitted"
    assert "no-such-package=absent" in rows[0]["versions"]
    with pytest.raises(ValueError, match="columns"):
        bench_report.append_rows(path, run, [{"c": 1}])


def test_the_bench_line_reads_key_by_key():
    line = bench_report.bench_line("encoder", {"ratio": 6.54321, "peer": None, "cosine": 1.0})

    assert line == "BENCH encoder: ratio=6.54321 peer=n/a cosine=1"


def test_a_worker_that_cannot_load_says_why(tmp_path):
    (tmp_path / "workloads.json").write_text("[]")
    spec = {
        "system": "onnxruntime-fp32-sorted",
        "model": str(tmp_path),
        "checkpoint": str(tmp_path),
        "threads": 1,
        "workloads": str(tmp_path / "workloads.json"),
        "vectors": str(tmp_path),
    }
    process = WorkerProcess(spec, tmp_path / "log", timeout_seconds=60)
    try:
        with pytest.raises(WorkerError, match=r"model\.onnx|onnxruntime"):
            process.answer()
    finally:
        process.close()


def test_a_small_run_measures_appends_and_ends_with_the_bench_line(checkpoint, tmp_path):
    output = tmp_path / "encoder.csv"
    arguments = ["--model", str(checkpoint), "--rounds", "2", "--sequences", "6", "--queries", "6"]
    arguments += ["--systems", "varlen-fp32,transformers-fp32-fifo", "--output", str(output)]

    done = subprocess.run(
        [sys.executable, "-m", "varlen_bench.encoder", *arguments, "--threads", "1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("BENCH encoder: vs_transformers_fifo_fp32=")
    keys = dict(word.split("=", 1) for word in last.split()[2:])
    assert keys["ours"] == "varlen-fp32"
    assert keys["best_peer"] == BASELINE
    assert float(keys["cosine"]) > 0.99999
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)
    assert all(float(row["peak_rss_mib"]) > 10 for row in rows)
    assert str(tmp_path) not in output.read_text()
