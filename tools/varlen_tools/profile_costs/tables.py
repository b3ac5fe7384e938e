"""Tables for the terminal: costs of batches, and the entries of a cache. The page shows the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from varlen.costs.store import StoredCosts
from varlen_tools.profile_costs.profile import GridCell, Profile

# Grids of a profile: title, and the attribute of a cell.
GRIDS = (
    ("milliseconds per batch", "milliseconds"),
    ("microseconds per token", "microseconds_per_token"),
)
BATCHES_TITLE = "measured batches, in milliseconds"
BATCH_HEADINGS = ("sequences", "tokens", "longest", "measured", "predicted", "error")
_CAPTION = "struck out: beyond the limits of a batch"
_TIME = "%Y-%m-%d %H:%M %Z"


def tables(profile: Profile) -> Iterator[Table]:
    """Yield milliseconds per batch, microseconds per token, and the measured batches."""
    for title, attribute in GRIDS:
        table = Table(title=title, title_justify="left", caption=_CAPTION, caption_justify="left")
        for heading in ("tokens each", *(f"{count} x" for count in profile.counts)):
            table.add_column(heading, justify="right")
        for length in profile.lengths:
            cells = [profile.cells[count, length] for count in profile.counts]
            table.add_row(str(length), *(_cell(cell, attribute) for cell in cells))
        yield table
    table = Table(title=BATCHES_TITLE, title_justify="left")
    for heading in BATCH_HEADINGS:
        table.add_column(heading, justify="right")
    for row in batch_rows(profile):
        table.add_row(*row)
    yield table


def batch_rows(profile: Profile) -> list[list[str]]:
    """Return a row for each measured batch, in the order of `BATCH_HEADINGS`."""
    return [
        [
            str(batch.shape.sequences),
            str(batch.shape.tokens),
            str(batch.shape.longest),
            three_digits(1e3 * batch.measured),
            three_digits(1e3 * batch.predicted),
            f"{batch.error:+.1%}",
        ]
        for batch in profile.batches
    ]


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


def three_digits(value: float) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _cell(cell: GridCell, attribute: str) -> str:
    text = three_digits(getattr(cell, attribute))
    return text if cell.is_allowed else f"[dim strike]{text}[/]"
