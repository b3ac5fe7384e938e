"""The exceptions that varlen raises, by whose fault they are.

VarlenError
├── RequestError       the caller's fault: this request cannot be served as it is
├── QueueFullError     load: the same request may be accepted later
├── DeadlineError      load: the answer would come, or came, too late
├── DrainingError      the replica is about to stop: another one may accept the request
├── RequestCancelled   the caller cancelled before the request ran
├── EngineError        our fault: running the request failed
│   ├── AdapterFaultError   an adapter cannot be read any more: requests without it run
│   └── ModelFaultError   the device or a worker is lost: no request can run until the model is reloaded
├── ConfigError        the operator's fault: a setting is unknown or not allowed
└── CheckpointError    the operator's fault: the checkpoint is incomplete or of a kind we do not serve

A message says what came and what is allowed, and is safe to send to a client: it names no path, and
`shorten` limits what it repeats of a request. `CheckpointError` and `ConfigError` reach the operator only.
"""

_MAX_REPEATED = 100


def shorten(text: str) -> str:
    """Return client input as an error repeats it: at most 100 characters, then its length."""
    # a gRPC status has room for a few kilobytes
    if len(text) <= _MAX_REPEATED:
        return text
    return f"{text[:_MAX_REPEATED]}... ({len(text)} characters)"


class VarlenError(Exception):
    """The base of all errors that varlen raises on purpose."""


class RequestError(VarlenError):
    """The request cannot be served as it is; sending it again gives the same answer."""


class QueueFullError(VarlenError):
    """A limit on queued work is reached; the same request may be accepted later."""


class DeadlineError(VarlenError):
    """The answer cannot come before the request's deadline, or did not.

    Clients recognize it by the start of its message; unlike a full queue, it is not worth a retry.
    """

    def __init__(self, message: str) -> None:
        super().__init__(f"deadline missed: {message}")


class DrainingError(VarlenError):
    """The replica is about to stop; another one may accept the same request."""


class RequestCancelled(VarlenError):
    """The client cancelled, disconnected or let its deadline pass before the request ran."""


class EngineError(VarlenError):
    """Running the request failed through no fault of the caller."""


class AdapterFaultError(EngineError):
    """An adapter cannot be read any more, and fails the requests that name it."""

    def __init__(self, adapter: str, message: str) -> None:
        super().__init__(message)
        self.adapter = adapter


class ModelFaultError(EngineError):
    """The device or a worker is lost; requests fail until the model is reloaded."""


class ConfigError(VarlenError):
    """Settings in config.pbtxt or of `Encoder.from_pretrained` are unknown or not allowed."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        numbered = "; ".join(f"({i}) {problem}" for i, problem in enumerate(problems, 1))
        super().__init__(
            *(problems if len(problems) == 1 else [f"{len(problems)} problems: {numbered}"])
        )


class CheckpointError(VarlenError):
    """The checkpoint is incomplete, or of a family that varlen does not serve."""
