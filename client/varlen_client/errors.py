"""Every error that this client raises, in one tree.

ServerUnavailable comes after the last retry. ModelProcessEnded, DeadlineMissed and RequestTimeout are never retried.
Cancelling a call from asyncio raises `asyncio.CancelledError`.
"""

# Each name states what happened, so only the root ends in "Error".

from __future__ import annotations


class VarlenClientError(Exception):
    """Root of the tree.

    Attributes:
        rows: the rows of the caller's input that failed; None when the error concerns no rows.
    """

    def __init__(self, message: str, *, rows: range | None = None) -> None:
        super().__init__(message)
        self.rows = rows


class InvalidUrl(VarlenClientError, ValueError):
    """The URL is no valid server address."""


class InvalidRequest(VarlenClientError):
    """The input or a parameter was refused, by the server or before it was sent."""


class ModelNotFound(VarlenClientError):
    """The server has no such model, or several and none was chosen."""


class ModelUnloaded(ModelNotFound):
    """The server knows the model, but has unloaded it or is shutting down."""


class ServerUnavailable(VarlenClientError):
    """The server cannot accept the request now; a retry may succeed."""


class ModelProcessEnded(ServerUnavailable):
    """The model's process has ended or does not respond: load the model again."""


class DeadlineMissed(VarlenClientError):
    """The server cannot answer within `deadline_ms`, or did not."""


class RequestTimeout(VarlenClientError):
    """The caller's `timeout` passed; the server may still run the request."""


class RequestCancelled(VarlenClientError):
    """The server dropped the request before it ran."""


class ServerError(VarlenClientError):
    """The server failed, or its response breaks the protocol."""
