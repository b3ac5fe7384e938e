"""The benchmark of several outputs: their time over the time of the dense one.

docs/benchmarks/outputs.md has the method; `make bench-outputs` runs it with its defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from varlen_bench.compare.results import fastest, result_of, speed_ratio
from varlen_bench.compare.subject import command
from varlen_bench.compare.systems import System, by_name
from varlen_bench.encoder import EncoderResult, EncoderSubject
from varlen_bench.harness.rows import Cell
from varlen_bench.peers.random_encoders import RANDOM_ENCODERS

SYSTEMS = by_name(
    *(System(f"varlen-{each}", "varlen", each, "engine") for each in ("fp32", "bf16", "int8")),
    *(
        System(
            f"recipe-{precision}-{suffix}",
            "transformers",
            precision,
            "sorted",
            per_core=suffix == "per-core",
        )
        for precision in ("fp32", "bf16")
        for suffix in ("sorted", "per-core")
    ),
)

# Outputs of a request by their label; a model of one task has no names of outputs.
_WISHES: Mapping[str, tuple[str, ...]] = {
    "only dense": (),
    "dense": ("embed",),
    "dense and terms": ("embed", "sparse_embed"),
    "all three": ("embed", "sparse_embed", "token_embed"),
}
_BASE, _ALL = "only dense", "all three"


@dataclass(kw_only=True)
class OutputsSubject(EncoderSubject):
    """Time several outputs of a model like bge-m3, beside FlagEmbedding's recipe."""

    name: ClassVar = "outputs"
    packages: ClassVar = ("torch", "transformers", "varlen")
    systems: ClassVar = SYSTEMS
    worker: ClassVar = "varlen_bench.workers.outputs"
    columns: ClassVar = (
        *"model workload outputs system batch sequences tokens rounds".split(),
        *"tokens_per_second tokens_per_second_p20 tokens_per_second_p80 time_ratio".split(),
        *"ratio_to_recipe cosine_mean cosine_min peak_rss_mib calibration note".split(),
    )
    shown: ClassVar = tuple(
        "system outputs batch tokens_per_second time_ratio ratio_to_recipe cosine_mean note".split()
    )

    model: Annotated[
        Path,
        typer.Option(
            help="Folder of a model like bge-m3 with its .pt files, or one with random weights: "
            + ", ".join(name for name in RANDOM_ENCODERS if name.startswith("m3-"))
        ),
    ] = Path("m3-small")
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of 5-500 tokens.")] = 24
    queries: Annotated[int, typer.Option(min=1, help="Short queries.")] = 128
    pairs: Annotated[int, typer.Option(min=0, help="Sequences of 60-250 tokens.")] = 0

    def prepare(self) -> None:
        """Choose systems, and make the workloads of each set of outputs."""
        super().prepare()
        self.workloads = [
            replace(each, name=f"{each.name} {label}", outputs=outputs)
            for each in self.workloads
            for label, outputs in _WISHES.items()
        ]

    def _in_turn(self, results: Sequence[EncoderResult]) -> Sequence[EncoderResult]:
        """Return results in the order of a round: all of one system together."""
        return results

    def _derived(self, result: EncoderResult, results: Sequence[EncoderResult]) -> dict[str, Cell]:
        workload, _, label = result.workload.partition(" ")
        return {
            **super()._derived(result, results),
            "workload": workload,
            "outputs": label,
            "time_ratio": _time_ratio(result, results),
            "ratio_to_recipe": speed_ratio(result, _recipe(result, results)),
        }

    def figures(self, results: Sequence[EncoderResult]) -> dict[str, Cell]:
        """Return the keys of the BENCH line, of all outputs."""
        figures: dict[str, Cell] = {}
        for result in results:
            workload, _, label = result.workload.partition(" ")
            if result.system.is_ours and label == _ALL:
                key = f"{workload}_{result.system.precision}"
                figures[f"{key}_time_ratio"] = _time_ratio(result, results)
                figures[f"{key}_vs_recipe"] = speed_ratio(result, _recipe(result, results))
        return figures


def _time_ratio(result: EncoderResult, results: Sequence[EncoderResult]) -> float | None:
    """Return the time over a model of one task in the same system."""
    workload = result.workload.partition(" ")[0]
    same = [each for each in results if each.workload == f"{workload} {_BASE}"]
    return speed_ratio(result_of(same, result.system.name), result)


def _recipe(result: EncoderResult, results: Sequence[EncoderResult]) -> EncoderResult | None:
    """Return the recipe's fastest result for these outputs in this precision; None without one."""
    return fastest(
        [
            each
            for each in results
            if not each.system.is_ours
            and each.workload == result.workload
            and each.system.precision == result.system.precision
        ]
    )


app = command(OutputsSubject)

if __name__ == "__main__":
    app()
