"""Every usage of a plan is once in its picture and on its page."""

from itertools import combinations

import pytest

from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen_bench.paper_plan import paper_maps
from varlen_bench.show_plan.__main__ import main
from varlen_bench.show_plan.maps import program_map
from varlen_bench.show_plan.picture import draw, in_units, render

from .commands import run_module

pytestmark = pytest.mark.full

MIB = 2**20


@pytest.fixture
def planned(encoder):
    runner = Runner(Checkpoint.open(encoder), EngineConfig(device="cpu", dtype="fp32"))
    runner.close()
    return runner, [program_map(runner.program, runner.arena.layout, [20, n]) for n in (5, 12)]


def rectangles(maps):
    """Return the rectangles of each map: (offset, first op, end, last op + 1)."""
    return [
        [
            (round(MIB * box.x0), box.y0 + 0.5, round(MIB * box.x1), box.y1 + 0.5)
            for bars in axes.containers
            for box in [bars[0].get_bbox()]
        ]
        for axes in draw("x", maps).axes
    ]


def test_a_map_has_every_usage_of_the_program_where_the_plan_puts_it(planned):
    runner, maps = planned
    for one, tokens in zip(maps, (25, 32), strict=True):
        dims = {"tokens": tokens, "sequences": 2}
        plan = runner.arena.layout.plan(dims)
        expected = {
            (usage.name, offset, usage.size.at(dims), usage.first_op, usage.last_op)
            for buffer, offset in zip(runner.program.buffers, plan.offsets, strict=True)
            for usage in buffer.usages
        }
        assert {
            (area.results[0], area.offset, area.size, area.first_op, area.last_op)
            for area in one.areas
        } == expected
        assert len(one.areas) == len(runner.program.usages)
        assert (one.footprint, one.peak_live) == (plan.footprint, plan.peak_live)
        # every result but the last is named once
        results = [name for area in one.areas for name in area.results]
        assert sorted(results) == sorted(op.results[0].name for op in runner.program.ops[:-1])


@pytest.mark.parametrize("which", ["program", "paper"])
def test_rectangles_show_bytes_and_lifetimes_and_never_overlap(planned, which):
    maps = planned[1] if which == "program" else paper_maps([200, 240])
    for one, drawn in zip(maps, rectangles(maps), strict=True):
        starts = [sum(one.chunks[: area.chunk]) + area.offset for area in one.areas]
        assert drawn == [
            (start, area.first_op, start + area.size, area.last_op + 1)
            for start, area in zip(starts, one.areas, strict=True)
        ]
        for (x, y, end, below), (a, b, other_end, other_below) in combinations(drawn, 2):
            assert end <= a or other_end <= x or below <= b or other_below <= y


def test_the_paper_s_records_need_one_chunk_more_at_240_tokens():
    short, long = paper_maps([200, 240])

    assert short.chunks == (2_949_120, 2_097_152)
    assert long.chunks == (*short.chunks, 2_097_152)
    panels = draw("x", [short, long]).axes
    assert panels[0].get_xlim() == panels[1].get_xlim() == (0, sum(long.chunks) / MIB)


def test_the_page_lists_every_usage(planned):
    page = render("<b>&nasty", planned[1], "A note.")

    assert "<b>&nasty" not in page
    for one in planned[1]:
        assert in_units(one.footprint) in page
        assert one.title in page
        for area in one.areas:
            where = (area.chunk, f"{area.offset:,}", f"{area.size:,}")
            when = (one.ops[area.first_op], one.ops[area.last_op])
            cells = "".join(f"<td>{cell}</td>" for cell in (", ".join(area.results), *when, *where))
            assert cells in page


@pytest.mark.parametrize("size, text", [(5, "5 bytes"), (2048, "2.00 KiB"), (3 << 19, "1.50 MiB")])
def test_sizes_have_the_unit_that_suits_them(size, text):
    assert in_units(size) == text


def test_the_command_writes_a_picture_and_a_page(encoder, tmp_path):
    files = [tmp_path / "plan.svg", tmp_path / "plan.html"]

    outputs = [word for file in files for word in ("--output", file)]
    done = run_module(main, encoder, "--lengths", "9", "--lengths", "5, 17,20", *outputs)

    assert done.exit_code == 0, done.output
    assert "9 tokens: " in done.output
    assert "3 sequences, 42 tokens: " in done.output
    assert files[0].with_stem("plan-dark").exists()
    assert files[1].read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--lengths", "0"], "lengths from 1"),
        (["--lengths", "5,,6"], "lengths from 1"),
        (["--lengths", "many"], "lengths from 1"),
        (["--lengths", "41"], "at most 40"),
        (["--lengths", ",".join(["40"] * 103)], "4120 tokens together; a batch has at most 4096"),
        (["--output", "plan.pdf"], "neither .svg nor .html"),
        (["--output", "nowhere/plan.svg"], "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_drawn_is_refused(encoder, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)

    done = run_module(main, encoder, *arguments)

    assert done.exit_code == 2
    assert says in done.output
    assert not list(tmp_path.glob("plan.*"))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    done = run_module(main, tmp_path)

    assert done.exit_code == 2
    assert "Traceback" not in done.output
