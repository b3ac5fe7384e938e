"""Every figure of the front pages and of their picture has a source.

The source is a measured row, or the file that sets the figure. `claims` builds the sentences with figures: a page has
to contain them, and no other number.
"""

import csv
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from varlen_bench.workers.serving import GOAL_P99_MS

from .pages import PROJECT

README, INDEX, PICTURE = "README.md", "docs/index.md", "docs/concepts/packed.svg"
LONGEST_README = 95
# Runs of the benchmarks: the column `date` without seconds. Loads of servers vary most, so there are three runs.
PADDED = "2026-11-26T17:58"
ENGINES = "2026-11-30T21:57"
SERVED = ("2026-11-30T21:52", "2026-11-30T22:10", "2026-11-30T22:16")
ADOPTED = "2026-11-30T22:08"
LONE = "2026-11-30T22:02"
# Engines as the README names them, by the first part of a system's name.
NAMES = {"varlen": "", "stock": "onnxruntime", "ctranslate2": "CTranslate2", "openvino": "OpenVINO"}
# Code, targets of links, and addresses: their numbers are no figures.
_NO_PROSE = re.compile(
    r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)|(?:https?://|arXiv:)\S+", re.MULTILINE | re.DOTALL
)
# A number that is no part of a name, such as GPT-2, int8 or x86_64.
_NUMBER = re.compile(r"(?<![\w.,-])\d+(?:[.,]\d+)*(?!\w)")
_SVG = "{http://www.w3.org/2000/svg}"


class Figure(NamedTuple):
    """A figure of a system.

    Attributes:
        value: requests/s, tokens/s or milliseconds.
        name: the system, as the README has it.
    """

    value: float
    name: str = ""


def claims(page: str) -> list[str]:
    """Return the sentences, rows of tables and texts of a page that have figures."""
    padded, packed = embedded(PADDED, "transformers-fp32-fifo"), embedded(PADDED, "varlen-fp32")
    lengths = drawn_lengths("padded")
    batch = f"batch of {len(lengths)} texts"
    times = quotient(packed, padded)
    if page == PICTURE:
        padding = 1 - sum(lengths) / (len(lengths) * max(lengths))
        return [
            f"A padded {batch}",
            f"{padded.value:,.0f} tokens/s; {100 * padding:.0f} % of",
            f"{packed.value:,.0f} tokens/s, {times} times as many",
            "fp32, 2 CPU cores, texts of 5 to 500 tokens",
        ]
    speeds = f"{padded.value:,.0f} tokens/s, and its tokens packed at {packed.value:,.0f}"
    if page == INDEX:
        headline = f"{packed.value:,.0f} tokens/s on 2 CPU cores, {times} times as many as"
        return [f"{batch} at {speeds}", headline]
    batcher, tuned = quotient(*against_batcher("int8")), quotient(*against_tuned("int8"))
    return [
        f"{batch} at {speeds}",
        f"{batcher} times as many requests/s as onnxruntime behind the server's padded dynamic batcher",
        f"{tuned} times as many as onnxruntime in its best setting",
        "On 2 CPU cores with AMX",
        "texts of 5 to 500 tokens, on 2 cores of an Intel Xeon with AMX",
        f"Python {supported_pythons()}",
        f"From {first_release()} on",
        f"p99 of at most {GOAL_P99_MS:.0f} ms, the median of {len(SERVED)} runs",
        *table_rows(),
    ]


def table_rows() -> list[str]:
    """Return the rows of the README's table; their first cells without the first words."""
    lone, lone_other = lone_ms("varlen-fp32"), lone_ms("onnxruntime-fp32-single")
    mean = adopted("stock", "mean_tokens").value
    return [
        row("the server's padded dynamic batcher, int8", *against_batcher("int8")),
        row("in its best setting, int8", *against_tuned("int8")),
        row("the same in fp32", *against_tuned("fp32")),
        row(
            f"16 texts of {mean:.0f} tokens on average at once, fp32",
            adopted("varlen"),
            adopted("stock"),
            "texts/s",
        ),
        row("in process, fp32", *in_process("fp32"), "tokens/s"),
        row("the same in bf16", *in_process("bf16"), "tokens/s"),
        row(f"in int8; {cosines('int8')}", *in_process("int8"), "tokens/s"),
        f"a request of 3 tokens alone on the server, fp32 | {lone_other.value / lone.value:.2f}"
        f" | {digits(lone.value)} ms | {cell(lone_other)} |",
    ]


def row(beside: str, ours: Figure, other: Figure, unit: str = "requests/s") -> str:
    """Return a row of the README's table; where varlen wins its ratio is bold."""
    times = quotient(ours, other)
    shown = f"**{times}**" if ours.value > other.value else times
    return f"{beside} | {shown} | {cell(ours)} {unit} | {cell(other)} |"


def cell(figure: Figure) -> str:
    """Return a figure with three digits or more, after the system's name."""
    return f"{figure.name} {digits(figure.value)}".strip()


def digits(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def quotient(ours: Figure, other: Figure) -> str:
    times = ours.value / other.value
    return f"{times:.1f}" if times >= 2 else f"{times:.2f}"


@cache
def rows_of(file: str, run: str | tuple[str, ...]) -> list[dict[str, str]]:
    """Return the rows of a run, or of several."""
    with (PROJECT / "docs/benchmarks" / file).open() as lines:
        return [row for row in csv.DictReader(lines) if row["date"].startswith(run)]


def figure(column: str, file: str, run: str | tuple[str, ...], **cells: str) -> Figure:
    """Return the median of a column over the rows with these cells."""
    found = [float(row[column]) for row in rows_of(file, run) if cells.items() <= row.items()]
    assert found, f"{file} has no row of {run} with {cells}"
    return Figure(median(found), shown_name(cells["system"]))


def shown_name(system: str) -> str:
    """Return a system's engine as the table names it."""
    engine = system.split("-", maxsplit=1)[0]
    return NAMES.get(engine, engine)


def embedded(run: str, system: str) -> Figure:
    """Return a system's tokens/s in the encoder benchmark, long texts."""
    return figure("tokens_per_second", "encoder.csv", run, system=system, workload="uniform")


def sustained(system: str) -> Figure:
    """Return the requests/s that a system sustains on long texts, the median of the runs."""
    return figure(
        "sustained", "serving.csv", SERVED, system=system, lengths="uniform 5-500", kind="result"
    )


def adopted(system: str, column: str = "texts_per_second") -> Figure:
    """Return a figure of a system in fp32 in the benchmark of `varlen adopt`."""
    return figure(column, "adopt.csv", ADOPTED, system=system, dtype="fp32")


def lone_ms(system: str) -> Figure:
    """Return the median time of one request at a time."""
    return figure("p50_ms", "serving.csv", LONE, system=system, lengths="lone 3")


def against_batcher(precision: str) -> tuple[Figure, Figure]:
    """Return what varlen sustains, and a model behind the server's padded dynamic batcher."""
    return against(precision, lambda system: "-dynamic" in system)


def against_tuned(precision: str) -> tuple[Figure, Figure]:
    """Return what varlen sustains, and the other system that sustains most."""
    return against(precision, lambda system: True)


def against(precision: str, is_compared: Callable[[str], bool]) -> tuple[Figure, Figure]:
    """Return what varlen sustains on long texts, and the best other system of this precision."""
    others = {
        row["system"]
        for row in rows_of("serving.csv", SERVED)
        if row["kind"] == "result"
        and f"-{precision}-" in row["system"]
        and is_compared(row["system"])
    }
    return sustained(f"varlen-{precision}"), max(sustained(system) for system in others)


def in_process(precision: str) -> tuple[Figure, Figure]:
    """Return tokens/s of varlen and of the fastest other engine of this precision."""
    others = [
        Figure(float(row["tokens_per_second"]), shown_name(row["system"]))
        for row in engines_of(precision)
        if not row["system"].startswith("varlen")
    ]
    return embedded(ENGINES, f"varlen-{precision}"), max(others)


def cosines(precision: str) -> str:
    """Return the mean cosines to fp32 of varlen and of the fastest other engine."""
    _, fastest = in_process(precision)
    ours, other = (
        next(row["cosine_mean"] for row in engines_of(precision) if is_it(row))
        for is_it in (
            lambda row: row["system"].startswith("varlen"),
            lambda row: float(row["tokens_per_second"]) == fastest.value,
        )
    )
    return f"mean cosine to fp32 {float(ours):.4f}, {fastest.name} {float(other):.4f}"


def engines_of(precision: str) -> list[dict[str, str]]:
    """Return the rows of this precision in the encoder benchmark, long texts."""
    return [
        row
        for row in rows_of("encoder.csv", ENGINES)
        if row["workload"] == "uniform" and f"-{precision}" in row["system"]
    ]


def drawn_lengths(group: str) -> list[float]:
    """Return the widths of a group's bars in the picture."""
    found = ElementTree.parse(PROJECT / PICTURE).getroot().find(f".//{_SVG}g[@id='{group}']")
    assert found is not None
    return [float(each.attrib["width"]) for each in found]


def supported_pythons() -> str:
    """Return the first and the last version of Python that runs the server of `make setup`."""
    oldest = found_in(PROJECT / "pyproject.toml", r'^requires-python = ">=(3\.\d+)')
    newest = found_in(PROJECT / "Makefile", r"^NEWEST_PYTHON := (\d+)$")
    return f"{oldest} to 3.{newest}"


def first_release() -> str:
    """Return the number of the release that comes first."""
    return found_in(PROJECT / "pyproject.toml", r'^fallback-version = "(\d+\.\d+)\.0\.dev0"$')


def found_in(file: Path, pattern: str) -> str:
    found = re.search(pattern, file.read_text(), re.MULTILINE)
    assert found is not None, f"{file} has no {pattern}"
    return found[1]


def page_text(page: str) -> str:
    """Return what a reader sees of a page."""
    if page != PICTURE:
        return _NO_PROSE.sub(" ", (PROJECT / page).read_text())
    parts = ElementTree.parse(PROJECT / page).getroot().iter()
    texts = [part for part in parts if part.tag in (f"{_SVG}title", f"{_SVG}text")]
    return " ".join("".join(text.itertext()) for text in texts)


def unclaimed(text: str, sentences: Sequence[str]) -> list[str]:
    """Return the numbers of a text that are in none of the sentences."""
    for sentence in sentences:
        text = text.replace(sentence, "")
    return _NUMBER.findall(text)


@pytest.mark.parametrize("page", [README, INDEX, PICTURE])
def test_a_page_has_the_figures_of_the_rows_and_no_others(page):
    text, sentences = page_text(page), claims(page)

    assert [sentence for sentence in sentences if sentence not in text] == []
    assert unclaimed(text, sentences) == []


def test_the_picture_packs_the_tokens_that_it_pads():
    assert sum(drawn_lengths("packed")) == pytest.approx(sum(drawn_lengths("padded")))


@pytest.mark.parametrize(
    "text, found",
    [
        ("GPT-2 in int8 on x86_64: 2.4 times", []),
        ("2.4 times, then 1,096.5 and 3 %.", ["1,096.5", "3"]),
        ("2.5 times", ["2.5"]),
    ],
)
def test_a_number_outside_of_the_sentences_is_found(text, found):
    assert unclaimed(text, ["2.4 times"]) == found


def test_the_readme_is_short():
    assert len((PROJECT / README).read_text().splitlines()) <= LONGEST_README
