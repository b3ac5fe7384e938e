"""CSV rows, keys of the BENCH line, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from varlen_bench.compare.results import (
    Result,
    best_peer,
    csv_row,
    empty_row,
    fastest,
    result_of,
    speed_ratio,
)
from varlen_bench.compare.results import tables as result_tables
from varlen_bench.generate.systems import OURS, REQUEST_LEVEL
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import ratio, rounded
from varlen_bench.peers.checkpoints import GPT2_SMALL
from varlen_tools.tables import Table

TINY_GPT2 = "tiny_gpt2"

_FIGURES = (
    "tokens_per_second tokens_per_second_p20 tokens_per_second_p80 ttft_p50_ms ttft_p99_ms per_token_p50_ms "
    "per_token_p99_ms gap_p50_ms gap_p99_ms machine_gflops step_ms limit_ms"
).split()
_COLUMNS = (
    *"model workload arrivals rate system batch requests tokens rounds equal_tokens".split(),
    *_FIGURES,
    *("calibration", "note"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of a decode step, and of the fastest possible; or why not."""

    model: str
    seconds: float | None = None
    limit: float | None = None
    note: str = ""


def csv_rows(results: Iterable[Result], steps: Iterable[Step]) -> list[dict[str, Cell]]:
    """Return a row for each result, and one for the decode step of each model."""
    rows = [csv_row(result, _COLUMNS, tokens=result.work) for result in results]
    for step in steps:
        times = {"step_ms": _ms(step.seconds), "limit_ms": _ms(step.limit), "note": step.note}
        about = {"model": step.model, "system": OURS, "arrivals": "decode step"}
        rows.append(empty_row(_COLUMNS, **about, **times))
    return rows


def bench_figures(
    results: Sequence[Result], steps: Sequence[Step], models: Sequence[str]
) -> dict[str, Cell]:
    """Return the keys of the BENCH line; models other than gpt2-small have a prefix."""
    figures: dict[str, Cell] = {}
    for model in models:
        prefix = "" if model == GPT2_SMALL.name else f"{model.replace('-', '_')}_"
        step = next((step for step in steps if step.model == model), Step(model))
        found = _figures([result for result in results if result.model == model])
        found["decode_fraction_of_limit"] = rounded(ratio(step.limit, step.seconds))
        figures |= {f"{prefix}{key}": value for key, value in found.items()}
    return figures


def tables(rows: Sequence[Mapping[str, Cell]]) -> list[Table]:
    """Return a table of each model and kind of arrivals, the fastest system first."""
    columns = ("system", "batch", "equal_tokens", *_FIGURES, "note")
    return result_tables(rows, columns, by=("model", "arrivals"), speed="tokens_per_second")


def _figures(results: Sequence[Result]) -> dict[str, Cell]:
    at_once = [result for result in results if result.arrivals == "at once"]
    poisson = [result for result in results if result.arrivals == "poisson"]
    ours, peer = result_of(at_once, OURS), best_peer(at_once)
    # transformers with padded batches that run to their end
    padded = (each for each in at_once if each.system.engine == "transformers")
    static = fastest(each for each in padded if each.system.batching != "engine")
    # the first tokens of the best peer, whichever has them first
    firsts = [result.median("ttft_p99_ms") for result in poisson if not result.system.is_ours]
    first, soonest = result_of(poisson, OURS), min(filter(None, firsts), default=None)
    return {
        "vs_static_batch": speed_ratio(ours, static),
        "vs_best_peer": speed_ratio(ours, peer),
        "vs_request_level": speed_ratio(ours, result_of(at_once, REQUEST_LEVEL)),
        "ttft_p99_ratio": rounded(ratio(first.median("ttft_p99_ms") if first else None, soonest)),
        "best_peer": peer.system.name if peer else None,
        "tokens_per_second": rounded(ours.median("tokens_per_second") if ours else None, 1),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
