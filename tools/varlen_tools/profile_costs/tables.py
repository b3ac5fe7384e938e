"""Tables of costs for the terminal; the page shows the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from varlen_tools.profile_costs.profile import Profile

BATCHES_TITLE = "measured batches, in milliseconds"
BATCH_HEADINGS = ("sequences", "tokens", "longest", "measured", "predicted", "error")
_CAPTION = "struck out: beyond the limits of a batch"


def tables(profile: Profile) -> Iterator[Table]:
    """Yield milliseconds per batch, microseconds per token, and the measured batches."""
    headings = ("tokens each", *(f"{count} x" for count in profile.counts))
    for title, grid in profile.grids().items():
        rows = zip(grid.tolist(), profile.is_allowed.tolist(), strict=True)
        texts = [
            [
                three_digits(value) if is_allowed else f"[dim strike]{three_digits(value)}[/]"
                for value, is_allowed in zip(*row, strict=True)
            ]
            for row in rows
        ]
        labelled = [[str(n), *row] for n, row in zip(profile.lengths, texts, strict=True)]
        yield _table(title, headings, labelled, caption=_CAPTION)
    yield _table(BATCHES_TITLE, BATCH_HEADINGS, batch_rows(profile))


def batch_rows(profile: Profile) -> list[list[str]]:
    """Return a row for each measured batch, in the order of `BATCH_HEADINGS`."""
    return [
        [
            str(batch.shape.sequences),
            str(batch.shape.tokens),
            str(batch.shape.longest),
            three_digits(1e3 * batch.seconds),
            three_digits(1e3 * predicted),
            f"{predicted / batch.seconds - 1:+.1%}",
        ]
        for batch, predicted in profile.batches
    ]


def three_digits(value: float) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None
) -> Table:
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
