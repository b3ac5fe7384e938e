"""The benchmark of `varlen adopt`: a stock ensemble beside its varlen model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, ClassVar

import typer

from varlen.models.checkpoint_folder import Checkpoint
from varlen_bench.adopt.stock_ensemble import NAME, write_stock_ensemble
from varlen_bench.compare.subject import Subject, command
from varlen_bench.harness.command import Progress, Run
from varlen_bench.harness.rows import Cell
from varlen_bench.peers.exports import exported
from varlen_tools.adopt.adoption import Adoption, adopt_model
from varlen_tools.adopt.command import print_adoption
from varlen_tools.adopt.session import Measured
from varlen_tools.adopt.wish import Wish
from varlen_tools.local_server import end_on_sigterm
from varlen_tools.serve.server import server_command


@dataclass(kw_only=True)
class AdoptSubject(Subject[Adoption]):
    """Adopt a stock ensemble of a tokenizer and an ONNX encoder in fp32."""

    name: ClassVar = "adopt"
    packages: ClassVar = "torch transformers onnxruntime tokenizers tritonclient varlen".split()

    model: Annotated[Path, typer.Option(help="Checkpoint that both serve.")] = Path(
        "model_repository/minilm/1"
    )
    concurrency: Annotated[int, typer.Option(min=1, help="Texts in flight.")] = 16
    seconds: Annotated[float, typer.Option(min=1, help="Load on each model.")] = 30.0

    def measure(self, progress: Progress) -> Iterator[list[Adoption]]:
        """Yield the adoption."""
        with TemporaryDirectory() as folder:
            progress("exporting the encoder")
            onnx = exported(self.model, "onnxruntime", "fp32") / "model.onnx"
            repository = Path(folder, "repository")
            write_stock_ensemble(repository, Checkpoint.open(self.model), onnx)
            wish = Wish(
                repository,
                model=NAME,
                checkpoint=str(self.model),
                concurrency=self.concurrency,
                seconds=3.0 if self.quick else self.seconds,
            )
            with server_command() as server:
                yield [adopt_model(wish, server, report=progress)]

    def rows(self, results: Sequence[Adoption]) -> list[Mapping[str, Cell]]:
        """Return a row for the ensemble, and for the new model in each dtype."""
        model = self.model.resolve().parent.name
        return [row for done in results for row in _rows(done, model, self.concurrency)]

    def show(self, bench: Run, results: Sequence[Adoption]) -> None:
        """Print what `varlen adopt` prints."""
        del bench
        print_adoption(results[0])

    def figures(self, results: Sequence[Adoption]) -> dict[str, Cell]:
        """Return the speed of each dtype over the ensemble's."""
        return {f"{row['dtype']}_ratio": row["ratio"] for row in self.rows(results)[1:]}

    def has_failed(self, results: Sequence[Adoption]) -> bool:
        """Return whether the answers differ."""
        return not results[0].agrees


def _rows(done: Adoption, model: str, concurrency: int) -> Iterator[Mapping[str, Cell]]:
    """Yield a row for the ensemble, and for the new model in each dtype."""
    (lengths,) = (side.lengths for side in done.old_sides if side.lengths)
    systems: list[tuple[str, str | None, Measured | None, float | None]] = [
        (done.old.name, done.old_dtype, done.old_load, None)
    ]
    systems += [
        ("varlen", each.side.dtype, each.load, each.comparison.cosine) for each in done.candidates
    ]
    for system, dtype, load, cosine in systems:
        assert load is not None
        assert done.old_load is not None
        yield {
            "model": model,
            "texts": len(lengths),
            "mean_tokens": sum(lengths) / len(lengths),
            "concurrency": concurrency,
            "system": system,
            "dtype": dtype,
            "texts_per_second": load.rate,
            "p50_ms": load.percentile(0.5),
            "p99_ms": load.percentile(0.99),
            "ratio": load.rate / done.old_load.rate,
            "cosine_min": cosine,
        }


app = command(AdoptSubject)

if __name__ == "__main__":
    end_on_sigterm()
    app()
