"""From a worker's figures to rows of the CSV."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from varlen_bench.memory.cases import NO_ARENA, OURS, PEER, Case
from varlen_bench.memory.soak import Flatness, Soak

EXACT = "exact-arena"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the CSV; the package's docstring says what the columns mean."""

    encoder: str
    batch: int | None
    requests: int
    system: str
    device: str
    weights_mib: float | None = None
    footprint_vs_bound: float | None = None
    footprint_vs_bound_max: float | None = None
    bound_largest_mib: float | None = None
    reserved_mib: float | None = None
    reserved_vs_bound: float | None = None
    new_mib_per_request: float | None = None
    asked_mib_longest: float | None = None
    peak_mib: float | None = None
    allocated_mib: float | None = None
    vs_pytorch: float | None = None
    seconds: float | None = None
    plan_share: float | None = None
    vs_no_arena: float | None = None
    vs_no_arena_p20: float | None = None
    vs_no_arena_p80: float | None = None
    rss_least_mib: float | None = None
    rss_median_mib: float | None = None
    rss_most_mib: float | None = None
    rss_flatness: float | None = None
    note: str = ""


def case_rows(case: Case, device: str, answers: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return the rows of a case: our system, the one without an arena, transformers, and the exact arena.

    Args:
        case: what was run.
        device: where.
        answers: of the workers: by system, and `speed`; one that failed is `{"error": reason}`.
    """
    rows = [_memory_row(case, device, name, answers[name]) for name in (OURS, NO_ARENA, PEER)]
    peer = rows[-1].peak_mib
    rows = [replace(row, vs_pytorch=_over(row.peak_mib, peer)) for row in rows]
    plan, speed = answers[OURS].get("plan"), answers["speed"]
    rows[0] = _with_speed(rows[0], speed)
    if plan:
        exact = Row(case.encoder.name, case.batch, len(case.lengths), EXACT, device)
        rows.append(replace(exact, new_mib_per_request=plan["footprint"] / _MIB))
    return rows


def soak_rows(order: Soak, flatness: list[Flatness]) -> list[Row]:
    """Return a row for each process of the server."""
    return [
        Row(
            encoder=order.model,
            batch=None,
            requests=order.requests,
            system=found.process,
            device="as served",
            peak_mib=found.peak / _MIB,
            rss_least_mib=min(found.samples) / _MIB,
            rss_median_mib=statistics.median(found.samples) / _MIB,
            rss_most_mib=max(found.samples) / _MIB,
            rss_flatness=found.value,
        )
        for found in flatness
    ]


def failed_soak(order: Soak, reason: str) -> Row:
    """Return the row of a server that did not serve."""
    note = f"did not run: {reason}"
    return Row(order.model, None, order.requests, "stub", "as served", note=note)


def _memory_row(case: Case, device: str, name: str, answer: Mapping[str, Any]) -> Row:
    row = Row(case.encoder.name, case.batch, len(case.lengths), name, device)
    if "error" in answer:
        return replace(row, note=f"did not run: {answer['error']}")
    found = answer["memory"]
    row = replace(
        row,
        requests=found["requests"],
        weights_mib=found["weights"] / _MIB,
        peak_mib=found["peak"] / _MIB,
        allocated_mib=_mib(found["allocated"]),
        asked_mib_longest=found["asked_longest"] / _MIB,
        seconds=found["seconds"],
    )
    return _with_plan(row, found, answer["plan"]) if "plan" in answer else row


def _with_plan(row: Row, found: Mapping[str, Any], plan: Mapping[str, Any]) -> Row:
    return replace(
        row,
        footprint_vs_bound=plan["ratio"],
        footprint_vs_bound_max=plan["ratio_most"],
        bound_largest_mib=plan["bound_largest"] / _MIB,
        reserved_mib=found["reserved"] / _MIB,
        reserved_vs_bound=found["reserved"] / plan["bound_largest"],
        new_mib_per_request=found["new"] / found["requests"] / _MIB,
        plan_share=found["plan_seconds"] / found["seconds"],
    )


def _with_speed(row: Row, answer: Mapping[str, Any]) -> Row:
    if "error" in answer:
        told = [row.note] if row.note else []
        return replace(row, note="; ".join([*told, f"no speed: {answer['error']}"]))
    speed = answer["speed"]
    return replace(
        row,
        vs_no_arena=speed["ratio"],
        vs_no_arena_p20=speed["ratio_p20"],
        vs_no_arena_p80=speed["ratio_p80"],
    )


def _mib(size: int | None) -> float | None:
    return None if size is None else size / _MIB


def _over(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
