"""What the client asks of a protocol; gRPC and HTTP answer, on tritonclient's asyncio clients.

A transport sends one thing once: no retries and no time limits here. It raises only errors of our
own tree, and it stops the call on the wire when its task is cancelled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from varlen_client.errors import DeadlineMissed, ServerUnavailable, VarlenClientError
from varlen_client.wire import InferRequest, ModelState


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """What the server says it is."""

    name: str
    version: str


class Transport(Protocol):
    """One connection (or pool of connections) to one server, owned by one event loop."""

    async def server_ready(self) -> bool:
        """Return whether the server takes requests."""
        ...

    async def model_ready(self, model: str) -> bool:
        """Return whether the model takes requests."""
        ...

    async def server_identity(self) -> ServerIdentity:
        """Return the server's name and version."""
        ...

    async def models(self) -> list[ModelState]:
        """Return the server's repository index."""
        ...

    async def model_config(self, model: str) -> Mapping[str, object]:
        """Return the model's config in its JSON form."""
        ...

    async def infer(self, model: str, request: InferRequest) -> npt.NDArray[np.generic] | None:
        """Return the requested output, None when the answer does not hold it."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


def server_message(message: str | None, status: str | None) -> str:
    """Return what the server said, without the tag that it puts before its own refusals."""
    if not message:
        return f"the server failed without a message ({status})"
    return re.sub(r"^\[request id: [^\]]*\] ", "", message)


def refined(kind: type[VarlenClientError], message: str) -> type[VarlenClientError]:
    """Return the kind of an error, a missed deadline told apart from other reasons to be unavailable.

    For both the server has one code; the message says which.
    """
    if kind is ServerUnavailable and message.startswith("deadline missed: "):
        return DeadlineMissed
    return kind
