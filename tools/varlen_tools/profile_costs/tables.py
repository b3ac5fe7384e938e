"""Costs of batches, and the entries of a cache, printed in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from varlen.costs.store import StoredCosts
from varlen_tools.profile_costs.points import Cell, Profile

_CAPTION = "struck out: past the limits of a batch"
_TIME = "%Y-%m-%d %H:%M %Z"


def tables(profile: Profile) -> Iterator[Table]:
    """Yield milliseconds per batch, microseconds per token, and the measured batches."""
    yield _grid(profile, "milliseconds per batch", lambda cell: in_milliseconds(cell.seconds))
    yield _grid(profile, "microseconds per token", lambda cell: three_digits(1e6 * cell.per_token))
    yield _measured(profile)


def entries(stored: Sequence[StoredCosts]) -> Table:
    """Return the entries of a cache, one line each."""
    table = Table(
        "measured",
        "model",
        "task",
        "runs on",
        "execution",
        "limits",
        "batches",
        "seconds",
        "spread",
    )
    for costs in stored:
        key, measurement = costs.key, costs.measurement
        threads = f", {key['threads']} threads" if "threads" in key else ""
        table.add_row(
            costs.measured_at.strftime(_TIME),
            f"{key.get('model', '?')} ({key.get('checkpoint', '?')[:8]})",
            key.get("task", "?"),
            f"{key.get('device', '?')}{threads}, {key.get('dtype', '?')};"
            f" torch {key.get('torch', '?')}, varlen {key.get('varlen', '?')}",
            key.get("execution", "?"),
            f"{key.get('max_batch_sequences', '?')} sequences, {key.get('max_batch_tokens', '?')} tokens",
            f"{len(measurement.batches)}{'' if measurement.is_complete else ', cut short'}",
            f"{measurement.seconds:.1f}",
            f"{measurement.spread:.2f}",
        )
    return table


def in_milliseconds(seconds: float) -> str:
    """Return milliseconds with three digits."""
    return three_digits(1e3 * seconds)


def three_digits(value: float) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _grid(profile: Profile, title: str, say: Callable[[Cell], str]) -> Table:
    table = Table(title=title, title_justify="left", caption=_CAPTION, caption_justify="left")
    table.add_column("tokens each", justify="right")
    for count in profile.counts:
        table.add_column(f"{count} x", justify="right")
    for length in profile.lengths:
        row = [profile.cells[count, length] for count in profile.counts]
        texts = [say(cell) if cell.is_allowed else f"[dim strike]{say(cell)}[/]" for cell in row]
        table.add_row(str(length), *texts)
    return table


def _measured(profile: Profile) -> Table:
    table = Table(title="measured batches, in milliseconds", title_justify="left")
    for heading in ("sequences", "tokens", "longest", "measured", "predicted", "error"):
        table.add_column(heading, justify="right")
    for batch in profile.checked:
        table.add_row(
            str(batch.shape.sequences),
            str(batch.shape.tokens),
            str(batch.shape.longest),
            in_milliseconds(batch.actual),
            in_milliseconds(batch.predicted),
            f"{batch.error:+.1%}",
        )
    return table
