"""Hooks of mkdocs: pages from outside of docs/, the list of decisions, checks.

CHANGELOG.md and CONTRIBUTING.md stay where code hosts expect them. The site loads nothing from other hosts, so it
works without a network.
"""

import re
from pathlib import Path
from typing import Any, cast

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Page of the site by file of the project's root.
ROOT_FILES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}

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
    """Return Markdown of the project's root with links as a page in docs/ has them."""
    return text.replace("](docs/", "](")


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Refuse a page that loads a file from another host."""
    if found := loaded_elsewhere(output):
        raise PluginError(f"{page.file.src_uri} loads {found[0]}; allowed: files of the site")
    return output


def loaded_elsewhere(html: str) -> list[str]:
    """Return the addresses on other hosts that a browser loads with a page."""
    return _LOADS.findall(html)


def _section(nav: Any, title: str) -> list[Any]:
    """Return the entries of the section with this title."""
    for entry in nav or []:
        for name, inner in entry.items() if isinstance(entry, dict) else []:
            if name == title:
                return cast(list[Any], inner)
            if isinstance(inner, list) and (found := _section(inner, title)):
                return found
    return []
