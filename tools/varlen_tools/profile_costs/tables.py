"""Tables of costs for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from varlen_tools.profile_costs.profile import Profile
from varlen_tools.tables import Table

_CAPTION = "struck out: beyond the limits of a batch"


def tables(profile: Profile) -> Iterator[Table]:
    """Yield milliseconds per batch, microseconds per token, and the measured batches."""
    headings = ("tokens each", *(f"{count} x" for count in profile.counts))
    for title, grid in profile.grids().items():
        lines = [
            [
                str(length),
                *(
                    three_digits(value) if is_allowed else f"[dim strike]{three_digits(value)}[/]"
                    for value, is_allowed in zip(*row, strict=True)
                ),
            ]
            for length, *row in zip(
                profile.lengths, grid.tolist(), profile.is_allowed.tolist(), strict=True
            )
        ]
        yield Table(title, headings, lines, align_right=True, caption=_CAPTION)
    yield batch_table(profile)


def batch_table(profile: Profile) -> Table:
    """Return the table of the measured batches with their predictions."""
    lines = [
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
    headings = ("sequences", "tokens", "longest", "measured", "predicted", "error")
    caption = f"median error {profile.median_error():.1%}"
    title = "measured batches, in milliseconds"
    return Table(title, headings, lines, align_right=True, caption=caption)


def three_digits(value: float) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
