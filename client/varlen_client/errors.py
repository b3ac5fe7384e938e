"""Every error that this client raises, in one tree.

    VarlenClientError
    ├── InvalidUrl          the server's address cannot be read (also a ValueError)
    ├── InvalidRequest      the caller's fault: the input or a parameter was refused
    ├── ModelNotFound       the server has no such model, or several and none was chosen
    ├── ServerUnavailable   queue full, model not ready, no connection; was retried before
    ├── DeadlineMissed      the server cannot answer within the caller's `deadline_ms`; never retried
    ├── RequestTimeout      the caller's `timeout` passed; never retried
    ├── RequestCancelled    the server dropped the request before it ran
    └── ServerError         the server failed, or its answer is not what the wire allows

Cancelling a call from asyncio raises `asyncio.CancelledError`, as everywhere.
"""

# The names say what happened; the root of the tree carries the suffix.

from __future__ import annotations


class VarlenClientError(Exception):
    """Root of the tree.

    `rows` are the rows of the caller's input that it is about; None when it is about none.
    """

    def __init__(self, message: str, *, rows: range | None = None) -> None:
        super().__init__(message)
        self.rows = rows


class InvalidUrl(VarlenClientError, ValueError):
    """The server's address cannot be read."""


class InvalidRequest(VarlenClientError):
    """The input or a parameter was refused, by the server or before it was sent."""


class ModelNotFound(VarlenClientError):
    """The server has no such model, or several and none was chosen."""


class ServerUnavailable(VarlenClientError):
    """The server cannot take the request now; another try may succeed."""


class DeadlineMissed(VarlenClientError):
    """The server cannot answer within `deadline_ms`, or could not; it says so as soon as it knows."""


class RequestTimeout(VarlenClientError):
    """The time that the caller allowed has passed; the server may still be working."""


class RequestCancelled(VarlenClientError):
    """The server dropped the request before it ran."""


class ServerError(VarlenClientError):
    """The server failed, or its answer is not what the wire allows."""
