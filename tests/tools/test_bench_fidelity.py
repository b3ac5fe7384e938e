"""The fidelity board: its corpus, its judgement, its page, and what varlen answers on it."""

import json

import pytest

from varlen_bench.fidelity.board import (
    checkpoints_of,
    picture_of,
    read_board,
    tables_of,
    write_page,
)
from varlen_bench.fidelity.corpus import KINDS, entries, inputs_of, write_entry
from varlen_bench.fidelity.engines import start
from varlen_bench.fidelity.hub import read_hub_entries
from varlen_bench.fidelity.judge import Answered, Verdict, judge
from varlen_bench.fidelity.reasons import LENGTH, NO_REASON, PROMPT, explain
from varlen_bench.harness.rows import append_rows, provenance

ENTRIES = {each.name: each for each in entries()}
# One entry of each task and kind of tokenizer.
FEW = (
    "sentence-transformers/all-MiniLM-L6-v2",
    "sentence-transformers/LaBSE",
    "cross-encoder/ms-marco-MiniLM-L6-v2",
    "dslim/bert-base-NER",
)
# Inputs that varlen refuses, where the original answers.
REFUSED = {
    "Muennighoff/SGPT-125M-weightedmean-nli-bitfit": {"blank": "text has no tokens"},
}


def test_the_corpus_has_180_checkpoints_of_every_task_and_all_layouts():
    assert len(ENTRIES) >= 180
    assert {each.task for each in ENTRIES.values()} == {
        "embed",
        "sparse_embed",
        "rerank",
        "classify",
        "token_classify",
        "generate",
    }
    assert {name for name, each in read_hub_entries().items() if "layout" in each} <= ENTRIES.keys()


def answers(engine, entry, folder):
    """Return what an engine answers for an entry, by kind of input."""
    answer = start({"engine": engine, "memory_gib": None})(
        {"folder": str(folder), "task": entry.task, "requests": inputs_of(entry)}
    )
    kinds = inputs_of(entry)
    return answer.get("answers") or {kind: {"error": answer["error"]} for kind in kinds}


def check_equals_original(name, folder):
    """Raise AssertionError unless varlen answers as the original or refuses what is listed."""
    entry = ENTRIES[name]
    try:
        write_entry(entry, folder)
    except AttributeError as error:
        pytest.skip(str(error))
    expected, actual = (answers(engine, entry, folder) for engine in ("original", "varlen"))
    refused = REFUSED.get(name, {})
    for kind in inputs_of(entry):
        found = judge(entry.task, expected[kind], actual[kind])
        if kind in refused:
            assert found.result == "refused"
            assert refused[kind] in found.remark
        else:
            assert found.result in ("equal", "no original"), (kind, found)


@pytest.mark.parametrize("name", FEW)
def test_varlen_equals_the_original(tmp_path, name):
    check_equals_original(name, tmp_path / "checkpoint")


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(ENTRIES.keys() - {*FEW}))
def test_varlen_equals_the_original_in_the_whole_corpus(tmp_path, name):
    check_equals_original(name, tmp_path / "checkpoint")


@pytest.mark.parametrize(
    "task, expected, actual, result",
    [
        ("embed", {"rows": [[1.0, 0.0]]}, {"rows": [[1.0, 1e-5]]}, "equal"),
        ("embed", {"rows": [[1.0, 0.0]]}, {"rows": [[0.99, 0.1]]}, "different"),
        ("embed", {"rows": [[1.0, 0.0]]}, {"rows": [[1.0, 0.0, 0.0]]}, "different"),
        ("embed", {"rows": [[1.0]]}, {"rows": []}, "different"),
        ("embed", {"rows": [[1.0]]}, {"error": "too long"}, "refused"),
        ("embed", {"error": "no pad token"}, {"rows": [[1.0]]}, "no original"),
        ("embed", {"rows": [[float("nan")]]}, {"rows": [[1.0]]}, "no original"),
        ("generate", {"rows": [[4, 5]]}, {"rows": [[4, 5]]}, "equal"),
        ("generate", {"rows": [[4, 5]]}, {"rows": [[4, 6]]}, "different"),
    ],
)
def test_judges_answers(task, expected, actual, result):
    assert judge(task, expected, actual).result == result


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict("equal", 1.2e-07),
        Verdict("different", 0.5, "the prompt is left out"),
        Verdict("refused", None, "ValueError: a, b: c"),
        Verdict("different"),
    ],
)
def test_a_cell_of_the_table_is_read_back(verdict):
    assert Verdict.read(verdict.text()) == verdict


def test_a_cell_that_is_no_verdict_is_refused():
    with pytest.raises(ValueError, match="no verdict"):
        Verdict.read("perhaps")


def test_the_page_has_the_last_row_of_each_checkpoint_and_a_picture(tmp_path):
    run = provenance(threads=1, packages=(), command="", root=tmp_path)
    first, last, superseded = (
        Answered("a/b", digest, "embed", "bytes", "peer", "peer 1", {"plain": verdict})
        for digest, verdict in (
            ("new", Verdict("equal", 0.0)),
            ("new", Verdict("refused", None, "a | b")),
            ("old", Verdict("equal", 0.0)),
        )
    )
    mixed = {"long": Verdict("different", 0.5, LENGTH), "odd": Verdict("no original")}
    other = Answered("a/c", "new", "embed", "bytes", "peer", "peer 1", mixed)
    table, page = tmp_path / "fidelity.csv", tmp_path / "fidelity.md"
    append_rows(table, run, [each.row(KINDS) for each in (first, last, superseded, other)])
    page.write_text(
        "before\n<!-- board -->old<!-- end of board -->\n"
        "<!-- checkpoints --><!-- end of checkpoints -->\nafter\n"
    )

    rows = read_board(table, {"a/b": "new", "a/c": "new"})
    write_page(page, rows)

    assert [row["result"] for row in rows] == ["refused", "different"]
    assert "| peer | peer 1 | 2 | 0 | 1 | 1 |" in page.read_text()
    assert f"| {LENGTH} | 1 | a/c |" in page.read_text()
    assert "| a/c | embed | **different** |" in checkpoints_of(rows)
    assert "old" not in page.read_text()
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")
    assert picture_of(rows) == (tmp_path / "fidelity.svg").read_text()
    assert any("`a / b`" in each for each in tables_of(rows))


def test_a_line_of_a_checkpoint_names_the_inputs_that_differ():
    base = {"checkpoint": "a", "task": "embed", "engine": "peer"}
    rows = [
        {**base, "inputs": kind, "result": result}
        for kind, result in (("plain", "equal"), ("long", "different"), ("prompt", "refused"))
    ]

    assert "**different**: long; refused: prompt" in checkpoints_of(rows)


def test_a_difference_has_the_reason_that_the_original_reproduces(tmp_path):
    entry = ENTRIES["Snowflake/snowflake-arctic-embed-xs"]
    folder = tmp_path / "checkpoint"
    write_entry(entry, folder)
    requests = inputs_of(entry)
    unprompted = answers("original", entry, folder)["plain"]
    shorter = start({"engine": "original", "memory_gib": None})(
        {"folder": str(folder), "task": "embed", "requests": {"long": {"inputs": ["the cat"]}}}
    )["answers"]["long"]
    long_texts = {"inputs": ["the cat of"]}

    found = explain(
        folder,
        entry.task,
        {**requests, "long": long_texts},
        {"prompt": unprompted, "long": shorter, "plain": {"rows": [[1.0] * 64] * 4}},
    )

    assert found == {"prompt": PROMPT, "long": LENGTH, "plain": NO_REASON}


def test_a_page_without_marks_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no marks")

    with pytest.raises(ValueError, match="has no lines"):
        write_page(page, [])


def test_a_worker_says_why_an_engine_cannot_open_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    answer = start({"engine": "varlen", "memory_gib": None})

    assert "nothing" in answer({"folder": str(tmp_path), "task": "embed", "requests": {}})["error"]
