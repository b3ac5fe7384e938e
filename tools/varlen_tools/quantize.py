"""The command `varlen quantize`: calibrates a checkpoint for `dtype: int8`.

Writes int8.safetensors into the checkpoint's folder and prints the quality. A model that is loaded without this file is
calibrated then, on built-in texts; the file saves that time, and may come from texts of your own.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from varlen.errors import ConfigError, VarlenError
from varlen.execution.device import check_task_dtype
from varlen.execution.int8.calibration import BITS, Calibration
from varlen.execution.int8.calibration_texts import TEXTS
from varlen.execution.int8.int8_model import (
    LEAST_TEXTS,
    MAX_LAYER_ERROR,
    CalibratedModel,
    calibrate,
    check_int8,
)
from varlen.execution.int8.layer_inputs import (
    CalibratedDecoder,
    CalibratedEncoder,
    calibration_kv,
)
from varlen.execution.programs import record_steps
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder, load_encoder
from varlen.program.program import Program
from varlen.tasks import TASKS, Task
from varlen_client.cli.progress import show_stage, show_stages
from varlen_tools.model_source import SourceArgument, find_source
from varlen_tools.tables import Table


def main(
    source: SourceArgument,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 file with one text per line, such as the model will see."
            " Every second one measures the quality. Default: built-in English texts."
        ),
    ] = None,
    dtype: Annotated[
        Literal["int8", "int4"], typer.Option(help="Dtype of the model's weights.")
    ] = "int8",
) -> None:
    """Calibrate a model for int8 or int4; measure the quality.

    Both are stored with the checkpoint.
    """
    try:
        bits = BITS[dtype]
        check_int8(bits)
        lines = TEXTS if texts is None else read_texts(texts)
        model = find_source(source, {})
        checkpoint = model.open_checkpoint()
        task = model.config.task or checkpoint.task
        check_task_dtype(dtype, task)
        with show_stage("loading"):
            loaded = _load(checkpoint, task)
        with show_stages() as on_progress:
            calibration = calibrate(loaded, lines, bits, on_progress)
        path = calibration.save(checkpoint.folder)
    except (VarlenError, OSError) as error:
        typer.secho(f"quantize: {error}", err=True, fg="red")
        raise typer.Exit(2) from None
    Console().print(_table(calibration))
    typer.echo(f"{path} is written; a model with dtype {dtype} reads it")


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file, one per line; empty lines are skipped.

    Raises:
        ConfigError: there are too few, or the file is not UTF-8.
        OSError: the file cannot be read.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None
    texts = [line for line in lines if line]
    if len(texts) < LEAST_TEXTS:
        raise ConfigError(f"{path} has {len(texts)} texts; at least {LEAST_TEXTS} are needed")
    return texts


def _load(checkpoint: Checkpoint, task: Task) -> CalibratedModel[Any]:
    cpu = torch.device("cpu")
    if not TASKS[task].is_iterative:
        checkpoint.check_task("embed")
        return CalibratedEncoder(lambda dtype: load_encoder(checkpoint, dtype, cpu), checkpoint)
    checkpoint.check_task(task)

    def record(dtype: torch.dtype) -> tuple[Program, ...]:
        return record_steps(load_decoder(checkpoint, dtype, cpu), calibration_kv(dtype))

    return CalibratedDecoder(record, checkpoint)


def _table(calibration: Calibration) -> Table:
    errors = [layer.error for layer in calibration.layers]
    kept = [
        index for index, error in enumerate(errors) if error > MAX_LAYER_ERROR[calibration.bits]
    ]
    rows = {
        **calibration.quality.rows,
        "activations": f"0 to {calibration.levels}",
        f"linear layers in int{calibration.bits}": f"{len(errors) - len(kept)} of {len(errors)}",
        "layers kept in fp32": ", ".join(map(str, kept)) or "none",
        "largest error of a layer": f"{max(errors, default=0):.4f}",
    }
    return Table("", (f"int{calibration.bits}", ""), [*rows.items()])


if __name__ == "__main__":
    typer.run(main)
