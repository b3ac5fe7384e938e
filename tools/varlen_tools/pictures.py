"""Pictures for light and dark pages, drawn by matplotlib.

A picture is a function that returns a figure. It is drawn twice, once in each theme.
The same data gives the same bytes. matplotlib is imported when a picture is drawn: `pip install 'varlen[pictures]'`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Theme: TypeAlias = Literal["light", "dark"]
Draw: TypeAlias = Callable[[], "Figure"]

# Okabe and Ito 2008, apart for every kind of color vision; readable on both themes.
COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#8f8f8f", "#b3a600")
_PAGE = {"light": "#ffffff", "dark": "#16181c"}
_TEXT = {"light": "#1a1a1a", "dark": "#e6e6e6"}
_GRID = {"light": "#e0e0e0", "dark": "#3a3d42"}


def settings(theme: Theme) -> dict[str, Any]:
    """Return matplotlib's settings for a theme."""
    from cycler import cycler

    text, page, grid = _TEXT[theme], _PAGE[theme], _GRID[theme]
    return {
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


def render(draw: Draw, theme: Theme, kind: Literal["svg", "png"] = "svg") -> bytes:
    """Return a picture in one theme."""
    from matplotlib import rc_context

    with rc_context(settings(theme)):
        held = io.BytesIO()
        draw().savefig(held, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return held.getvalue()


def write(draw: Draw, path: Path) -> list[Path]:
    """Write a picture for light pages to `path` and one for dark pages beside it, `…-dark`.

    Raises:
        ValueError: the file is neither .svg nor .png.
    """
    if path.suffix not in {".svg", ".png"}:
        raise ValueError(f"{path.name} is neither .svg nor .png")
    kind: Literal["svg", "png"] = "svg" if path.suffix == ".svg" else "png"
    paths = [path, path.with_stem(f"{path.stem}-dark")]
    paths[0].write_bytes(render(draw, "light", kind))
    paths[1].write_bytes(render(draw, "dark", kind))
    return paths


def embedded(draw: Draw, description: str) -> str:
    """Return HTML with the picture in both themes, of which the reader's setting shows one."""
    light, dark = (_data_url(render(draw, theme)) for theme in ("light", "dark"))
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img alt="{escape(description)}" src="{light}"></picture></figure>'
    )


def _data_url(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode('ascii')}"
