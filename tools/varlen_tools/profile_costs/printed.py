"""A table of costs, and what a cache holds, in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from varlen.costs.store import StoredCosts
from varlen_tools.profile_costs.points import Point, Profile

_STYLES = {"measured": "bold", "filled": "dim", "past": "dim strike"}
_CAPTION = "bold: measured; dim: filled in; struck out: past the token budget"
_TIME = "%Y-%m-%d %H:%M %Z"


def tables(profile: Profile) -> Iterator[Table]:
    """Yield milliseconds a batch, microseconds a token, and mixed batches."""
    yield _grid(profile, "milliseconds a batch", lambda point: in_milliseconds(point.seconds))
    yield _grid(profile, "microseconds a token", lambda point: three_digits(1e6 * point.per_token))
    if profile.mixed:
        yield _mixed(profile)


def entries(kept: Sequence[StoredCosts]) -> Table:
    """Return what a cache holds, one line for each table."""
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
    for costs in kept:
        about, measurement = costs.about, costs.measurement
        threads = f", {about['threads']} threads" if "threads" in about else ""
        table.add_row(
            costs.measured_at.strftime(_TIME),
            f"{about.get('model', '?')} ({about.get('checkpoint', '?')[:8]})",
            about.get("task", "?"),
            f"{about.get('device', '?')}{threads}, {about.get('dtype', '?')};"
            f" torch {about.get('torch', '?')}, varlen {about.get('varlen', '?')}",
            about.get("execution", "?"),
            f"{about.get('max_batch_sequences', '?')} sequences, {about.get('max_batch_tokens', '?')} tokens",
            f"{measurement.batches}"
            if measurement.is_complete
            else f"{measurement.batches}, cut short",
            f"{measurement.seconds:.1f}",
            f"{measurement.spread:.2f}",
        )
    return table


def in_milliseconds(seconds: float) -> str:
    """Return milliseconds with three digits."""
    return three_digits(1e3 * seconds)


def three_digits(value: float) -> str:
    """Return a number with three digits that count, or all before the point."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _grid(profile: Profile, title: str, say: Callable[[Point], str]) -> Table:
    table = Table(title=title, title_justify="left", caption=_CAPTION, caption_justify="left")
    table.add_column("tokens each", justify="right")
    for count in profile.counts:
        table.add_column(f"{count} x", justify="right")
    for length in profile.lengths:
        row = [profile.points[count, length] for count in profile.counts]
        cells = [f"[{_STYLES[point.kind]}]{say(point)}[/]" for point in row]
        table.add_row(str(length), *cells)
    return table


def _mixed(profile: Profile) -> Table:
    table = Table(title="batches of mixed lengths, in milliseconds", title_justify="left")
    for heading in ("sequences", "tokens", "took", "by the grid", "off", "by the table", "off"):
        table.add_column(heading, justify="right")
    for batch in profile.mixed:
        table.add_row(
            str(batch.shape.sequences),
            str(batch.shape.tokens),
            in_milliseconds(batch.actual),
            in_milliseconds(batch.by_grid),
            f"{batch.by_grid / batch.actual - 1:+.1%}",
            in_milliseconds(batch.by_table),
            f"{batch.by_table / batch.actual - 1:+.1%}",
        )
    return table
