"""The demo ends well only when both protocols answered, and answered alike."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from varlen_client import VarlenClientError
from varlen_tools import demo
from varlen_tools.demo import DATES, PROMPT, SENTENCES
from varlen_tools.local_server import ServerError

pytestmark = pytest.mark.full

PROJECT = Path(__file__).resolve().parents[2]

VECTORS = np.eye(len(SENTENCES), 8, dtype=np.float32)
SERVER = SimpleNamespace(grpc_url="grpc", http_url="http", log_tail=lambda: "the log")


def test_answers_that_agree_pass(monkeypatch, capsys):
    monkeypatch.setattr(demo, "embed", lambda protocol, url, model: VECTORS)

    demo.compare(SERVER, "minilm")

    assert "both protocols agree (largest cosine distance: 0e+00)" in capsys.readouterr().out


@pytest.mark.parametrize("other", [VECTORS[::-1], VECTORS * np.nan], ids=["different", "NaN"])
def test_answers_that_differ_do_not_pass(monkeypatch, other):
    monkeypatch.setattr(
        demo, "embed", lambda protocol, url, model: {"grpc": VECTORS}.get(url, other)
    )

    with pytest.raises(ServerError, match="gRPC and HTTP differ by"):
        demo.compare(SERVER, "minilm")


class FakeClient:
    """Streams three parts and translates a text to its length, or fails early."""

    fails = False

    def __init__(self, url, model):
        assert (url, model) in (("grpc", "tiny_gpt2"), ("grpc", "tiny_dates"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def check(self):
        if self.fails:
            raise VarlenClientError("no answer")

    def stream(self, prompt, *, max_tokens, temperature, seed):
        yield SimpleNamespace(text=" of a", token_ids=(5, 6))
        self.check()
        yield SimpleNamespace(text="", token_ids=(7,))
        yield SimpleNamespace(text=" list.", token_ids=(8, 9))

    def translate(self, texts):
        self.check()
        return [SimpleNamespace(text=str(len(text))) for text in texts]


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(demo, "Client", FakeClient)


def test_a_text_is_printed_as_it_comes_with_its_times(client, capsys):
    demo.stream(SERVER, "tiny_gpt2")

    text, times = capsys.readouterr().out.splitlines()
    assert text == f"tiny_gpt2: {PROMPT} of a list."
    assert times.startswith("streamed 5 tokens in ")


def test_dates_are_printed_with_their_answers(client, capsys):
    demo.translate(SERVER, "tiny_dates")

    *lines, times = capsys.readouterr().out.splitlines()
    assert lines == [f"tiny_dates: {date} -> {len(date)}" for date in DATES]
    assert times.startswith(f"rewrote {len(DATES)} dates in ")


@pytest.mark.parametrize(
    "part, model",
    [(demo.compare, "minilm"), (demo.stream, "tiny_gpt2"), (demo.translate, "tiny_dates")],
    ids=["embed", "stream", "translate"],
)
def test_a_request_that_fails_is_shown_with_the_log(client, monkeypatch, part, model):
    monkeypatch.setattr(FakeClient, "fails", True)
    monkeypatch.setattr(demo, "embed", Mock(side_effect=VarlenClientError("no answer")))

    with pytest.raises(ServerError, match="no answer\nthe log"):
        part(SERVER, model)


@pytest.mark.server
def test_the_whole_demo_prints_a_table_and_stops_its_server(tmp_path):
    for name in ("minilm", "tiny_gpt2", "tiny_dates"):
        shipped = PROJECT / "model_repository" / name
        (tmp_path / name).mkdir()
        (tmp_path / name / "1").symlink_to(shipped / "1")
        config = (shipped / "config.pbtxt").read_text()
        # costs are not measured
        config = re.sub(r'("warmup_seconds" value: \{ string_value: )"\d+"', r'\1"0"', config)
        (tmp_path / name / "config.pbtxt").write_text(config)

    run = run_demo("--repository", str(tmp_path))

    assert run.returncode == 0, run.stdout + run.stderr
    for words in (
        "cosine similarity",
        *SENTENCES[:2],
        "gRPC: 6 vectors",
        "HTTP: 6 vectors",
        PROMPT,
        "streamed ",
        "tiny_dates: 03/14/99 -> 1999-03-14",
    ):
        assert words in run.stdout
    assert run.stdout.endswith("tritonserver has stopped\n")


def test_without_a_checkpoint_it_says_what_to_run(tmp_path):
    run = run_demo("--repository", str(tmp_path))

    assert run.returncode == 1
    assert "minilm has no checkpoint; run `make setup`" in run.stdout


@pytest.mark.server
def test_a_server_that_does_not_start_ends_it_with_the_servers_words(tmp_path):
    for name in ("minilm", "tiny_gpt2", "tiny_dates"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1/config.json").write_text("{}")
        (tmp_path / name / "config.pbtxt").write_text('backend: "no-such-backend"\n')

    run = run_demo("--repository", str(tmp_path))

    assert run.returncode == 1
    assert "minilm cannot be loaded: " in run.stdout
    assert "no-such-backend" in run.stdout


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "varlen_tools.demo", *arguments]
    # wide enough that the table folds no sentence
    wide = {**os.environ, "COLUMNS": "160"}
    return subprocess.run(
        command, cwd=PROJECT, env=wide, capture_output=True, text=True, check=False
    )
