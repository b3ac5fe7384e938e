"""How commands show their progress, on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_Item = TypeVar("_Item")


@contextmanager
def show_progress(what: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if stderr is a terminal; yield its update function."""
    with show_stages(shown=shown) as update:
        update(what, 0, total)
        yield lambda done: update(what, done, total)


def with_progress(what: str, items: Sequence[_Item]) -> Iterator[_Item]:
    """Yield items, with a progress bar if stderr is a terminal."""
    with show_progress(what, len(items)) as on_progress:
        for done, item in enumerate(items):
            on_progress(done)
            yield item


@contextmanager
def show_stages(*, shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar for each stage of some work, if stderr is a terminal.

    Yields a function that gets the name of a stage, and how much of it is done, of how much in all.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with _bar(*columns, shown=shown) as bar:
        task = bar.add_task("", total=None, visible=False)

        def update(stage: str, done: int, total: int) -> None:
            if bar.tasks[0].description != stage or bar.tasks[0].total != total:
                # the time left counts from the start of a stage
                bar.reset(task, description=stage, total=total, visible=True)
            bar.update(task, completed=done)

        yield update


@contextmanager
def show_stage(what: str) -> Iterator[Callable[[str], None]]:
    """Show what runs, and for how long, if stderr is a terminal.

    Yields a function that gets the name of the next stage.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with _bar(*columns) as bar:
        task = bar.add_task(what, total=None)
        yield lambda stage: bar.update(task, description=stage)


def _bar(*columns: ProgressColumn, shown: bool = True) -> Progress:
    console = Console(stderr=True)
    is_shown = shown and console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=not is_shown)
