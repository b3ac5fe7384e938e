"""The engine's settings: the `parameters { }` of config.pbtxt, typed and checked.

Every setting has a default, so an empty set is a working one. A setting that depends on the
checkpoint (its task, its longest sequence) is None here until the checkpoint is read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Literal, TypeAlias, get_args

from varlen.errors import ConfigError, shorten

Task: TypeAlias = Literal["embed", "hidden", "classify", "rerank", "token_classify"]
DType: TypeAlias = Literal["auto", "fp32", "fp16", "bf16"]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
PolicyName: TypeAlias = Literal["none", "fifo", "token_budget", "dp"]
Trigger: TypeAlias = Literal["hungry", "lazy"]
Execution: TypeAlias = Literal["packed", "padded"]
LogLevel: TypeAlias = Literal["info", "debug"]

DEFAULT_MAX_BATCH_TOKENS = 4096

# Parameters of the server's python backend, which are not checked here.
SERVER_PARAMETERS = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of one model.

    Attributes:
        task: the output of the model; None takes the checkpoint's own.
        device: the device that it runs on; `auto` is a CUDA GPU where there is one, else the CPU.
        dtype: of weights and activations; `auto` is bf16 where the device multiplies it natively, else
            fp32 on a CPU and fp16 on a GPU; fp16 needs a GPU.
        policy: how batches are chosen: `none` runs every sequence alone, `fifo` fills batches in order to
            `max_batch_sequences`, `token_budget` to `max_batch_tokens`, `dp` plans by measured cost.
        execution: `packed`, or `padded`, which pads every sequence to the longest of its batch; for
            comparison.
        trigger: `hungry` starts a batch as soon as the model is free; `lazy` waits for a full batch.
        max_delay_ms: longest wait of `lazy` for a full batch, in milliseconds.
        max_wait_ms: longest time that `dp` delays the first of the queue in favor of faster batches, in milliseconds.
        max_batch_sequences: largest batch, in sequences; ignored when policy is `token_budget`.
        max_batch_tokens: largest batch, in tokens, padding included.
        arena_bytes: largest memory of intermediates, in bytes or as a percentage of the device's ("25%").
            They never take more than `max_batch_tokens` need. If that does not fit, batches are smaller,
            and a sequence that does not fit alone is refused.
        max_sequence_tokens: longest sequence accepted, in tokens; None takes the checkpoint's own limit.
        max_queued_requests: largest number of queued requests; beyond it callers get UNAVAILABLE.
        max_queued_tokens: largest number of queued tokens; beyond it callers get UNAVAILABLE. They should
            run within the server's --exit-timeout-secs (30), or they are lost when the server stops.
        max_text_bytes: longest text accepted, in bytes of UTF-8, checked before tokenization.
        ignore_request_timeout: whether the `timeout` field of a request is ignored. By default it is a
            deadline, in microseconds, as the server defines it; some clients send seconds.
        response_cache_bytes: largest memory of the response cache; 0 turns it off.
        response_cache_seconds: longest time that a response is cached; 0 is no limit.
        threads: cores that one batch uses on a CPU; 0 is all that this process may use.
        warmup_seconds: longest measurement of batch costs when the model is loaded; 0 assumes them.
        cache_folder: folder of measured costs; `auto` is `varlen` in the user's cache folder.
        log_level: `debug` adds a line for every batch.
    """

    task: Task | None = None
    device: Device = "auto"
    dtype: DType = "auto"
    policy: PolicyName = "dp"
    execution: Execution = "packed"
    trigger: Trigger = "hungry"
    max_delay_ms: int = 10
    max_wait_ms: int = 1000
    max_batch_sequences: int = 64
    max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS
    arena_bytes: int | str = "100%"
    max_sequence_tokens: int | None = None
    max_queued_requests: int = 4096
    max_queued_tokens: int = 131_072
    max_text_bytes: int = 65_536
    ignore_request_timeout: bool = False
    response_cache_bytes: int = 0
    response_cache_seconds: int = 0
    threads: int = 0
    warmup_seconds: int = 20
    cache_folder: str = "auto"
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            _check_choice(name, getattr(self, name), allowed)
        for name, lowest in _LOWEST.items():
            _check_integer(name, getattr(self, name), lowest)
        for name in _FLAGS:
            _check_flag(name, getattr(self, name))
        _check_arena(self.arena_bytes)
        if not self.cache_folder:
            raise ConfigError('cache_folder is ""; allowed: auto, or a folder')

    def arena_limit(self, device_memory: int) -> int:
        """Return the largest size of the arena in bytes, for the memory of a device in bytes."""
        if isinstance(self.arena_bytes, str) and self.arena_bytes.endswith("%"):
            return device_memory * int(self.arena_bytes[:-1]) // 100
        return int(self.arena_bytes)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> "EngineConfig":
        """Return the settings in the `parameters` of a config.pbtxt.

        Args:
            parameters: string_value by key, as in the server's JSON form.

        Raises:
            ConfigError: a key is unknown or a value is not allowed; the message names the key, the
                value and what is allowed.
        """
        known = [field.name for field in fields(cls)]
        settings: dict[str, str | int | bool] = {}
        for key, text in parameters.items():
            if key in SERVER_PARAMETERS:
                continue
            if key not in known:
                raise ConfigError(_unknown_parameter(key, known))
            settings[key] = _value(key, text)
        return cls(**settings)  # type: ignore[arg-type]  # __post_init__ checks every value


# Settings by kind: words with those allowed, numbers with the lowest allowed, and true or false.
_CHOICES: dict[str, tuple[str, ...]] = {
    "task": get_args(Task),
    "device": get_args(Device),
    "dtype": get_args(DType),
    "policy": get_args(PolicyName),
    "execution": get_args(Execution),
    "trigger": get_args(Trigger),
    "log_level": get_args(LogLevel),
}
_LOWEST = {
    "max_delay_ms": 0,
    "max_wait_ms": 1,
    "max_batch_sequences": 1,
    "max_batch_tokens": 1,
    "max_sequence_tokens": 1,
    "max_queued_requests": 1,
    "max_queued_tokens": 1,
    "max_text_bytes": 1,
    "response_cache_bytes": 0,
    "response_cache_seconds": 0,
    "threads": 0,
    "warmup_seconds": 0,
}
_FLAGS = frozenset({"ignore_request_timeout"})
# Bytes, at most 18 digits, which fit an int64, or a percentage.
_ARENA = re.compile(r"[1-9][0-9]{0,17}|(100|[1-9][0-9]?)%")
_MAY_BE_NONE = frozenset({"task", "max_sequence_tokens"})


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed and not (value is None and name in _MAY_BE_NONE):
        raise ConfigError(f'{name} is "{shorten(str(value))}"; allowed: {", ".join(allowed)}')


def _check_integer(name: str, value: object, lowest: int) -> None:
    if value is None and name in _MAY_BE_NONE:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ConfigError(f"{name} is {value!r}; allowed: whole numbers from {lowest}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; allowed: True, False")


def _check_arena(value: object) -> None:
    if isinstance(value, str) and _ARENA.fullmatch(value):
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"arena_bytes is {shorten(repr(value))}; allowed: whole numbers from 1,"
            " and from 1% to 100% of the device's memory"
        )


def _value(key: str, text: str) -> str | int | bool:
    if key in _LOWEST:
        return _integer(key, text)
    if key in _FLAGS:
        return _flag(key, text)
    return text


def _flag(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigError(f'{key} is "{shorten(text)}"; allowed: true, false')
    return text == "true"


def _integer(key: str, text: str) -> int:
    # isdecimal accepts the digits of every script, as int() does, and no sign, point or space;
    # 18 digits fit an int64
    if not text.isdecimal() or len(text) > 18:
        raise ConfigError(f'{key} is "{shorten(text)}"; allowed: whole numbers from {_LOWEST[key]}')
    return int(text)


def _unknown_parameter(key: str, known: list[str]) -> str:
    close = get_close_matches(key, known, n=1)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    return f'unknown parameter "{shorten(key)}".{hint} Allowed: {", ".join(known)}'
