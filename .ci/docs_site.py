"""Hooks of mkdocs: pages outside of docs/, decisions, tables, pictures, the search, checks.

The files of `ROOT_FILES` stay where code hosts expect them. The site loads nothing from other hosts, so it
works without a network.
"""

import json
import re
import time
from html import unescape
from itertools import cycle
from pathlib import Path
from typing import Any, cast

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Page of the site by file of the project's root.
ROOT_FILES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}

# Factor of the scores of pages in the search by the beginning of their addresses, longer ones first; 1 for others.
BOOSTS = {
    # a setting is a heading there
    "reference/configuration": 2,
    "reference/errors": 0.5,
    "start/": 1.2,
    "tasks/": 1.2,
    "operating/": 1.1,
    "concepts/": 0.3,
    "benchmarks/": 0.03,
    "project/": 0.01,
    # even a title there ranks below a text elsewhere
    "decisions/": 1e-6,
}
# Folder of the pages that list messages. The search finds each message by itself: first if it is pasted, and behind
# pages for one of its words.
MESSAGES = "reference/errors"
MESSAGE_BOOST = 1.3
# A table with a longer cell, in characters, is stacked on phones, where its columns would be as narrow as a word.
_LONGEST_COLUMN = 40
# A wider picture, in its own pixels, is not shrunk on phones, where its text would be too small.
_WIDEST_PICTURE = 600
# The longest anchor of a message, in characters.
_ANCHOR_LENGTH = 80

# A picture of the site, with its tag or tags and its path.
_PICTURE = re.compile(
    r'(?:<picture>(?:(?!</picture>).)*?)?<img [^>]*src="([^":]+\.svg)"[^>]*>(?:\s*</picture>)?',
    re.DOTALL,
)
_PROGRESS_SECONDS = 3
# Pages that have been read, and the time of the next line.
_progress: dict[str, float] = {"pages": 0, "next": time.monotonic() + _PROGRESS_SECONDS}

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
    for name, page in ROOT_FILES.items():
        text = text.replace(f"]({name}", f"]({Path(page).name}")
    return text.replace("](docs/", "](../")


def on_page_markdown(*_: Any, files: Files, **__: Any) -> None:
    """Print every few seconds how many pages have been read."""
    _progress["pages"] += 1
    if time.monotonic() >= _progress["next"]:
        _progress["next"] = time.monotonic() + _PROGRESS_SECONDS
        print(f"docs: page {_progress['pages']} of {len(files.documentation_pages())}", flush=True)


def on_page_content(html: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Return a page whose tables and pictures fit on phones, and whose messages have anchors."""
    html = re.sub("<table>.*?</table>", lambda found: stackable(found[0]), html, flags=re.DOTALL)
    folder = Path(config.docs_dir, page.file.src_uri).parent
    html = _PICTURE.sub(lambda found: scrollable(found[0], folder / found[1]), html)
    if page.file.src_uri.startswith(MESSAGES):
        html = re.sub(
            r"<tr>(?=\s*<td.*?>(.*?)</td>)", lambda row: f'<tr id="{_anchor(row[1])}">', html
        )
    return html


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Rank the results of the search: by folder, by `extra.search_words`, by message."""
    site = Path(config.site_dir)
    path = site / "search/search_index.json"
    index = json.loads(path.read_text())
    entries = {entry["location"]: entry for entry in index["docs"]}
    for location, words in config.extra["search_words"].items():
        if _address(location) not in entries:
            raise PluginError(f"search_words has {location}, which is no page and no heading")
        entries[_address(location)]["tags"] = words
    for entry in index["docs"]:
        location = entry["location"]
        entry["boost"] = next((BOOSTS[each] for each in BOOSTS if location.startswith(each)), 1)
    for page in sorted((site / MESSAGES).glob("*.html")):
        index["docs"] += message_entries(page.relative_to(site).as_posix(), page.read_text())
    path.write_text(json.dumps(index, separators=(",", ":")))


def message_entries(location: str, html: str) -> list[dict[str, Any]]:
    """Return an entry of the search for each message, which is its title."""
    rows = re.findall(r'<tr id="(.*?)">\s*<td.*?>(.*?)</td>\s*<td.*?>(.*?)</td>', html, re.DOTALL)
    return [
        {
            "location": f"{location}#{name}",
            "title": message,
            "text": remedy,
            "boost": MESSAGE_BOOST,
        }
        for name, message, remedy in rows
    ]


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


def scrollable(html: str, path: Path) -> str:
    """Return a picture in a frame that scrolls on phones, if it is wide.

    Args:
        html: its tags.
        path: its file.
    """
    text = path.read_text()
    width = re.findall(r'viewBox="0 0 ([0-9.]+)', text)[0]
    if float(width) <= _WIDEST_PICTURE:
        return html
    # matplotlib counts in points
    unit = "pt" if f'width="{width}pt"' in text else "px"
    return f'<span class="picture" style="--width: {width}{unit}">{html}</span>'


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


def _anchor(message: str) -> str:
    """Return the anchor of a message: its beginning, so that other edits keep it."""
    return re.sub("[^a-z0-9]+", "-", unescape(_text(message)).lower()).strip("-")[:_ANCHOR_LENGTH]


def _address(location: str) -> str:
    """Return the address on the site of a page of docs/, or of its heading."""
    page, hash_sign, anchor = location.partition("#")
    return page.replace("README.md", "index.md").replace(".md", ".html") + hash_sign + anchor


def _section(nav: Any, title: str) -> list[Any]:
    """Return the entries of the section with this title."""
    for entry in nav or []:
        for name, inner in entry.items() if isinstance(entry, dict) else []:
            if name == title:
                return cast(list[Any], inner)
            if isinstance(inner, list) and (found := _section(inner, title)):
                return found
    return []
