"""What can go wrong, by whose fault it is.

VarlenError
├── RequestError       the caller's fault: this request cannot be served as it is
├── QueueFullError     nobody's fault: the same request may pass later
├── DeadlineError      nobody's fault: the answer would come, or came, too late
├── RequestCancelled   the caller went away before the request ran
├── EngineError        ours: running the request failed
│   └── ModelFaultError   the device or a worker is lost: no request can run until the model is reloaded
├── ConfigError        the operator's fault: a setting is unknown or out of range
└── CheckpointError    the operator's fault: the checkpoint is incomplete or of a kind we do not serve

Every message is safe to send to a client: it says what came and what is allowed, and names no path.
`CheckpointError` and `ConfigError` end a load and reach the operator only.
"""


class VarlenError(Exception):
    """The base of all errors that varlen raises on purpose."""


class RequestError(VarlenError):
    """The request cannot be served as it is; sending it again gives the same answer."""


class QueueFullError(VarlenError):
    """A cap on waiting work is reached; the same request may pass later."""


class DeadlineError(VarlenError):
    """The answer cannot come before the request's deadline, or did not.

    Its message begins so that clients tell it from a full queue, which is worth another try.
    """

    def __init__(self, message: str) -> None:
        super().__init__(f"deadline missed: {message}")


class RequestCancelled(VarlenError):
    """The client cancelled, disconnected or let its deadline pass before the request ran."""


class EngineError(VarlenError):
    """Running the request failed through no fault of the caller."""


class ModelFaultError(EngineError):
    """The device or a worker is lost; no request can run until the model is reloaded."""


class ConfigError(VarlenError):
    """A setting of the model's config.pbtxt, or of `Encoder.from_pretrained`, is unknown or out of range."""


class CheckpointError(VarlenError):
    """A checkpoint lacks a file or a tensor, or is of a family that varlen does not serve."""
