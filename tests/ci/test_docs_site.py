"""The documentation site has every page, and its pages load nothing from other hosts."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from mkdocs.exceptions import PluginError
from pymdownx import slugs

from tests.ci.scripts import PROJECT, load_script

from .site_search import SiteSearch

pytestmark = pytest.mark.full

docs_site, docs_search = load_script("docs_site"), load_script("docs_search")
# Pictures drawn by hand. Pictures of programs are wide: they scroll on phones and keep their size.
DRAWN = [path for path in PROJECT.glob("docs/*/*.svg") if ' font-size="' in path.read_text()]
# Pixels for text and pictures where the window has 390.
COLUMN_OF_A_PHONE = 358
# First result of what people type into the search.
FIRST_RESULTS = {
    "timeout": "operating/timeouts.html",
    "api key": "tasks/gateway.html#limits-and-safety",
    "quantize": "operating/int8.html",
    "GPU": "operating/gpu.html",
    "LoRA": "concepts/adapters.html",
    "late chunking": "tasks/long_documents.html",
    "truncate": "tasks/embeddings.html#long-texts",
    "install": "start/install.html",
    "docker": "start/install.html",
    "rerank": "tasks/reranking.html",
    "embeddings": "tasks/embeddings.html",
    "streaming": "tasks/generation.html",
    "out of memory": "reference/troubleshooting.html#out-of-memory",
    "int8": "operating/int8.html",
    "function calling": "tasks/gateway.html#tools",
    "max_batch_tokens": "reference/configuration.html#max_batch_tokens",
}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """The folder of a site with two broken links, and what `mkdocs` says about it."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("mkdocs.yml", "Makefile", *docs_site.ROOT_FILES):
        shutil.copy(PROJECT / name, folder)
    for name in ("docs", ".ci"):
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("*.csv"))
    with (folder / "docs/index.md").open("a") as page:
        page.write("\n[no page](no_page.md) [no heading](reference/wire.md#no-heading)\n")
    command = re.search(r"mkdocs (build.*)$", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    assert command

    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", *command[1].split()],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode
    return folder / "site", run.stderr


def test_a_link_or_an_anchor_that_leads_nowhere_fails_the_build(build):
    _, said = build

    assert "link 'no_page.md', but the target is not found" in said
    assert "'reference/wire.md#no-heading'" in said


@pytest.fixture(scope="module")
def search(build):
    site, _ = build
    return SiteSearch(site)


@pytest.mark.parametrize("query, page", FIRST_RESULTS.items(), ids=FIRST_RESULTS)
def test_a_search_finds_first_the_page_that_answers(query, page, search):
    assert search.first_results(query)[0] == page


@pytest.mark.parametrize(
    "message",
    [
        "the queue is full: 130017 tokens wait, the request has 512",
        "row 3: text has 1034 tokens; this model takes at most 256 (truncate=true cuts it)",
        '"unexpected inference input"',
        "Stub process 'e5_0' is not healthy.",
        "config.json has model_type gemma3; this version serves: bert",
    ],
)
def test_a_message_that_is_pasted_finds_its_row(message, search):
    words = re.findall("[a-z]{4,}", message)[:2]

    found = [each.partition("#") for each in search.first_results(message)[:3]]

    anchors = [anchor for page, _, anchor in found if page.startswith(docs_search.MESSAGES)]
    assert any(all(word in anchor for word in words) for anchor in anchors)


def test_every_row_of_a_page_of_messages_has_its_own_anchor(build):
    site, _ = build
    index = json.loads((site / "search/search_index.json").read_text())

    found = [entry["location"] for entry in index["docs"]]

    assert len([each for each in found if each.startswith(docs_search.MESSAGES)]) > 300
    assert len(set(found)) == len(found)
    assert docs_search.message_entries("a.html", "<tr><td>1</td><td>2</td></tr>") == []


def test_the_search_ranks_decisions_below_all_other_pages(build):
    site, _ = build
    index = json.loads((site / "search/search_index.json").read_text())

    boosts = {entry["location"]: entry["boost"] for entry in index["docs"]}

    decisions = {boost for page, boost in boosts.items() if page.startswith("decisions/")}
    others = {boost for page, boost in boosts.items() if not page.startswith("decisions/")}
    # the boost of a page multiplies the boost of a field: a match in the title of a decision and in a text
    fields = index["config"]["fields"]
    assert fields["title"]["boost"] * max(decisions) < fields["text"]["boost"] * min(others) / 100


def test_words_of_the_search_lead_to_a_page_that_exists(tmp_path):
    (tmp_path / "search").mkdir()
    (tmp_path / "search/search_index.json").write_text('{"docs": [{"location": "a.html"}]}')
    extra = {"search_words": {"a.md": ["one"], "b.md#two": ["two"]}}
    config = SimpleNamespace(site_dir=str(tmp_path), extra=extra)

    with pytest.raises(PluginError, match="search_words has b.md#two, which is no page"):
        docs_search.on_post_build(config)


def test_tables_with_long_cells_name_the_column_of_each_cell(build):
    site, _ = build

    inputs = (site / "reference/wire.html").read_text().partition("<table data-stacked>")[2]
    row = inputs.partition("<tbody>")[2].partition("</tr>")[0]
    labels = re.findall('<td data-label="(.*?)">', row)

    assert labels == ["input", "type", "shape", "tasks", "meaning"]


def test_a_table_of_short_cells_stays_as_it_is():
    head = "<table>\n<thead>\n<tr>\n<th>load</th>\n<th>p99</th>\n</tr>\n</thead>"
    table = f"{head}\n<tbody>\n<tr>\n<td>0.6</td>\n<td>12 ms</td>\n</tr>\n</tbody>\n</table>"

    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    config = SimpleNamespace(docs_dir="docs")
    long_cell = table.replace("12 ms", "slow " * 20)

    assert docs_site.on_page_content(table, page=page, config=config) == table
    stacked = docs_site.on_page_content(long_cell, page=page, config=config)
    assert 'data-label="p99"' in stacked


@pytest.mark.parametrize(
    "width, html, scrolls",
    [
        (520, '<img alt="a" src="a.svg" />', False),
        (1000, '<img alt="a" src="a.svg" />', True),
        (1000, '<picture>\n<source srcset="b.svg">\n<img src="a.svg">\n</picture>', True),
    ],
)
def test_a_wide_picture_scrolls_on_phones(width, html, scrolls, tmp_path):
    (tmp_path / "a.svg").write_text(f'<svg viewBox="0 0 {width} 400"></svg>')
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    config = SimpleNamespace(docs_dir=str(tmp_path))

    actual = docs_site.on_page_content(html, page=page, config=config)

    framed = f'<span class="picture" style="--width: {width}px">{html}</span>'
    assert actual == (framed if scrolls else html)


@pytest.mark.parametrize("picture", DRAWN, ids=lambda path: path.name)
def test_the_text_of_a_drawn_picture_is_readable_on_a_phone(picture):
    text = picture.read_text()
    width = float(re.findall(r'viewBox="0 0 ([0-9.]+)', text)[0])

    sizes = [float(size) for size in re.findall(r'font-size[=:]"? ?([0-9.]+)', text)]

    assert sizes
    assert min(sizes) * COLUMN_OF_A_PHONE / width >= 10


@pytest.mark.parametrize(
    "html",
    [
        '<script async src="https://cdn.example/x.js">',
        "<link rel=stylesheet href=//fonts.example/x.css>",
        '<img alt="" src="http://example/x.png">',
    ],
)
def test_a_page_that_loads_from_another_host_is_refused(html):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))

    with pytest.raises(PluginError, match=r"page\.md loads .*example/x"):
        docs_site.on_post_page(f"<p></p>{html}", page=page)


def test_files_of_the_site_and_links_to_other_hosts_pass():
    html = '<script src="assets/x.js"></script><a href="https://example"></a><img src="x.svg">'

    assert docs_site.on_post_page(html, page=None) == html


def test_links_of_the_roots_files_lead_to_pages_of_the_site():
    for name in docs_site.ROOT_FILES:
        text = docs_site.from_docs((PROJECT / name).read_text())
        links = re.findall(r"\]\(([^)#:]+)[^):]*\)", text)

        pages = {Path(page).name for page in docs_site.ROOT_FILES.values()}
        found = [(PROJECT / "docs/project" / link).is_file() or link in pages for link in links]
        assert all(found), links


def test_links_of_the_readme_lead_to_files_and_headings():
    slug = slugs.slugify(case="lower")
    links = re.findall(r"\]\(([^)#:]+)#?([^):]*)\)", (PROJECT / "README.md").read_text())

    assert len(links) > 20
    for name, anchor in links:
        text = (PROJECT / name).read_text()
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert not anchor or anchor in [slug(each.replace("`", ""), "-") for each in headings]


def test_every_decision_is_listed_below_their_index(tmp_path):
    (tmp_path / "decisions").mkdir()
    for name in ("0002-b.md", "0001-a.md", "README.md"):
        (tmp_path / "decisions" / name).touch()
    nav = [{"Concepts": ["a.md", {"Decisions": ["decisions/README.md"]}]}]

    docs_site.on_config(SimpleNamespace(docs_dir=str(tmp_path), nav=nav))

    listed = ["decisions/README.md", "decisions/0001-a.md", "decisions/0002-b.md"]
    assert nav == [{"Concepts": ["a.md", {"Decisions": listed}]}]


def test_the_index_of_decisions_names_every_page():
    folder = PROJECT / "docs/decisions"
    index = (folder / "README.md").read_text()

    assert [path.name for path in folder.glob("0*.md") if f"({path.name})" not in index] == []
