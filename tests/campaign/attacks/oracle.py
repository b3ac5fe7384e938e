"""Whether an answer matches its constraint, by `re` and `jsonschema`.

`re` takes exponential time for some expressions, and no other thread runs meanwhile. So a process of its own does it,
with a limit of time.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import unicodedata
from collections.abc import Mapping
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

import jsonschema

_SECONDS = 10.0


class Oracle:
    """Checks answers in a process, one after another. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def holds(self, constraint: Mapping[str, Any], text: str) -> bool | None:
        """Return whether a text matches a constraint; None if that cannot be told.

        The check takes too much time, or the text has characters that this Python does not know. The library of
        grammars knows the letters and digits of Unicode 16.

        Args:
            constraint: value of `structured_outputs`, with `regex` or `json`.
            text: a whole answer.
        """
        if any(unicodedata.category(character) == "Cn" for character in text):
            return None
        with self._lock:
            connection = self._connection or self._start()
            connection.send((dict(constraint), text))
            if connection.poll(_SECONDS):
                return bool(connection.recv())
            self._stop()
            return None

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        return self._connection

    def _stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.join()
        self._connection = None


def _serve(connection: Connection) -> None:
    while True:
        try:
            constraint, text = connection.recv()
        except EOFError:
            return
        connection.send(matches(constraint, text))


def matches(constraint: Mapping[str, Any], text: str) -> bool:
    """Return whether a text matches a constraint, see `Oracle.holds`."""
    if "regex" in constraint:
        return bool(re.fullmatch(constraint["regex"], text))
    try:
        jsonschema.validate(json.loads(text), constraint["json"])
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
