"""The trace context of a caller, which requests pass on to the server.

Spans of the caller, the server and the backend then form one trace.
Source: W3C Trace Context, https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

# Version, trace id, parent id and flags; ids of zeros are invalid.
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
# At least so much has to be passed on, and the server limits all headers together.
_STATE = re.compile(r"[ -~]{1,512}")

_headers: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("trace_headers", default=())


@contextmanager
def trace_context(parents: Sequence[str], states: Sequence[str]) -> Iterator[None]:
    """Give the requests made inside the context in these headers of a caller.

    Args:
        parents: values of the header traceparent. Unless it is one valid value, nothing is passed on.
        states: values of the header tracestate, whose list may be split over several.
    """
    headers: dict[str, str] = {}
    if len(parents) == 1 and _PARENT.fullmatch(parents[0]):
        headers["traceparent"] = parents[0]
        state = ",".join(states)
        if _STATE.fullmatch(state):
            headers["tracestate"] = state
    token = _headers.set(tuple(headers.items()))
    try:
        yield
    finally:
        _headers.reset(token)


def trace_headers() -> dict[str, str]:
    """Return the headers of a request that is sent now."""
    return dict(_headers.get())
