"""The server that a campaign attacks: its models, its clients, and what it must answer."""

import json
import random
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc

from tests.checkpoints import SPECIAL_TOKENS, WORDS, save_checkpoint
from tests.server.clients import GrpcClient, HttpClient
from tests.server.serving import add_model
from varlen_client import Client, RetryPolicy
from varlen_tools.local_server import LOOPBACK, LocalServer

from .endings import TIMEOUT_SECONDS
from .known import Known, continuations, encoder_answers, samples, translations
from .models import (
    CACHED,
    CAPPED,
    CHAT,
    DECODER,
    ENCODER,
    HIDDEN,
    MODELS,
    TRANSLATOR,
)
from .state import MARK

Protocol = Literal["grpc", "http"]
PROTOCOLS: tuple[Protocol, ...] = ("grpc", "http")

MAX_ROWS = 64
# Limits of the random checkpoint, and of minilm.
LONGEST, VOCABULARY = 512, len(SPECIAL_TOKENS) + len(WORDS)
MINILM_LONGEST, MINILM_VOCABULARY = 256, 30522
_ARGUMENTS = ("--exit-timeout-secs=60",)
READY_SECONDS = 180.0
_SLOW_TEMPLATE = (
    "{% for a in messages %}{% for b in messages %}{% for c in messages %}{{ '' }}{% endfor %}{% endfor %}{% endfor %}"
    "{{ messages[0].content }}"
)
_ONCE = RetryPolicy(max_retries=0)
# Server 2.51 answers no request that a killed process held: the deadlines of clients end them.
_HELD_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Folders of the checkpoints of all models.

    `make setup` prepares three; a random encoder and a decoder with a chat template are added.
    """

    minilm: Path
    gpt2: Path
    dates: Path
    random: Path
    chat: Path

    @classmethod
    def prepare(cls, repository: Path, scratch: Path) -> "Checkpoints":
        """Return the checkpoints of a model repository, and a random one in `scratch`.

        Raises:
            FileNotFoundError: `make setup` did not run.
        """
        folders = [repository / name / "1" for name in (ENCODER, DECODER, TRANSLATOR)]
        for folder in folders:
            if not (folder / "model.safetensors").is_file():
                raise FileNotFoundError(f"{folder} has no weights; run `make setup`")
        minilm, gpt2, dates = folders
        made = save_checkpoint(
            scratch / "random",
            words=WORDS,
            max_position_embeddings=LONGEST,
            hidden_size=64,
            num_attention_heads=4,
            intermediate_size=256,
        )
        return cls(minilm, gpt2, dates, made, _with_template(gpt2, scratch / CHAT))

    def repository(self, folder: Path, names: Sequence[str] = MODELS) -> Path:
        """Write a repository of these models, and return its folder."""
        # the fewest requests in the queue that refuse some in a mix, and the smallest cache that evicts
        settings: Mapping[str, tuple[Path, dict[str, Any]]] = {
            ENCODER: (self.minilm, {"threads": "2"}),
            CACHED: (self.random, {"response_cache_bytes": "10000"}),
            HIDDEN: (self.random, {"task": "hidden"}),
            CAPPED: (self.random, {"max_queued_requests": "1", "max_queued_tokens": "40000"}),
            DECODER: (self.gpt2, {"threads": "1"}),
            CHAT: (self.chat, {"threads": "1"}),
            TRANSLATOR: (self.dates, {"threads": "1"}),
        }
        for name in names:
            checkpoint, parameters = settings[name]
            add_model(folder, name, checkpoint, **parameters)
        return folder

    def known(self, seed: int) -> Known:
        """Return inputs and their answers, computed in this process."""
        draw = random.Random(f"known {seed}")
        size = {"texts": 16, "longest": LONGEST, "vocabulary": VOCABULARY}
        minilm = encoder_answers(
            self.minilm,
            draw,
            task="embed",
            texts=24,
            longest=MINILM_LONGEST,
            vocabulary=MINILM_VOCABULARY,
        )
        vectors = encoder_answers(self.random, draw, task="embed", **size)
        hidden = encoder_answers(self.random, draw, task="hidden", **size)
        encoders = {ENCODER: minilm, CACHED: vectors, CAPPED: vectors, HIDDEN: hidden}
        return Known(
            encoders,
            continuations(self.gpt2),
            samples(self.gpt2),
            translations(self.dates, draw),
        )


def _with_template(checkpoint: Path, folder: Path) -> Path:
    """Return a new folder with the files of a checkpoint and a slow chat template."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        shutil.copyfile(file, folder / file.name)
    config = folder / "tokenizer_config.json"
    content = json.loads(config.read_text()) | {"chat_template": _SLOW_TEMPLATE}
    config.unlink()
    config.write_text(json.dumps(content))
    return folder


class Target:
    """A running server and clients of both protocols.

    Attributes:
        server: the server.
        mark: environment variable of its processes, see `state`.
        known: inputs and their answers.
        grpc, http: clients that check nothing.
        channel: channel for gRPC messages of any bytes.
        killed: the model whose process a phase kills, if it kills one: its requests may get no answer.
    """

    def __init__(self, server: LocalServer, known: Known, models: Sequence[str], mark: str) -> None:
        self.server, self.known, self.models = server, known, tuple(models)
        self.mark = mark
        self.killed = ""
        self._stack = stack = ExitStack()
        self.grpc: GrpcClient = stack.enter_context(GrpcClient(server))
        self.http: HttpClient = stack.enter_context(HttpClient(server))
        self.channel = stack.enter_context(grpc.insecure_channel(f"{LOOPBACK}:{server.grpc_port}"))
        urls = {"grpc": server.grpc_url, "http": server.http_url}
        self._clients = {
            (model, protocol): stack.enter_context(
                Client(
                    urls[protocol],
                    model,
                    rows_per_request=MAX_ROWS,
                    retry=_ONCE,
                    # its requests are counted by the model, and by no phase
                    watch_seconds=0,
                )
            )
            for model in models
            for protocol in PROTOCOLS
        }

    def patience(self, model: str) -> float:
        """Return the seconds that a client of a good request waits for an answer."""
        return _HELD_SECONDS if model == self.killed else TIMEOUT_SECONDS

    def client(self, model: str, protocol: Protocol) -> Client:
        """Return varlen's own client of a model."""
        return self._clients[model, protocol]

    def close(self) -> None:
        """Close all clients: a server that stops waits for their idle connections."""
        self._stack.close()


@contextmanager
def running(
    repository: Path,
    known: Known,
    models: Sequence[str] = MODELS,
    *,
    arguments: Sequence[str] = (),
    command: Path | None = None,
) -> Iterator[Target]:
    """Start a server, load its models, and yield it with its clients.

    Args:
        repository: folder to serve.
        known: inputs and their answers.
        models: names of the models to load.
        arguments: more ones of the server.
        command: see `LocalServer`.
    """
    loads = [f"--load-model={name}" for name in models]
    arguments = [*_ARGUMENTS, *loads, *arguments]
    mark = uuid.uuid4().hex
    with LocalServer(
        repository,
        arguments=arguments,
        environment={MARK: mark},
        command=command,
        is_managed=True,
    ) as server:
        server.wait_ready(READY_SECONDS)
        target = Target(server, known, models, mark)
        try:
            yield target
        finally:
            target.close()
