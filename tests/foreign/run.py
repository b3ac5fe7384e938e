"""Calls one foreign client, and prints what it returned as JSON.

`python tests/foreign/run.py CLIENT ADDRESSES`, with any Python that has the client; nothing else is needed.
ADDRESSES is JSON, the fields of `calls.table.Addresses`. Without arguments it prints the installed versions.
"""

import asyncio
import json
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from inspect import iscoroutine
from typing import Any

from calls import CALLS, Addresses, Call


def versions() -> dict[str, str]:
    """Return the versions of the clients that this Python has."""
    found = {}
    for client in {each.client for each in CALLS}:
        try:
            found[client] = version(client)
        except PackageNotFoundError:
            continue
    return found


def answers(client: str, addresses: str) -> dict[str, dict[str, Any]]:
    """Return the answer or the error of each call of a client."""
    at = Addresses(**json.loads(addresses))
    return {each.name: _run(each, at) for each in CALLS if each.client == client}


def _run(call: Call, at: Addresses) -> dict[str, Any]:
    try:
        answer = call.run(at)
        return {"answer": asyncio.run(answer) if iscoroutine(answer) else answer}
    # whatever a client raises is the result of its call
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    # clients print too: the result is the last line
    print("\n" + json.dumps(answers(*sys.argv[1:]) if sys.argv[1:] else versions()))
