"""The commands of row tasks: what they print, write and send."""

import asyncio
import json

import numpy as np
import pytest

from tests.client.fake_model import Fault
from varlen_client import ServerUnavailable
from varlen_client.cli import requests
from varlen_client.transport.session import Session


@pytest.fixture
def lines(varlen):
    """Return a function that runs a command which succeeds, and returns what it prints."""

    def lines(*arguments):
        result = varlen(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    return lines


@pytest.mark.parametrize(
    "task, arguments, expected",
    [
        (
            "classify",
            ("abc", "d"),
            ["abc  über 0 0.0030, über 1 0.0000", "d  über 0 0.0010, über 1 0.0000"],
        ),
        (
            "fill_mask",
            ("_b_", "_"),
            ["_b_  é3 0.3333, é4 0.2500"] * 2 + ["_  é1 1.0000, é2 0.5000"],
        ),
        (
            "token_classify",
            ("in ZÜRICH", "a"),
            ["in ZÜRICH  in O 0.2500, ZÜRICH Ö 0.7500", "a  a O 0.2500"],
        ),
        (
            "sparse_embed",
            ("ab", "012345678"),
            [
                "ab  2 terms  [b 2.0000, a 1.0000]",
                "012345678  9 terms  [8 9.0000, 7 8.0000, 6 7.0000, 5 6.0000, 4 5.0000, 3 4.0000,"
                " 2 3.0000, 1 2.0000, …]",
            ],
        ),
    ],
)
def test_a_command_prints_an_answer_after_each_text(lines, server, task, arguments, expected):
    server.model.task = task

    assert lines(task.replace("_", "-"), *arguments) == expected


@pytest.mark.parametrize(
    "task, arguments, expected",
    [
        (
            "classify",
            ("abc", "--top-k", 1, "--activation", "none"),
            {"labels": [{"label": "über 0", "score": pytest.approx(0.003)}]},
        ),
        (
            "sparse_embed",
            ("aé",),
            {"indices": [233, 97], "values": [2.0, 1.0], "terms": ["é", "a"]},
        ),
        (
            "fill_mask",
            ("_", "--top-k", 1),
            {"masks": [[{"token_id": 1, "text": "é1", "score": 1.0}]]},
        ),
        ("token_classify", ("A",), {"tokens": [{"token": "A", "label": "Ö", "score": 0.75}]}),
    ],
)
def test_a_command_prints_json_on_request(lines, server, task, arguments, expected):
    server.model.task = task

    [line] = lines(task.replace("_", "-"), "--json", *arguments)

    assert json.loads(line) == {"text": arguments[0], **expected}


@pytest.mark.parametrize(
    "task, arguments, expected",
    [
        (
            "embed",
            "--dimensions 2 --truncate --truncation-side left --prompt-name query",
            {"dimensions": 2, "truncate": True, "truncation_side": "left", "prompt_name": "query"},
        ),
        ("sparse_embed", "--max-active-dims 9", {"max_active_dims": 9}),
        (
            "token_embed",
            "--prompt-name query --no-normalize",
            {"prompt_name": "query", "normalize": False},
        ),
    ],
)
def test_a_command_sends_its_options(lines, server, task, arguments, expected):
    server.model.task = task

    lines(task.replace("_", "-"), "a", *arguments.split())

    assert server.model.requests[0].parameters == expected


def test_rerank_prints_the_most_relevant_first(lines, server, tmp_path):
    server.model.task = "rerank"
    file = tmp_path / "documents.txt"
    file.write_text("a\nabc\nab\n")

    printed = lines("rerank", "q", "--file", file)

    assert [line.split() for line in printed] == [
        ["0.1030", "2", "abc"],
        ["0.1020", "3", "ab"],
        ["0.1010", "1", "a"],
    ]
    [line] = lines("rerank", "q", "a", "abc", "--top-k", 1, "--json")
    assert json.loads(line) == {"number": 2, "score": pytest.approx(0.103), "document": "abc"}


def test_documents_of_equal_scores_are_in_the_order_of_their_logits(lines, server):
    server.model.task, server.model.scores_of = "rerank", np.ones_like

    printed = lines("rerank", "q", "a", "abc", "ab")

    assert [line.split()[1:] for line in printed] == [["2", "abc"], ["3", "ab"], ["1", "a"]]


def test_a_question_is_asked_of_every_context(lines, server):
    server.model.task = "question_answer"
    given = ("--max-answer-len", 5, "--handle-impossible-answer")

    printed = lines("question-answer", "who?", "Zoë", "b", *given)
    [line] = lines("question-answer", "who?", "Zoë", "--top-k", 3, "--json")

    assert printed == [
        "Zoë  0-1  0.1250  Z",
        "Zoë  0-0  0.0000  (no answer)",
        "b  0-1  0.1250  b",
        "b  0-0  0.0000  (no answer)",
    ]
    first, second = server.model.requests
    assert first.texts == ["who?", "who?"]
    assert first.parameters == {"max_answer_len": 5, "handle_impossible_answer": True}
    assert second.parameters == {"top_k": 3}
    found = json.loads(line)
    assert found["text"] == "Zoë"
    assert found["answers"][0] == {"score": 0.25, "start": 0, "end": 2, "answer": "Zo"}


def test_a_small_score_is_not_shown_as_zero(lines, server):
    server.model.task, server.model.scores_of = "rerank", lambda logits: logits * 1e-11

    [line] = lines("rerank", "q", "a")

    assert line.split()[0] == "1.0e-09"


@pytest.mark.parametrize("command", [("classify",), ("rerank", "q")], ids=["classify", "rerank"])
def test_an_empty_line_is_named(varlen, tmp_path, command):
    file = tmp_path / "lines.txt"
    file.write_text("a\n\nb\n")

    result = varlen(*command, "--file", file)

    assert result.exit_code == 2
    assert "line 2: empty" in result.output


@pytest.mark.parametrize(
    "task, name, rows",
    [("token_embed", "vectors", "vectors"), ("hidden", "hidden", "tokens")],
)
def test_arrays_of_tokens_are_printed_or_written(lines, server, client, tmp_path, task, name, rows):
    server.model.task = task
    command = task.replace("_", "-")
    expected = getattr(client, task)(["a b", "c"])

    printed = lines(command, "a b", "c")
    objects = [json.loads(line) for line in lines(command, "--json", "a b", "c")]
    lines(command, "a b", "c", "--output", tmp_path / "arrays.npz")

    assert printed == [f"a b  2 {rows} of 3 values", f"c  1 {rows} of 3 values"]
    assert [each["text"] for each in objects] == ["a b", "c"]
    with np.load(tmp_path / "arrays.npz") as file:
        written = dict(file)
    assert list(written) == ["0", "1"]
    for number, array in enumerate(expected):
        np.testing.assert_array_equal(np.float32(objects[number][name]), array)
        np.testing.assert_array_equal(written[str(number)], array)


def test_logits_of_tokens_are_written(lines, server, client, tmp_path):
    server.model.task = "token_classify"

    lines("token-classify", "a b", "--output", tmp_path / "logits.npz")

    with np.load(tmp_path / "logits.npz") as file:
        np.testing.assert_array_equal(file["0"], client.token_classify(["a b"])[0])


@pytest.mark.parametrize(
    "task, command, message",
    [
        (
            "embed",
            ("classify", "a"),
            "fake embeds texts; it has no labels of texts: ask it with `varlen embed`, or serve a classifier",
        ),
        (
            "embed",
            ("rerank", "a", "b"),
            "it has no scores of documents: ask it with `varlen embed`",
        ),
        ("embed", ("generate", "a"), "or serve a model that generates"),
        ("embed", ("translate", "a"), "or serve a translation model"),
        ("embed", ("token-embed", "a"), "it has no vectors of tokens"),
        ("generate", ("embed", "a"), "fake generates text; it has no vectors of texts: ask"),
        ("generate", ("fill-mask", "a"), "ask it with `varlen generate`, or serve a masked"),
        ("classify", ("rerank", "a", "b"), "fake labels texts; it has no scores of documents"),
        ("classify", ("similarity", "a", "b"), "it has no vectors of texts"),
        ("classify", ("token-classify", "a"), "ask it with `varlen classify`, or serve a token"),
        ("token_classify", ("classify", "a"), "fake labels tokens; it has no labels of texts"),
        ("hidden", ("sparse-embed", "a"), "fake gives hidden states; it has no sparse vectors"),
        ("embed", ("question-answer", "a", "b"), "it has no answers to questions: ask it with"),
        (
            "sparse_embed",
            ("embed", "a"),
            "ask it with `varlen sparse-embed`, or serve an embedding",
        ),
    ],
)
@pytest.mark.parametrize("shows_task", [True, False], ids=["task", "outputs"])
def test_a_model_of_another_task_is_told_with_its_own_command(
    varlen, server, task, command, message, shows_task
):
    server.model.task, server.model.shows_task = task, shows_task

    result = varlen(*command)

    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("error: fake ")
    assert message in line


def test_a_model_of_the_right_task_keeps_the_words_of_its_server(varlen, server):
    server.model.faults = [Fault("invalid", "row 0 is too long")]
    assert "row 0 is too long" in varlen("embed", "a").stderr


@pytest.mark.parametrize("options", [(), ("--timeout", "5")], ids=["no timeout", "timeout"])
@pytest.mark.parametrize("failure", ["fails", "hangs"])
def test_the_error_of_a_request_is_told_if_the_model_is_not_known_afterwards(
    varlen, server, monkeypatch, options, failure
):
    ask, asked = Session.model_info, []

    async def model_info(self, deadline):
        asked.append(deadline)
        if len(asked) == 1:
            return await ask(self, deadline)
        if failure == "fails":
            raise ServerUnavailable("the connection is lost")
        return await asyncio.Event().wait()

    monkeypatch.setattr(Session, "model_info", model_info)
    monkeypatch.setattr(requests, "_EXPLANATION_SECONDS", 0.1)
    server.model.faults = [Fault("invalid", "row 0 is too long")]

    result = varlen("embed", "a", *options)

    assert (result.exit_code, len(asked)) == (1, 2)
    [line] = result.stderr.splitlines()
    assert "row 0 is too long" in line
