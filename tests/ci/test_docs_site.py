"""The documentation site has every page, and its pages load nothing from other hosts."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from mkdocs.exceptions import PluginError
from pymdownx import slugs

from tests.ci.scripts import PROJECT, load_script

docs_site = load_script("docs_site")


@pytest.mark.parametrize(
    "html",
    [
        '<script async src="https://cdn.example/x.js">',
        "<link rel=stylesheet href=//fonts.example/x.css>",
        '<img alt="" src="http://example/x.png">',
    ],
)
def test_a_page_that_loads_from_another_host_is_refused(html: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))

    with pytest.raises(PluginError, match=r"page\.md loads .*example/x"):
        docs_site.on_post_page(f"<p></p>{html}", page=page)


def test_files_of_the_site_and_links_to_other_hosts_pass() -> None:
    html = '<script src="assets/x.js"></script><a href="https://example"></a><img src="x.svg">'

    assert docs_site.on_post_page(html, page=None) == html


def test_links_of_the_roots_files_lead_to_pages_of_the_site() -> None:
    for name in docs_site.ROOT_FILES:
        text = docs_site.from_docs((PROJECT / name).read_text())
        links = re.findall(r"\]\(([^)#:]+)[^):]*\)", text)

        assert [link for link in links if not (PROJECT / "docs" / link).is_file()] == []


def test_links_of_the_readme_lead_to_files_and_headings() -> None:
    slug = slugs.slugify(case="lower")
    links = re.findall(r"\]\(([^)#:]+)#?([^):]*)\)", (PROJECT / "README.md").read_text())

    assert len(links) > 20
    for name, anchor in links:
        text = (PROJECT / name).read_text()
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert not anchor or anchor in [slug(each.replace("`", ""), "-") for each in headings]


def test_every_decision_is_listed_below_their_index(tmp_path: Path) -> None:
    (tmp_path / "decisions").mkdir()
    for name in ("0002-b.md", "0001-a.md", "README.md"):
        (tmp_path / "decisions" / name).touch()
    nav = [{"Concepts": ["a.md", {"Decisions": ["decisions/README.md"]}]}]

    docs_site.on_config(SimpleNamespace(docs_dir=str(tmp_path), nav=nav))

    listed = ["decisions/README.md", "decisions/0001-a.md", "decisions/0002-b.md"]
    assert nav == [{"Concepts": ["a.md", {"Decisions": listed}]}]


def test_the_index_of_decisions_names_every_page() -> None:
    folder = PROJECT / "docs/decisions"
    index = (folder / "README.md").read_text()

    assert [path.name for path in folder.glob("0*.md") if f"({path.name})" not in index] == []
