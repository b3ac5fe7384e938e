"""Load generators: commands beside the Python that runs them. genai-perf calls perf_analyzer, from the PATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .table import MAX_TOKENS, REQUESTS, Addresses, call

_TIMEOUT_SECONDS = 280
_BIN = Path(sys.executable).parent


@call("genai-perf", "requests")
def genai_perf_embeddings(at: Addresses) -> Any:
    return _genai_perf(at, "minilm", "--endpoint-type", "embeddings", "-u", _host(at, "minilm"))


@call("genai-perf", "requests")
def genai_perf_completions(at: Addresses) -> Any:
    options = ("--endpoint-type", "completions", "--streaming", "-u", _host(at, "gpt2"))
    return _genai_perf(at, "gpt2", *options, "--output-tokens-mean", str(MAX_TOKENS))


@call("genai-perf", "requests")
def genai_perf_kserve(at: Addresses) -> Any:
    options = ("--endpoint-type", "kserve", "--backend", "vllm", "--streaming", "-u", at.grpc)
    return _genai_perf(at, "gpt2", *options, "--output-tokens-mean", str(MAX_TOKENS))


def _genai_perf(at: Addresses, model: str, *options: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = ["genai-perf", "profile", "-m", model, *options]
        command += ["--tokenizer", at.folders[model], "--synthetic-input-tokens-mean", "20"]
        _run([*command, "--request-count", str(REQUESTS)], folder)
        (profile,) = Path(folder).rglob("*_genai_perf.json")
        return float(json.loads(profile.read_text())["request_count"]["avg"])


@call("aiperf", "requests")
def aiperf_embeddings(at: Addresses) -> Any:
    return _aiperf(at, "minilm", "--endpoint-type", "embeddings")


@call("aiperf", "requests")
def aiperf_completions(at: Addresses) -> Any:
    options = ("--endpoint-type", "completions", "--streaming")
    return _aiperf(at, "gpt2", *options, "--output-tokens-mean", str(MAX_TOKENS))


def _aiperf(at: Addresses, model: str, *options: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = ["aiperf", "profile", "-m", model, *options, "--url", at.gateway[model]]
        command += ["--tokenizer", at.folders[model], "--synthetic-input-tokens-mean", "20"]
        _run([*command, "--request-count", str(REQUESTS), "--ui", "none"], folder)
        (profile,) = Path(folder).rglob("profile_export_aiperf.json")
        found = json.loads(profile.read_text())
        assert not found.get("error_request_count"), found
        return float(found["request_count"]["avg"])


def _host(at: Addresses, model: str) -> str:
    return at.gateway[model].removeprefix("http://")


def _run(command: list[str], folder: str) -> None:
    """Run a command of this Python's environment in a folder.

    Raises:
        RuntimeError: it fails, or takes too long.
    """
    environment = {**os.environ, "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}"}
    run = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {run.returncode}\n{run.stdout}{run.stderr}"
        )
