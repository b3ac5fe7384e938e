"""Every op once per dtype against float64: `python -m varlen_bench.gpu_report.smoke`."""

import time
from collections.abc import Iterator
from typing import Annotated

import torch
import typer

from varlen_bench.harness.command import Output, Revision, select
from varlen_bench.harness.rows import Cell
from varlen_bench.kernels.grid import DTYPES
from varlen_bench.kernels.machine import GpuRun, fake_machine, finds_gpu, gpu_machine
from varlen_bench.kernels.measure import failed_note
from varlen_bench.ops.call import OpCall
from varlen_bench.ops.table import TABLE, op_call

# Lengths of one token, inside a tile, exactly a tile, and longer.
_LENGTHS = [5, 1, 64, 90]


def smoke_calls(dtype: torch.dtype) -> list[OpCall]:
    """Return a call of every op with a kernel, at the widths of BERT-base."""
    with_tiles = op_call("attention_varlen", dtype, "tiles", lengths=_LENGTHS, slots=8)
    return [*(op_call(op, dtype, lengths=_LENGTHS) for op in TABLE), with_tiles]


@torch.inference_mode()
def check(call: OpCall, device: torch.device, ops: object) -> dict[str, Cell]:
    """Return the row of a call; `note` is "ok" if its result is right."""
    began, error, note = time.perf_counter(), None, "ok"
    try:
        error = call.error_of(ops, device, seed=1)
        if not error <= call.max_error:
            note = "wrong"
    except Exception as failure:  # other ops may be right
        note = failed_note(failure)
    return {
        "op": call.op,
        "shape": call.shape,
        "dtype": call.dtype_name,
        "error": error,
        "allowed": call.max_error,
        "seconds": round(time.perf_counter() - began, 3),
        "note": note,
    }


def check_all(dtypes: list[str], device: torch.device, ops: object) -> Iterator[dict[str, Cell]]:
    """Yield the row of every op for each dtype."""
    for dtype in dtypes:
        for call in smoke_calls(DTYPES[dtype]):
            yield check(call, device, ops)


def main(
    context: typer.Context,
    dtypes: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = "",
    revision: Revision = "",
    output: Output = None,
) -> None:
    """Compare every op with float64; fail if one is wrong."""
    if not finds_gpu("smoke"):
        return
    machine = gpu_machine(samples=1) if torch.cuda.is_available() else fake_machine()
    run = GpuRun(context, "gpu_report.smoke", machine, output=output, revision=revision)
    notes = []
    for row in check_all(select(dtypes, DTYPES), machine.device, machine.kernels):
        notes.append(row["note"])
        run.show(f"{row['op']} {row['dtype']}: error {row['error']}, {row['note']}")
        run.append([row])
    wrong = len(notes) - notes.count("ok")
    run.finish("smoke", {"calls": len(notes), "wrong": wrong})
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
