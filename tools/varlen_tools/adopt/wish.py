"""Options of `varlen adopt`, and its error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

ExistingDType: TypeAlias = Literal["fp32", "fp16", "bf16", "int8", "int4"]


class AdoptError(Exception):
    """The model cannot be adopted; the message says why, and what to do."""


@dataclass(frozen=True)
class Wish:
    """What is adopted, and how."""

    repository: Annotated[
        Path, typer.Argument(help="Model repository with a model that tokenizes or takes tokens.")
    ]
    model: Annotated[
        str | None,
        typer.Option(help="Model that clients ask; default: the only ensemble, or only model."),
    ] = None
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint that the model was made of, a folder or a hub name; default: the one in the repository."
        ),
    ] = None
    name: Annotated[
        str | None, typer.Option(help="Name of the new model; default: the old one's and _varlen.")
    ] = None
    output: Annotated[
        str | None, typer.Option(help="Output of the old model that is its answer.")
    ] = None
    task: Annotated[
        str | None, typer.Option(help="Task of the new model; default: by the answers' shape.")
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Engine parameter of the new model, key=value. May be repeated."
        ),
    ] = None
    dtype: Annotated[
        ExistingDType | None,
        typer.Option(
            help="Dtype of the existing model, in which the new one is measured too; default: the one of its ONNX file,"
            " else fp32."
        ),
    ] = None
    texts: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file with one text per line; default: built-in English texts."),
    ] = None
    concurrency: Annotated[
        int, typer.Option(min=1, max=1024, help="Requests in flight under load.")
    ] = 16
    seconds: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds of load on each model; 0: none.")
    ] = 9.0
    force: Annotated[
        bool, typer.Option("--force", help="Replace an earlier model of the new name.")
    ] = False

    @cached_property
    def parameters(self) -> Mapping[str, str]:
        from varlen_tools.model_source import parse_settings

        return parse_settings(self.settings, task=self.task)

    @cached_property
    def sent_texts(self) -> Sequence[str]:
        from varlen.execution.int8.calibration_texts import TEXTS
        from varlen_tools.quantize import read_texts

        return TEXTS if self.texts is None else read_texts(self.texts)

    def check(self) -> None:
        """Read settings and texts.

        Raises:
            ConfigError: a setting is unknown, or the file has no texts.
            OSError: the file cannot be read.
        """
        _ = self.parameters, self.sent_texts
