"""The search of the documentation site, as a browser runs it."""

import json
from pathlib import Path
from typing import Any

import quickjs

# What the theme's script of the search expects of a browser: it gets messages, and posts answers.
_BROWSER = """
var self = globalThis, console = { log() {}, warn() {} }, receive, answer;
function addEventListener(_, listener) { receive = listener; }
function postMessage(message) { answer = JSON.stringify(message); }
"""
# Types of the script's messages.
_SETUP, _QUERY = 0, 2


class SiteSearch:
    """Answers searches with the theme's own script and the index of a built site.

    Args:
        site: folder of the site.
    """

    def __init__(self, site: Path) -> None:
        [script] = site.glob("assets/javascripts/workers/search.*.js")
        index = json.loads((site / "search/search_index.json").read_text())
        self._context = quickjs.Context()
        self._context.eval(_BROWSER + script.read_text())
        self._post(_SETUP, {**index, "options": {}})

    def first_results(self, query: str) -> list[str]:
        """Return the best result of each page, in the order of the site."""
        found = self._post(_QUERY, query)["data"]["items"]
        return [results[0]["location"] for results in found]

    def _post(self, kind: int, data: object) -> Any:
        self._context.eval(f"receive({{ data: {json.dumps({'type': kind, 'data': data})} }})")
        while self._context.execute_pending_job():
            pass
        return json.loads(self._context.eval("answer"))
