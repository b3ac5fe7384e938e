"""HTTP gateway: OpenAI, Text Embeddings Inference, Cohere and rerank over gRPC to a server.

It keeps no state, so any number of its processes can run. All modules but this one need the extra `http`.
"""

from __future__ import annotations

from dataclasses import dataclass

from varlen_client.aio import DEFAULT_WATCH_SECONDS

DEFAULT_MAX_BODY_BYTES = 8 << 20
DEFAULT_MAX_REQUESTS = 2048
DEFAULT_TIMEOUT_SECONDS = 600.0
DEFAULT_CHAT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings of one gateway process.

    Attributes:
        url: address of the server, such as `grpc://127.0.0.1:8001`, or the addresses of its replicas.
        model: name of the model for requests that name none; None is the only ready model of the server.
        api_keys: keys that requests may have; without any, requests need none.
        cors_origins: origins of browser pages that may send requests; `*` is all.
        max_body_bytes: largest body of a request.
        max_requests: most requests at a time; others are refused.
        max_connections_per_address: most connections of one address at a time; None is half of all connections.
        timeout_seconds: longest time of a request.
        watch_seconds: argument of `AsyncClient`; 0 never asks the server about a model's process.
        chat_max_tokens: longest answer in a chat, unless the request has its own limit.
        auto_truncate: whether texts that are too long are cut, unless the request says otherwise.
        strict: whether unknown fields of requests are refused.

    Raises:
        ValueError: a limit is not above 0, watch_seconds is less than 0, or a key is empty.
    """

    url: str | tuple[str, ...]
    model: str | None = None
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_requests: int = DEFAULT_MAX_REQUESTS
    max_connections_per_address: int | None = None
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    watch_seconds: float = DEFAULT_WATCH_SECONDS
    chat_max_tokens: int = DEFAULT_CHAT_MAX_TOKENS
    auto_truncate: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_requests", "timeout_seconds", "chat_max_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: above 0")
        if self.max_connections_per_address is not None and self.max_connections_per_address <= 0:
            raise ValueError(
                f"max_connections_per_address is {self.max_connections_per_address}; allowed: above 0"
            )
        if self.watch_seconds < 0:
            raise ValueError(f"watch_seconds is {self.watch_seconds:g}; allowed: from 0")
        if not all(self.api_keys):
            raise ValueError("an API key is empty")
