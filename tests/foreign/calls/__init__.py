"""Calls of foreign clients; importing them imports no client."""

from . import (
    applications,
    commands,
    frontends,
    openai_clients,
    rerank_clients,
    server_clients,
    tei_clients,
)
from .table import CALLS, Addresses, Call

__all__ = [
    "CALLS",
    "Addresses",
    "Call",
    "applications",
    "commands",
    "frontends",
    "openai_clients",
    "rerank_clients",
    "server_clients",
    "tei_clients",
]
