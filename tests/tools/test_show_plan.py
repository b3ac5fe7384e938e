"""Pictures of plans: every usage once, where and when it is, and nothing of a checkpoint's name in the markup."""

import re
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.models.checkpoint import Checkpoint
from varlen_tools.show_plan.__main__ import main
from varlen_tools.show_plan.maps import paper_maps, program_map
from varlen_tools.show_plan.page import render
from varlen_tools.show_plan.picture import draw, in_units

SVG = "{http://www.w3.org/2000/svg}"
app = typer.Typer()
app.command()(main)


@pytest.fixture
def drawn(encoder):
    runner = Runner(Checkpoint.open(encoder), EngineConfig(device="cpu", dtype="fp32"))
    runner.close()
    return runner, [program_map(runner.program, runner.arena.layout, [20, n]) for n in (5, 12)]


def rectangles(svg):
    """Return, for each map in an SVG, its chunks and areas as (x, y, width, height)."""
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        if group.get("class") == "map":
            yield (
                [box(rect) for rect in group.findall(f"{SVG}rect[@class='chunk']")],
                [box(area.find(f"{SVG}rect")) for area in group.findall(f"{SVG}g[@class='area']")],
            )


def box(rect):
    return tuple(float(rect.get(key)) for key in ("x", "y", "width", "height"))


def test_a_map_has_every_usage_of_the_program_where_the_plan_puts_it(drawn):
    runner, maps = drawn
    for one, tokens in zip(maps, (25, 32), strict=True):
        dims = {"tokens": tokens, "sequences": 2}
        plan = runner.arena.layout.plan(dims)
        expected = {
            (usage.name, offset, usage.size.at(dims), usage.first_op, usage.last_op)
            for buffer, offset in zip(runner.program.buffers, plan.offsets, strict=True)
            for usage in buffer.usages
        }
        assert {
            (area.written[0], area.offset, area.size, area.first_op, area.last_op)
            for area in one.areas
        } == expected
        assert len(one.areas) == len(runner.program.usages)
        assert (one.footprint, one.peak_live) == (plan.footprint, plan.peak_live)
        # every result but the last is named once
        written = [name for area in one.areas for name in area.written]
        assert sorted(written) == sorted(op.results[0].name for op in runner.program.ops[:-1])


def test_rectangles_are_as_wide_as_bytes_and_as_tall_as_lifetimes(drawn):
    _, maps = drawn
    for one, (chunks, areas) in zip(maps, rectangles(draw("x", maps)), strict=True):
        (left, top, width, height), *_ = chunks
        scale, row = width / one.chunks[0], height / len(one.ops)
        for area, (x, y, wide, tall) in zip(one.areas, areas, strict=True):
            assert x == pytest.approx(left + area.offset * scale, abs=0.02)
            assert wide == pytest.approx(area.size * scale, abs=0.02)
            assert y == pytest.approx(top + area.first_op * row)
            assert tall == pytest.approx((area.last_op - area.first_op + 1) * row)


@pytest.mark.parametrize("which", ["program", "paper"])
def test_no_two_rectangles_overlap(drawn, which):
    maps = drawn[1] if which == "program" else paper_maps([200, 240])
    for _, areas in rectangles(draw("x", maps)):
        for (x, y, wide, tall), (a, b, across, down) in combinations(areas, 2):
            apart_in_space = x + wide <= a + 0.02 or a + across <= x + 0.02
            assert apart_in_space or y + tall <= b or b + down <= y


def test_the_paper_s_records_need_one_chunk_more_at_240_tokens():
    short, long = paper_maps([200, 240])

    assert short.chunks == (2_949_120, 2_097_152)
    assert long.chunks == (*short.chunks, 2_097_152)
    assert [len(chunks) for chunks, _ in rectangles(draw("x", [short, long]))] == [2, 3]


def test_all_maps_of_a_picture_have_one_scale():
    maps = paper_maps([200, 240])
    widths = [[width for _, _, width, _ in chunks] for chunks, _ in rectangles(draw("x", maps))]

    assert widths[0] == pytest.approx(widths[1][:2])


def test_the_page_says_the_figures_and_shows_names_as_text(drawn):
    page = render("<b>&nasty", drawn[1], "A note.")

    assert "<b>&nasty" not in page
    assert "&lt;b&gt;&amp;nasty" in page
    for one in drawn[1]:
        assert in_units(one.footprint) in page
        assert one.title in page
    assert "written over in place by 6:activate" in page
    svg = re.search(r"<svg.*</svg>", page, re.DOTALL)
    assert svg
    ElementTree.fromstring(svg[0])


def test_a_name_is_escaped_once(drawn):
    named = replace(drawn[1][0].areas[0], name="a<b&c", size=drawn[1][0].footprint)
    svg = draw("x", [replace(drawn[1][0], areas=(named,))])

    labels = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]

    assert "a<b&c" in labels


@pytest.mark.parametrize("size, text", [(5, "5 bytes"), (2048, "2.00 KiB"), (3 << 19, "1.50 MiB")])
def test_sizes_are_written_as_people_do(size, text):
    assert in_units(size) == text


def test_the_command_writes_a_picture_and_a_page(encoder, tmp_path):
    files = [tmp_path / "plan.svg", tmp_path / "plan.html"]

    done = CliRunner().invoke(
        app,
        [
            str(encoder),
            *("--lengths", "9"),
            *("--lengths", "5, 17,20"),
            *(word for file in files for word in ("--output", str(file))),
        ],
    )

    assert done.exit_code == 0, done.output
    assert "9 tokens: " in done.output
    assert "3 sequences, 42 tokens: " in done.output
    ElementTree.fromstring(files[0].read_text())
    assert files[1].read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--lengths", "0"], "lengths from 1"),
        (["--lengths", "5,,6"], "lengths from 1"),
        (["--lengths", "many"], "lengths from 1"),
        (["--lengths", "41"], "at most 40"),
        (["--lengths", ",".join(["40"] * 103)], "4120 tokens together; a batch has at most 4096"),
        (["--output", "plan.png"], "neither .svg nor .html"),
        (["--output", "nowhere/plan.svg"], "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_drawn_is_refused(encoder, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)

    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(encoder), *arguments])

    assert done.exit_code == 2
    assert says in done.output
    assert not list(tmp_path.glob("plan.*"))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(tmp_path)])

    assert done.exit_code == 2
    assert "Traceback" not in done.output
