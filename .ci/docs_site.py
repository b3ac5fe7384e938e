"""Hooks of mkdocs: pages outside of docs/, decisions, tables and pictures on phones, checks.

The files of `ROOT_FILES` stay where code hosts expect them. The site loads nothing from other hosts, so it
works without a network.
"""

import re
import time
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

# A table with a longer cell, in characters, is stacked on phones, where its columns would be as narrow as a word.
_LONGEST_COLUMN = 40
# A wider picture, in its own pixels, is not shrunk on phones, where its text would be too small.
_WIDEST_PICTURE = 600
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
    """Return a page whose tables and pictures fit on phones."""
    html = re.sub("<table>.*?</table>", lambda found: stackable(found[0]), html, flags=re.DOTALL)
    folder = Path(config.docs_dir, page.file.src_uri).parent
    return _PICTURE.sub(lambda found: scrollable(found[0], folder / found[1]), html)


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


def _section(nav: Any, title: str) -> list[Any]:
    """Return the entries of the section with this title."""
    for entry in nav or []:
        for name, inner in entry.items() if isinstance(entry, dict) else []:
            if name == title:
                return cast(list[Any], inner)
            if isinstance(inner, list) and (found := _section(inner, title)):
                return found
    return []
