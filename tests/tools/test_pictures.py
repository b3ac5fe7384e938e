"""Pictures and pages in both themes, the same bytes each time."""

import base64
import re
import sys
from xml.etree import ElementTree

import pytest
import typer

from varlen_bench import html_page, pictures
from varlen_bench.profile_ops.__main__ import main as profile
from varlen_bench.show_plan.__main__ import main as plan

from .commands import run_module

pytestmark = pytest.mark.full

SVG = "{http://www.w3.org/2000/svg}"


def draw():
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot([1, 2], [3, 4], label="a<b&c")
    figure.legend()
    return figure


def test_a_picture_is_written_in_both_themes_with_the_same_bytes_each_time(tmp_path):
    light, dark = pictures.write(draw, tmp_path / "x.svg")

    assert (light.name, dark.name) == ("x.svg", "x-dark.svg")
    assert light.read_bytes() != dark.read_bytes()
    assert pictures.render(draw, "dark") == dark.read_bytes()
    texts = [text.text for text in ElementTree.parse(light).iter(f"{SVG}text")]
    assert "a<b&c" in texts


def test_a_page_embeds_both_themes_and_shows_names_as_text(tmp_path):
    path = tmp_path / "x.html"

    pictures.write_outputs(
        [path], draw, lambda: html_page.page("<b>&", [pictures.embedded(draw, '"<i>')])
    )

    page = path.read_text()
    assert page.count("&lt;b&gt;&amp;") == 2
    assert "<i>" not in page
    embedded = re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", page)
    assert [base64.b64decode(svg) for svg in embedded] == [
        pictures.render(draw, theme) for theme in ("dark", "light")
    ]


def test_without_matplotlib_an_output_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    remedy = r"pictures need matplotlib: pip install 'varlen\[pictures\]'"

    assert pictures.check_outputs(None) is None
    with pytest.raises(typer.BadParameter, match=remedy):
        pictures.check_outputs([tmp_path / "x.svg"])
    with pytest.raises(pictures.PictureError, match=remedy):
        pictures.write_outputs([tmp_path / "x.svg"], draw, str)


@pytest.mark.parametrize("main", [plan, profile])
def test_a_command_without_matplotlib_does_not_open_its_model(tmp_path, monkeypatch, main):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    run = run_module(main, tmp_path, "--output", tmp_path / "x.html")

    assert run.exit_code == 2
    assert "pictures need matplotlib" in run.stderr


@pytest.mark.parametrize(
    "name, message",
    [("x.pdf", "neither .svg nor .html"), ("nowhere/x.svg", "there is no folder")],
)
def test_an_output_that_cannot_be_written_is_refused(tmp_path, name, message):
    with pytest.raises(typer.BadParameter, match=message):
        pictures.check_outputs([tmp_path / "x.html", tmp_path / name])
