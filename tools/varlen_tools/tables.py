"""Tables with the same cells in the terminal and in Markdown."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table as ConsoleTable


@dataclass(frozen=True, slots=True)
class Table:
    """A title, headings, and the cells of each line; a console of rich prints it.

    Attributes:
        align_right: whether a console aligns the columns after the first to the right.
    """

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    align_right: bool = False
    caption: str | None = None

    def __rich__(self) -> ConsoleTable:
        view = ConsoleTable(
            title=self.title or None,
            title_justify="left",
            caption=self.caption,
            caption_justify="left",
        )
        for number, name in enumerate(self.headings):
            is_right = self.align_right and number > 0
            view.add_column(name.replace("_", "\n"), justify="right" if is_right else "left")
        for line in self.lines:
            view.add_row(*line)
        return view

    def markdown(self) -> Iterator[str]:
        """Yield the lines of the table in Markdown, without its title."""
        for line in (self.headings, ["---"] * len(self.headings), *self.lines):
            yield f"| {' | '.join(cell.replace('|', '/') for cell in line)} |"
