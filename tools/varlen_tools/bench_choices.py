"""What two choices of the CPU path are worth on this machine: `python -m varlen_tools.bench_choices`.

linear  GFLOP/s of one fp32 linear layer by the layout of its weight: torch's [out, in], oneDNN's
        packed ahead (private to torch), and [in, out], the one that is used
lanes   tokens/s with a batch shared out over cores by whole sequences, over the same with all cores
        on the whole batch; alone, and beside one process that keeps a core busy

Variants take turns in every round, and the ratio is the median of the rounds' own. Every case that
is measured is a row of docs/benchmarks/choices.csv, those that speak against the choice too.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
import typer

from varlen.config import EngineConfig
from varlen.models.checkpoint import Checkpoint
from varlen.models.runner import Runner
from varlen.request import Sequence
from varlen_kernels import reference
from varlen_tools import bench_report
from varlen_tools.bench_report import Cell
from varlen_tools.profile_ops import random_batches

_LAYERS = ((384, 1152), (384, 384), (384, 1536), (1536, 384))
_TOKENS = (32, 512, 2048)
_LENGTHS = {"uniform 5-500": (5, 500, 32), "uniform 4-20": (4, 20, 500)}
_BATCH_TOKENS = (1024, 2048, 4096)


def compare(variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each variant in each round, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, run in variants.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return {name: values[1:] for name, values in seconds.items()}


def row(
    probe: str, case: str, variant: str, rates: list[float], baseline: list[float]
) -> dict[str, Cell]:
    """Return one row: the median rate with its spread, and the ratio to the baseline by rounds."""
    ratio = statistics.median(a / b for a, b in zip(rates, baseline, strict=True))
    return {
        "probe": probe,
        "case": case,
        "variant": variant,
        "rounds": len(rates),
        "rate": statistics.median(rates),
        "rate_p20": float(np.percentile(rates, 20)),
        "rate_p80": float(np.percentile(rates, 80)),
        "ratio": ratio,
    }


def probe_linear(rounds: int) -> Iterator[dict[str, Cell]]:
    """Yield a row for each layer, number of tokens and layout; rates in GFLOP/s."""
    for tokens in _TOKENS:
        for fan_in, fan_out in _LAYERS:
            x, bias = torch.randn(tokens, fan_in), torch.randn(fan_out)
            weight = torch.randn(fan_out, fan_in)
            turned = weight.t().contiguous()
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, tokens)
            prepacked = torch.ops.mkldnn._linear_pointwise
            variants: dict[str, Callable[[], object]] = {
                "out_in": partial(F.linear, x, weight, bias),
                "onednn_packed": partial(prepacked, x, packed, bias, "none", [], ""),
                "in_out": partial(reference.linear, x, turned, bias),
            }
            work = 2 * tokens * fan_in * fan_out / 1e9
            rates = {
                name: [work / s for s in seconds]
                for name, seconds in compare(variants, rounds).items()
            }
            for name, values in rates.items():
                yield row("linear", f"{tokens}x{fan_in}x{fan_out}", name, values, rates["out_in"])


def probe_lanes(folder: Path, rounds: int, beside: str) -> Iterator[dict[str, Cell]]:
    """Yield a row for each workload, batch size and variant; rates in tokens/s."""
    checkpoint = Checkpoint.open(folder)
    config = EngineConfig(dtype="fp32", max_sequence_tokens=500)
    cores = torch.get_num_threads()
    lanes = Runner(checkpoint, config)
    # a runner made for one core has no lanes; then it gets all cores on the whole batch
    torch.set_num_threads(1)
    whole = Runner(checkpoint, config)
    torch.set_num_threads(cores)
    for name, (low, high, count) in _LENGTHS.items():
        lengths = np.random.default_rng(0).integers(low, high + 1, count).tolist()
        for size in _BATCH_TOKENS:
            batches = random_batches(lengths, size, lanes.vocab_size)
            variants = {
                "whole": partial(_run, whole, batches),
                "lanes": partial(_run, lanes, batches),
            }
            seconds = compare(variants, rounds)
            rates = {n: [sum(lengths) / s for s in values] for n, values in seconds.items()}
            for variant, values in rates.items():
                case = f"{name}, {size} a batch, {beside}"
                yield row("lanes", case, variant, values, rates["whole"])
    lanes.close()
    whole.close()


def _run(runner: Runner, batches: list[list[Sequence]]) -> None:
    for batch in batches:
        runner.run(batch, [True] * len(batch))


@contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy with a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main(
    folder: Annotated[Path, typer.Argument()] = Path("model_repository/minilm/1"),
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    output: Annotated[Path, typer.Option()] = Path("docs/benchmarks/choices.csv"),
) -> None:
    """Measure both choices, print the rows and append them to a CSV."""
    run = bench_report.provenance(
        threads=torch.get_num_threads(),
        packages=("torch", "varlen"),
        command=f"python -m varlen_tools.bench_choices --rounds {rounds}",
        root=Path.cwd(),
    )
    with torch.inference_mode():
        rows = list(probe_linear(4 * rounds))
    rows += probe_lanes(folder, rounds, "alone")
    with busy_core():
        rows += probe_lanes(folder, rounds, "beside a busy core")
    bench_report.append_rows(output, run, rows)
    for entry in rows:
        print(f"{entry['case']:48} {entry['variant']:14} {entry['rate']:8.0f} {entry['ratio']:.2f}")
    worst = {
        name: min(float(e["ratio"] or 0) for e in rows if e["variant"] == name)
        for name in ("in_out", "lanes")
    }
    print(bench_report.bench_line("choices", {f"worst_{n}": r for n, r in worst.items()}))


if __name__ == "__main__":
    typer.run(main)
