"""Compare the compiled ops of CPUs with plain torch: `python -m varlen_bench.cpu_ops`.

Both run on one core, in turns. A time is the CPU time of the thread, so other work on the machine counts less; of the
rounds it is the 20th percentile. Results are compared first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import product
from typing import Annotated

import torch
import typer

from varlen_bench.harness.command import Output, Quick, Run, csv_path
from varlen_bench.harness.rows import Cell, csv_table
from varlen_bench.harness.summary import Spread, rounded, worst
from varlen_bench.ops.call import Inputs, OpCall
from varlen_bench.ops.table import op_call
from varlen_kernels import cpu, reference

LENGTHS = {
    "20 x 5": [5] * 20,
    "20 x 20": [20] * 20,
    "5 x 50": [50] * 5,
    "4 x 100": [100] * 4,
    "2 x 250": [250] * 2,
    "1 x 500": [500],
    "mixed short": [30, 25, 22, 18, 14, 11, 9, 7, 5, 5],
    "mixed long": [500, 430, 350, 280, 200, 130, 60, 20],
}
_HEAD_DIMS = (32, 64)
_ROWS = (1, 16, 128, 1024)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_COLUMNS = ("op", "case", "dtype", "reference_us", "compiled_us", "speedup")
# Seconds of one variant in one round, at least.
_ROUND_SECONDS = 5e-3


def cases() -> Iterator[OpCall]:
    """Yield every call that is compared."""
    for dtype in _DTYPES.values():
        for head_dim, (sizes, lengths) in product(_HEAD_DIMS, LENGTHS.items()):
            text = f"{sizes}, {{heads}} heads of {{head_dim}}"
            yield op_call("attention_varlen", dtype, shape=text, lengths=lengths, head_dim=head_dim)
        for rows in _ROWS:
            text = "{tokens} x {features}"
            yield op_call("activate", dtype, "", shape=text, tokens=rows, kind="gelu_tanh")


def compare(call: OpCall, rounds: int) -> dict[str, Cell]:
    """Return the row of a call.

    Raises:
        RuntimeError: the results differ.
    """
    inputs = call.make("cpu", seed=0)
    expected = call.run(reference, {**inputs, "out": torch.empty_like(inputs["out"])})
    actual = call.run(cpu, inputs)
    tolerance = 2e-2 if call.dtype == torch.bfloat16 else 1e-5
    if not torch.allclose(actual, expected, rtol=tolerance, atol=tolerance):
        raise RuntimeError(f"{call.name} differs from the reference")
    repeats = 1 + int(_ROUND_SECONDS / _seconds(call, reference, inputs, 1))
    torch_times, compiled_times = [], []
    for _ in range(rounds):
        torch_times.append(_seconds(call, reference, inputs, repeats))
        compiled_times.append(_seconds(call, cpu, inputs, repeats))
    torch_us, compiled_us = (1e6 * Spread.of(t).p20 for t in (torch_times, compiled_times))
    return {
        "op": " ".join([call.op, *([call.options["kind"]] if "kind" in call.options else [])]),
        "case": call.shape,
        "dtype": next(name for name, dtype in _DTYPES.items() if dtype == call.dtype),
        "reference_us": rounded(torch_us, 1),
        "compiled_us": rounded(compiled_us, 1),
        "speedup": rounded(torch_us / compiled_us, 2),
    }


def _seconds(call: OpCall, ops: object, inputs: Inputs, repeats: int) -> float:
    begin = time.thread_time()
    for _ in range(repeats):
        call.run(ops, inputs)
    return (time.thread_time() - begin) / repeats


def main(
    context: typer.Context,
    quick: Quick = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each case.")] = 25,
    output: Output = None,
) -> None:
    """Compare the compiled ops of CPUs with plain torch, on one core."""
    torch.set_num_threads(1)
    run = Run(
        context,
        "varlen_bench.cpu_ops",
        threads=1,
        packages=("torch", "numba"),
        output=csv_path("cpu_ops", output, is_trial=quick),
    )
    rows: list[dict[str, Cell]] = []
    with torch.inference_mode(), run.progress() as report:
        for call in cases():
            rows.append(compare(call, 1 if quick else rounds))
            report(f"{call.name}: {rows[-1]['speedup']}")
            run.append(rows[-1:])
    run.show(csv_table("Compiled ops of CPUs beside torch", _COLUMNS, rows))
    least = worst(
        min, (float(str(row["speedup"])) for row in rows if row["op"] == "attention_varlen")
    )
    run.finish("cpu_ops", {"attention_speedup_min": least})


if __name__ == "__main__":
    typer.run(main)
