"""How the commands on a GPU start, and how they write rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import typer

from varlen_bench.harness.command import Run
from varlen_bench.harness.rows import Cell
from varlen_bench.kernels.machine import Machine


def finds_gpu(command: str, hint: str = "") -> bool:
    """Return whether there is a GPU; print that the command is skipped if not."""
    if torch.cuda.is_available():
        return True
    print(f"{command}: skipped, torch finds no CUDA GPU{hint}")
    return False


class GpuRun(Run):
    """A run whose rows and BENCH line name the GPU."""

    def __init__(
        self,
        context: typer.Context,
        module: str,
        machine: Machine,
        *,
        output: Path | None,
        revision: str,
        packages: Sequence[str] = ("torch", "triton", "transformers", "varlen"),
    ) -> None:
        """Start a run of `varlen_bench.` + `module` on a GPU."""
        threads = torch.get_num_threads()
        name = f"varlen_bench.{module}"
        super().__init__(
            context, name, threads=threads, packages=packages, output=output, revision=revision
        )
        self._columns = {"gpu": machine.gpu, "driver": machine.driver}

    def append(self, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Append rows to the CSV, each after the columns of the GPU."""
        super().append([{**self._columns, **row} for row in rows])

    def finish(self, name: str, figures: Mapping[str, Cell]) -> None:
        """Print where rows are, and the BENCH line with the name of the GPU."""
        super().finish(name, {"gpu": self._columns["gpu"].replace(" ", "_"), **figures})
