"""Hooks of mkdocs: pages outside of docs/, list and rank of decisions, tables, checks.

CHANGELOG.md and CONTRIBUTING.md stay where code hosts expect them. The site loads nothing from other hosts, so it
works without a network.
"""

import re
from itertools import cycle
from pathlib import Path
from typing import Any, cast

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Page of the site by file of the project's root.
ROOT_FILES = {"CHANGELOG.md": "project/changelog.md", "CONTRIBUTING.md": "project/contributing.md"}

# Factor of a decision's scores in the search. A title counts 1000 times: even a decision's title ranks below a text.
DECISION_BOOST = 1e-6
# A table with a longer cell, in characters, is stacked on phones, where its columns would be as narrow as a word.
_LONGEST_COLUMN = 40

_LOADS = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*?\s(?:src|href|srcset)=["']?((?:https?:)?//[^"'\s>]+)"""
)


def on_config(config: MkDocsConfig, **_: Any) -> MkDocsConfig:
    """List every decision page below the index of decisions."""
    folder = Path(config.docs_dir)
    pages = [path.relative_to(folder).as_posix() for path in folder.glob("decisions/[0-9]*.md")]
    _section(config.nav, "Decisions").extend(sorted(pages))
    return config


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages of `ROOT_FILES`."""
    for name, page in ROOT_FILES.items():
        text = (Path(config.config_file_path).parent / name).read_text()
        files.append(File.generated(config, page, content=from_docs(text)))
    return files


def from_docs(text: str) -> str:
    """Return Markdown of the project's root with links as a page in docs/project has them."""
    return text.replace("](docs/", "](../")


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rank decisions last in the search."""
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"boost": DECISION_BOOST}
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Return a page whose tables can be stacked on phones; see `stackable`."""
    return re.sub("<table>.*?</table>", lambda found: stackable(found[0]), html, flags=re.DOTALL)


def stackable(table: str) -> str:
    """Return a table with the column's name in each cell, for phones.

    site.css shows it there. A table of short cells stays as it is, and scrolls.
    """
    head, _, body = table.partition("</thead>")
    names = [_text(cell) for cell in re.findall(r"<th\b.*?>(.*?)</th>", head, re.DOTALL)]
    cells = re.findall("<td.*?>(.*?)</td>", body, re.DOTALL)
    if max((len(_text(cell)) for cell in cells), default=0) <= _LONGEST_COLUMN:
        return table
    labels = cycle(names)
    body = re.sub("<td", lambda _: f'<td data-label="{next(labels)}"', body)
    return f"{head}</thead>{body}".replace("<table>", "<table data-stacked>", 1)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Refuse a page that loads a file from another host."""
    if found := loaded_elsewhere(output):
        raise PluginError(f"{page.file.src_uri} loads {found[0]}; allowed: files of the site")
    return output


def loaded_elsewhere(html: str) -> list[str]:
    """Return the addresses on other hosts that a browser loads with a page."""
    return _LOADS.findall(html)


def _text(cell: str) -> str:
    """Return the text of a cell without its tags, as the value of an attribute."""
    return re.sub("<.*?>", "", cell).replace('"', "&quot;").strip()


def _section(nav: Any, title: str) -> list[Any]:
    """Return the entries of the section with this title."""
    for entry in nav or []:
        for name, inner in entry.items() if isinstance(entry, dict) else []:
            if name == title:
                return cast(list[Any], inner)
            if isinstance(inner, list) and (found := _section(inner, title)):
                return found
    return []
