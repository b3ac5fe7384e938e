"""What the host pays for a whole forward pass on a GPU: `python -m varlen_tools.forward_cost`. Needs no GPU.

Two ways to run the same batch are measured, each with all that a GPU or torch would do left out: op by op, where
Python calls every launcher, with a stand-in for the driver; and as one graph, as it is served, where Python
fills the inputs and hands out the answers. The rest of a host's time, in the driver and in torch's own
dispatch of its matrix products, only `make bench-kernels` can see.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import torch
import triton
import typer
from torch import Tensor

from varlen.config import EngineConfig
from varlen.memory.arena import Arena, alignment_of
from varlen.memory.layout import Layout
from varlen.models.batch import fill_inputs, input_bytes, input_views
from varlen.models.checkpoint import Checkpoint
from varlen.models.cuda import CudaExecutor, Replay
from varlen.models.program import Batch, Program
from varlen.models.runner import Runner
from varlen.request import Sequence
from varlen_kernels import fused
from varlen_tools import bench_report
from varlen_tools.bench_kernels.encoder_peers import save_random_checkpoint
from varlen_tools.bench_kernels.grid import FULL, EncoderShape
from varlen_tools.bench_report import Cell
from varlen_tools.dry_run import dry_run

_CPU = torch.device("cpu")
_LENGTHS = (20,)
_MAX_TOKENS = 64
_ARCH = 90


class WithoutProducts:
    """The fused kernels, whose matrix products do nothing."""

    def __getattr__(self, name: str) -> object:
        return getattr(fused, name)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor, *, out: Tensor) -> Tensor:  # noqa: ARG002
        """Return `out` as it is."""
        return out


class EmptyGraphs:
    """Graphs that hold nothing, so that running one costs nothing."""

    def stream(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def capture(self, work: Callable[[], object]) -> Replay:  # noqa: ARG002
        """Return a function that does nothing."""
        return lambda: None


def _arena(program: Program) -> Arena:
    return Arena(Layout(program.buffers, alignment_of(_CPU)), _MAX_TOKENS, _CPU)


def random_sequences(lengths: tuple[int, ...]) -> list[Sequence]:
    """Return sequences of random ids."""
    numbers = np.random.default_rng(0)
    return [Sequence(numbers.integers(0, 1000, n, dtype=np.int32)) for n in lengths]


def op_by_op(program: Program, sequences: list[Sequence]) -> Callable[[], object]:
    """Return a call that launches every op of a batch whose inputs are there."""
    tokens, count = sum(s.num_tokens for s in sequences), len(sequences)
    buffer = torch.empty(input_bytes(tokens, count), dtype=torch.uint8)
    inputs = input_views(buffer, tokens, count)
    fill_inputs(inputs, sequences, [True] * count)
    batch, kernels = Batch(inputs, tokens, count), WithoutProducts()
    region = _arena(program).carve_whole(tokens, count)
    return lambda: program.run(batch, kernels, region)


def as_one_graph(program: Program, sequences: list[Sequence]) -> Callable[[], object]:
    """Return a call that serves a batch, from ids on the host to answers on the host."""
    executor = CudaExecutor(program, fused, _arena(program), EmptyGraphs())
    normalize = [True] * len(sequences)
    return lambda: executor.run(sequences, normalize)


def microseconds(call: Callable[[], object], calls: int) -> list[float]:
    """Return the time of each call, after some that do not count."""
    times = []
    for _ in range(calls + 10):
        began = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - began) / 1000)
    return times[10:]


def load(shape: EncoderShape, folder: Path) -> Program:
    """Return the forward pass of a random encoder of this shape."""
    save_random_checkpoint(shape, folder, _MAX_TOKENS)
    config = EngineConfig(device="cpu", dtype="bf16")
    runner = Runner(Checkpoint.open(folder), config)
    runner.close()
    return runner.program


def row(shape: EncoderShape, way: str, ops: int, spent: list[float]) -> dict[str, Cell]:
    """Return one line of the table and the CSV."""
    low, high = np.percentile(spent, [20, 80])
    return {
        "encoder": shape.name,
        "tokens": sum(_LENGTHS),
        "way": way,
        "ops": ops,
        "calls": len(spent),
        "us": statistics.median(spent),
        "us_p20": float(low),
        "us_p80": float(high),
    }


@torch.inference_mode()
def measure(calls: int) -> Iterator[dict[str, Cell]]:
    """Yield a row for each encoder and way."""
    sequences = random_sequences(_LENGTHS)
    for shape in FULL.encoders:
        with TemporaryDirectory() as folder:
            program = load(shape, Path(folder))
        with dry_run(_ARCH):
            launched = microseconds(op_by_op(program, sequences), calls)
        yield row(shape, "op by op", len(program.ops), launched)
        served = microseconds(as_one_graph(program, sequences), calls)
        yield row(shape, "as one graph", len(program.ops), served)


def main(
    calls: Annotated[int, typer.Option(min=1, help="Of each way.")] = 500,
    output: Annotated[Path, typer.Option()] = Path("docs/benchmarks/host.csv"),
) -> None:
    """Print the host's microseconds for a forward pass of one short sequence, and append them to a CSV."""
    run = bench_report.provenance(
        threads=torch.get_num_threads(),
        packages=("torch", "varlen"),
        command=f"python -m varlen_tools.forward_cost --calls {calls}",
        root=Path.cwd(),
    )
    rows = [{"triton": triton.__version__, **entry} for entry in measure(calls)]
    bench_report.append_rows(output, run, rows)
    for entry in rows:
        print("{encoder:10} {way:14} {us:8.0f} us ({us_p20:.0f}-{us_p80:.0f})".format(**entry))


if __name__ == "__main__":
    typer.run(main)
