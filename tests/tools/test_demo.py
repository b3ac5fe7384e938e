"""The demo ends well only when both protocols answered, and answered alike."""

import re
import subprocess
import sys

import numpy as np
import pytest

from tests.closeness import relative_error
from varlen_tools.demo import SENTENCES, Answer, DemoError, check
from varlen_tools.setup_server import PROJECT


def vectors(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(len(SENTENCES), 8)).astype(np.float32)


def test_answers_that_agree_pass_whatever_their_length():
    worst = check([Answer("gRPC", vectors(), 0.1), Answer("HTTP", 3 * vectors(), 0.1)])

    assert 0 <= worst <= relative_error(2 * 8)


def test_answers_that_differ_do_not_pass():
    with pytest.raises(DemoError, match="gRPC and HTTP differ by"):
        check([Answer("gRPC", vectors(0), 0.1), Answer("HTTP", vectors(1), 0.1)])


@pytest.mark.parametrize("wrong", [vectors()[:2], vectors()[0], vectors() * np.nan])
def test_what_is_not_a_vector_a_sentence_does_not_pass(wrong):
    with pytest.raises(DemoError, match="HTTP returned"):
        check([Answer("gRPC", vectors(), 0.1), Answer("HTTP", wrong, 0.1)])


@pytest.mark.server
def test_the_whole_demo_prints_a_table_and_stops_its_server():
    run = run_demo()

    assert run.returncode == 0, run.stdout + run.stderr
    for words in ("cosine similarity", *SENTENCES[:2], "gRPC: 6 vectors", "HTTP: 6 vectors"):
        assert words in run.stdout
    assert run.stdout.endswith("tritonserver has stopped\n")


def test_without_a_checkpoint_it_says_what_to_run(tmp_path):
    run = run_demo("--repository", str(tmp_path))

    assert run.returncode == 1
    assert re.search("minilm has no checkpoint; run `make setup`", run.stdout)


@pytest.mark.server
def test_a_server_that_does_not_start_ends_it_with_the_servers_words(tmp_path):
    model = tmp_path / "minilm"
    (model / "1").mkdir(parents=True)
    (model / "1/config.json").write_text("{}")
    (model / "config.pbtxt").write_text('backend: "no-such-backend"\n')

    run = run_demo("--repository", str(tmp_path))

    assert run.returncode == 1
    assert "demo: the server ended with exit code 1" in run.stdout
    assert "no-such-backend" in run.stdout


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "varlen_tools.demo", *arguments]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
