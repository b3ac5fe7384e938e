"""Pictures for light and dark pages, drawn by matplotlib.

A picture is a function that returns a figure. It is drawn twice, once in each theme.
The same data gives the same bytes. matplotlib, of the extra `pictures`, is imported when a picture is drawn.
A command checks for it before it computes.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Theme: TypeAlias = Literal["light", "dark"]
Draw: TypeAlias = Callable[[], "Figure"]

# Okabe and Ito 2008, apart for every kind of color vision; readable on both themes.
COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#8f8f8f", "#b3a600")
_PAGE = {"light": "#ffffff", "dark": "#16181c"}
_TEXT = {"light": "#1a1a1a", "dark": "#e6e6e6"}
_GRID = {"light": "#e0e0e0", "dark": "#3a3d42"}


class PictureError(Exception):
    """A picture cannot be drawn; the message says what is missing."""


def settings(theme: Theme) -> dict[str, Any]:
    """Return matplotlib's settings for a theme."""
    from cycler import cycler

    text, page, grid = _TEXT[theme], _PAGE[theme], _GRID[theme]
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": text,
        "axes.facecolor": page,
        "axes.grid": True,
        "axes.grid.which": "major",
        "axes.labelcolor": text,
        "axes.prop_cycle": cycler(color=COLORS),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": "medium",
        "figure.facecolor": page,
        "font.family": "sans-serif",
        "grid.color": grid,
        "legend.frameon": False,
        "savefig.facecolor": page,
        "svg.fonttype": "none",
        "svg.hashsalt": "varlen",
        "text.color": text,
        "xtick.color": text,
        "ytick.color": text,
    }


def check_matplotlib() -> None:
    """Raise PictureError if matplotlib is not installed."""
    try:
        # find_spec refuses a module that a test has hidden
        is_there = find_spec("matplotlib") is not None
    except ValueError:
        is_there = False
    if not is_there:
        raise PictureError("pictures need matplotlib: pip install 'varlen[pictures]'")


def render(draw: Draw, theme: Theme) -> bytes:
    """Return a picture in one theme, as SVG.

    Raises:
        PictureError: matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib import rc_context

    with rc_context(settings(theme)):
        held = io.BytesIO()
        draw().savefig(held, format="svg", metadata={"Date": None})
    return held.getvalue()


def write(draw: Draw, path: Path) -> list[Path]:
    """Write a picture for light pages, and one for dark pages beside it as `…-dark`."""
    paths = [path, path.with_stem(f"{path.stem}-dark")]
    paths[0].write_bytes(render(draw, "light"))
    paths[1].write_bytes(render(draw, "dark"))
    return paths


def embedded(draw: Draw, description: str) -> str:
    """Return HTML with the picture in both themes; the reader's setting selects one."""
    light, dark = (_data_url(render(draw, theme)) for theme in ("light", "dark"))
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img alt="{escape(description)}" src="{light}"></picture></figure>'
    )


def check_outputs(paths: list[Path] | None) -> list[Path] | None:
    """Return the paths of a command's `--output`; the option's callback.

    Raises:
        typer.BadParameter: a file has another suffix, its folder does not exist, or matplotlib is not installed.
    """
    for path in paths or []:
        if path.suffix not in {".svg", ".html"}:
            raise typer.BadParameter(f"{path} is neither .svg nor .html")
        if not path.parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.parent}")
    if paths:
        try:
            check_matplotlib()
        except PictureError as error:
            raise typer.BadParameter(str(error)) from None
    return paths


# The option `--output` of a command.
OutputOption: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        help="Picture (.svg) or page (.html) to write. May be repeated.", callback=check_outputs
    ),
]


def write_outputs(paths: Iterable[Path] | None, draw: Draw, render_page: Callable[[], str]) -> None:
    """Write a page to each .html and a picture to each .svg; print the paths."""
    for path in paths or ():
        if path.suffix == ".html":
            path.write_text(render_page(), encoding="utf-8")
            print(path)
        else:
            print(*write(draw, path), sep="\n")


def _data_url(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode('ascii')}"
