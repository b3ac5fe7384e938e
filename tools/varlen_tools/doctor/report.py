"""The report of the doctor: for people, and as JSON."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from varlen.config import SETTINGS
from varlen_tools.doctor.comparison import TOKENIZATION, Comparison
from varlen_tools.doctor.examine import Examination
from varlen_tools.findings import Findings, rows, table

Verdict = Literal["agrees", "differs", "not compared", "refused"]
_PARAMETER = re.compile(r'parameters \{ key: "(\w+)" value: \{ string_value: "(.*)" \} \}')
# What adds the comparisons that a missing library would make. It is the same Python that runs the doctor.
_INSTALL = "pip install transformers sentence-transformers"


@dataclass(frozen=True, slots=True)
class Report:
    """What the doctor found out about a model.

    Attributes:
        refused: reason why it does not load; None if it does.
        findings, examination, config: absent if it does not load; `config` is its config.pbtxt.
    """

    model: str
    refused: str | None = None
    findings: Findings | None = None
    examination: Examination | None = None
    config: str = ""

    @property
    def verdict(self) -> Verdict:
        """The result in a word."""
        if self.refused is not None or self.examination is None:
            return "refused"
        judged = [each for each in self.examination.comparisons if each.agrees is not None]
        if not all(each.agrees for each in judged):
            return "differs"
        # equal token ids say nothing of the model
        return "agrees" if any(each.what != TOKENIZATION for each in judged) else "not compared"

    @property
    def summary(self) -> str:
        """The result in a sentence, with the names of what was compared."""
        results: dict[bool | None, list[str]] = {True: [], False: [], None: []}
        for each in self.examination.comparisons if self.examination is not None else ():
            results[each.agrees].append(each.what)
        missing = f"; not compared: {', '.join(results[None])}" if results[None] else ""
        if self.missing:
            install = "pip install peft" if self.missing == "peft" else _INSTALL
            missing += f" ({self.missing} is not installed: {install})"
        if self.verdict == "differs":
            return f"it differs from the original library: {', '.join(results[False])}{missing}"
        if self.verdict == "agrees":
            return f"it agrees with the original library: {', '.join(results[True])}{missing}"
        return "it is refused" if self.verdict == "refused" else f"it loads{missing}"

    @property
    def missing(self) -> str:
        """The library without which something was not compared; empty if there is none."""
        comparisons = self.examination.comparisons if self.examination is not None else ()
        return next((each.missing for each in comparisons if each.missing), "")

    @property
    def is_compared(self) -> bool:
        """Whether the answers were compared, with all libraries that this takes."""
        return self.verdict in ("agrees", "differs") and not self.missing

    def to_json(self) -> dict[str, object]:
        return {"verdict": self.verdict, "summary": self.summary, **asdict(self)}

    def print(self, console: Console) -> None:
        console.print(
            f"[bold]{escape(self.model)}[/bold]: [{_COLOURS[self.verdict]}]{escape(self.summary)}",
            soft_wrap=True,
        )
        if self.refused is not None:
            console.print(escape(self.refused), style="red")
        if self.findings is None or self.examination is None:
            return
        console.print(table(rows(self.findings)))
        for title, made in _tables(self.examination):
            console.print(f"\n[bold]{title}[/bold]")
            console.print(made)
        if self.examination.int8:
            console.print(escape(self.examination.int8), highlight=False, soft_wrap=True)
        console.print("\n[bold]config.pbtxt[/bold] (what differs from the defaults)")
        console.print(short_config(self.config), markup=False, highlight=False, soft_wrap=True)


_COLOURS: Mapping[Verdict, str] = {
    "agrees": "green",
    "differs": "red",
    "not compared": "yellow",
    "refused": "red",
}


def short_config(text: str) -> str:
    """Return a config.pbtxt without comments and without settings that have their defaults."""
    return "\n".join(
        line for line in text.splitlines() if line and line[0] != "#" and not _is_default(line)
    )


def _is_default(line: str) -> bool:
    found = _PARAMETER.fullmatch(line)
    if found is None:
        return False
    default = SETTINGS[found[1]].default
    return found[2] == (str(default).lower() if isinstance(default, bool) else str(default))


def _tables(examination: Examination) -> Iterator[tuple[str, Table]]:
    yield "memory", table(examination.memory)
    libraries = " and ".join(
        dict.fromkeys(each.original for each in examination.comparisons if each.original)
    )
    yield f"compared with {libraries or 'nothing'}", _comparison_table(examination.comparisons)
    if examination.speeds:
        speeds = [
            (each.what, f"{each.tokens_per_second:,.0f} tokens/s") for each in examination.speeds
        ]
        yield "speed of this machine, now, without the measurements of a first start", table(speeds)


def _comparison_table(comparisons: tuple[Comparison, ...]) -> Table:
    made = Table("", "difference", "cosine", "", box=None, pad_edge=False)
    made.columns[0].style = "bold"
    results = {True: "[green]agrees[/green]", False: "[red]differs[/red]", None: "not compared"}
    for each in comparisons:
        remark = f": {escape(each.remark)}" if each.remark else f" on {each.count} inputs"
        made.add_row(
            each.what,
            "" if each.difference is None else f"{each.difference:.1e}",
            "" if each.cosine is None else f"{each.cosine:.6f}",
            f"{results[each.agrees]}{remark}",
        )
    return made
