"""HTTP gateway: OpenAI, Text Embeddings Inference, Cohere and rerank over gRPC to a server.

It keeps no state, so any number of its processes can run; the files and batches of `--batch-folder` are of one process.
All modules but this one and `tool_calls` need the extra `http`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from varlen_client.aio import DEFAULT_WATCH_SECONDS
from varlen_client.gateway.tool_calls import TOOL_FORMS

DEFAULT_MAX_BODY_BYTES = 8 << 20
DEFAULT_MAX_REQUESTS = 2048
DEFAULT_TIMEOUT_SECONDS = 600.0
DEFAULT_CHAT_MAX_TOKENS = 256
# Values of settings that are names.
_FORMS = {"tool_calls": ("auto", "none", *TOOL_FORMS), "reasoning": ("auto", "none")}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings of one gateway process, as the options of `varlen serve-http` describe them.

    Attributes:
        model: name of the model for requests that name none; None is the only ready model of the server.
        max_connections_per_address: None is half of all connections.
        tool_calls: form of calls of tools; auto finds it in the chat template.
        reasoning: whether the reasoning of an answer is divided from it.
        watch_seconds: argument of `AsyncClient`.
        batch_folder: folder of files and batches; None serves neither.

    Raises:
        ValueError: a limit is not above 0, watch_seconds is less than 0, a key is empty, or a form is not known.
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
    tool_calls: str = "auto"
    reasoning: str = "auto"
    batch_folder: Path | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            is_limit = name.startswith("max_") or name in ("timeout_seconds", "chat_max_tokens")
            if is_limit and value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; allowed: above 0")
        if self.watch_seconds < 0:
            raise ValueError(f"watch_seconds is {self.watch_seconds:g}; allowed: from 0")
        for name, allowed in _FORMS.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
        if not all(self.api_keys):
            raise ValueError("an API key is empty")
