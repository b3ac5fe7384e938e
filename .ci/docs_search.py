"""Hooks of mkdocs for the search: ranks, words of `extra.search_words`, entries of messages."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

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
# The longest anchor of a message, in characters.
_ANCHOR_LENGTH = 80


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Return a page whose messages have anchors."""
    if not page.file.src_uri.startswith(MESSAGES):
        return html
    return re.sub(r"<tr>(?=\s*<td.*?>(.*?)</td>)", lambda row: f'<tr id="{_anchor(row[1])}">', html)


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


def _anchor(message: str) -> str:
    """Return the anchor of a message: its beginning, so that other edits keep it."""
    text = unescape(re.sub("<.*?>", "", message)).lower()
    return re.sub("[^a-z0-9]+", "-", text).strip("-")[:_ANCHOR_LENGTH]


def _address(location: str) -> str:
    """Return the address on the site of a page of docs/, or of its heading."""
    page, hash_sign, anchor = location.partition("#")
    return page.replace("README.md", "index.md").replace(".md", ".html") + hash_sign + anchor
