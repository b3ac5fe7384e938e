"""The picture of a profile: heat maps of predicted costs, and measured batches; its page."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from varlen_tools import html_page, pictures
from varlen_tools.pictures import COLORS
from varlen_tools.profile_costs.profile import Profile
from varlen_tools.profile_costs.tables import batch_table, three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Cells up to this luminance take white text.
_DARK = 0.45


def draw(profile: Profile) -> Figure:
    """Return the picture: milliseconds per batch, microseconds per token, and measured batches."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    wide, high = len(profile.counts), len(profile.lengths)
    figure = Figure(figsize=(6.5 + 1.2 * wide, max(4.5, 1.9 + 0.36 * high)), layout="constrained")
    title = f"Cost of a batch of {profile.name}"
    figure.suptitle(title, fontweight="bold", parse_math=False)
    widths = [wide + 1, wide + 1, 6]
    *maps, scatter = figure.subplots(1, 3, width_ratios=widths)
    for axes, (title, grid) in zip(maps, profile.grids().items(), strict=True):
        axes.set_title(f"{title}, predicted")
        _draw_grid(axes, profile, grid)
    _draw_batches(scatter, profile)
    patch = Patch(label="beyond the limits of a batch", **_beyond())
    figure.legend(handles=[patch], loc="outside lower left")
    return figure


def render(profile: Profile) -> str:
    """Return the page."""
    costs = profile.costs
    measurement = costs.measurement
    batches = batch_table(profile)
    cut = "" if measurement.is_complete else f", cut short after {costs.allowed_seconds:g} s"
    title = f"Cost of a batch of {profile.name}"
    return html_page.page(
        title,
        [
            html_page.paragraph(
                f"{len(measurement.batches)} batches measured in {measurement.seconds:.1f} s"
                f" on {costs.measured_at:%Y-%m-%d at %H:%M %Z}{cut}; the reference batch took"
                f" {measurement.spread:.2f} times as long in slow moments as in fast ones."
                f" The median error of the fitted costs is {profile.median_error():.1%}."
            ),
            pictures.embedded(partial(draw, profile), title),
            html_page.heading(batches.title.capitalize()),
            batches.html(),
            html_page.heading("Measured with"),
            html_page.table(["property", "value"], [list(item) for item in costs.key.items()]),
        ],
    )


def _beyond() -> dict[str, Any]:
    from matplotlib import rcParams

    colors = {"facecolor": rcParams["grid.color"], "edgecolor": rcParams["axes.facecolor"]}
    return {**colors, "hatch": "///"}


def _draw_grid(axes: Axes, profile: Profile, grid: NDArray[np.float64]) -> None:
    from matplotlib import colormaps, rcParams
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    shown = grid[profile.is_allowed]
    # equal costs need a range that is not empty
    norm = LogNorm(shown.min(), max(shown.max(), 1.001 * shown.min()))
    colors = colormaps["viridis_r"]
    image = axes.imshow(grid, cmap=colors, norm=norm, aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        luminance = np.dot(colors(norm(value))[:3], (0.299, 0.587, 0.114))
        color = "white" if luminance < _DARK else "black"
        if not profile.is_allowed[row, column]:
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **_beyond()))
            color = rcParams["text.color"]
        text = three_digits(float(value))
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(profile.counts)), map(str, profile.counts))
    axes.set_yticks(range(len(profile.lengths)), map(str, profile.lengths))
    axes.set_xlabel("sequences")
    axes.set_ylabel("tokens each")
    axes.grid(visible=False)
    axes.figure.colorbar(image, ax=axes, fraction=0.05)


def _draw_batches(axes: Axes, profile: Profile) -> None:
    measured = [1e3 * batch.seconds for batch, _ in profile.batches]
    predicted = [1e3 * seconds for _, seconds in profile.batches]
    limits = (0.8 * min(measured + predicted), 1.25 * max(measured + predicted))
    axes.plot(limits, limits, color=COLORS[6], label="measured = predicted")
    axes.plot(measured, predicted, "o", color=COLORS[0], label="a measured batch")
    axes.set(xscale="log", yscale="log", xlim=limits, ylim=limits, box_aspect=1)
    axes.set_xlabel("measured milliseconds")
    axes.set_ylabel("predicted milliseconds")
    axes.set_title(f"measured batches; median error {profile.median_error():.1%}")
    axes.legend(loc="upper left")
