"""The picture of a profile, a stacked bar for each kind of run; its page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from varlen_bench import html_page, pictures
from varlen_bench.profile_ops.timed import CLASSES, Breakdown, class_of
from varlen_tools.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Smaller parts of a bar have no label.
_LEAST_LABELLED = 0.05
NOTE = (
    "Shares of the time of all threads that run ops. Python and rest: all that is not in an op, such as packing a"
    " batch, starting ops, and waiting for other worker threads."
)


def draw(name: str, breakdowns: Sequence[Breakdown]) -> Figure:
    """Return the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.6 + 0.6 * len(breakdowns)), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"Share of time in {name}", parse_math=False)
    titles = [one.title for one in breakdowns]
    shares = [one.class_shares() for one in breakdowns]
    begins = [0.0] * len(shares)
    for label, color in zip(CLASSES, pictures.COLORS, strict=False):
        widths = [100 * each[label] for each in shares]
        if not any(widths):
            continue
        bars = axes.barh(range(len(titles)), widths, left=begins, color=color, label=label)
        texts = [f"{width:.0f} %" if width >= 100 * _LEAST_LABELLED else "" for width in widths]
        axes.bar_label(bars, texts, label_type="center", color="black", fontsize="small")
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    axes.set_yticks(range(len(titles)), titles)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of time, %")
    figure.legend(loc="outside lower center", ncols=len(CLASSES), fontsize="small")
    return figure


def class_table(breakdowns: Sequence[Breakdown]) -> Table:
    """Return the table of classes: a line per class, a column per breakdown."""
    shares = [one.class_shares() for one in breakdowns]
    lines = [[label, *(f"{each[label]:.1%}" for each in shares)] for label in CLASSES]
    return Table("share of time", ("class", *(one.title for one in breakdowns)), lines)


def op_table(breakdown: Breakdown) -> Table:
    """Return the table of ops of a breakdown, the longest first."""
    lines = [
        [
            op,
            class_of(op),
            str(breakdown.calls.get(op, "")),
            f"{breakdown.seconds[op]:.3f}",
            f"{share:.1%}",
        ]
        for op, share in breakdown.shares().items()
    ]
    return Table(breakdown.title, ("op", "class", "calls", "seconds", "share"), lines)


def render(name: str, breakdowns: Sequence[Breakdown]) -> str:
    """Return the page: the picture, and all figures in tables."""
    heading = f"Share of time in {name}"
    classes = class_table(breakdowns)
    parts = [
        html_page.paragraph(NOTE),
        pictures.embedded(partial(draw, name, breakdowns), heading),
        html_page.table(classes.headings, classes.lines),
        *(
            html_page.folded(
                f"Every op: {table.title}", html_page.table(table.headings, table.lines)
            )
            for table in map(op_table, breakdowns)
        ),
    ]
    return html_page.page(heading, parts)
