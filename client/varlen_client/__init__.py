"""Client of the varlen backend: sync and asyncio, gRPC and HTTP.

from varlen_client import Client

with Client("grpc://127.0.0.1:8001") as client:
    vectors = client.embed(["a sentence", "another, longer sentence"])  # [2, hidden] fp32
"""

from varlen_client.aio import AsyncClient
from varlen_client.calls import TokenizedText
from varlen_client.errors import (
    DeadlineMissed,
    InvalidRequest,
    InvalidUrl,
    ModelNotFound,
    ModelProcessEnded,
    ModelUnloaded,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
    VarlenClientError,
)
from varlen_client.generation import GeneratedPart, Generation, Translation
from varlen_client.sync import Client
from varlen_client.tasks.extraction import ContextAnswer, Span
from varlen_client.tasks.labels import FilledToken, LabelScore
from varlen_client.tasks.tokens import Entity, TokenLabel
from varlen_client.tasks.vectors import SparseVector
from varlen_client.transport.session import RetryPolicy, Status
from varlen_client.transport.transport import ServerIdentity
from varlen_client.wire import ModelState

__all__ = [
    "AsyncClient",
    "Client",
    "ContextAnswer",
    "DeadlineMissed",
    "Entity",
    "FilledToken",
    "GeneratedPart",
    "Generation",
    "InvalidRequest",
    "InvalidUrl",
    "LabelScore",
    "ModelNotFound",
    "ModelProcessEnded",
    "ModelState",
    "ModelUnloaded",
    "RequestCancelled",
    "RequestTimeout",
    "RetryPolicy",
    "ServerError",
    "ServerIdentity",
    "ServerUnavailable",
    "Span",
    "SparseVector",
    "Status",
    "TokenLabel",
    "TokenizedText",
    "Translation",
    "VarlenClientError",
]
