"""The engine's side of a process that loads a model.

A process that has ended is started again, with the same checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from varlen.config import EngineConfig
from varlen.errors import EngineError, VarlenError
from varlen.execution.workers.controlled import ControlledProcess

_log = logging.getLogger(__name__)

# Seconds after each attempt to load the model again.
_PAUSES = (1.0, 5.0, 0.0)
ENDED = "the process that loads the model ended; the server's log says why"

_Info = TypeVar("_Info")


class ModelProcess(Generic[_Info]):
    """A process that loads a model. Not for two threads at once.

    Attributes:
        info: model facts for the engine.
    """

    def __init__(
        self,
        module: str,
        folder: Path,
        config: EngineConfig,
        *,
        new_info: Callable[..., _Info],
        limits_of: Callable[[_Info], tuple[object, ...]],
    ) -> None:
        """Start the process and load the model.

        Args:
            module: module that the process runs.
            folder: folder of the checkpoint.
            config: the settings.
            new_info: type of `info`.
            limits_of: returns the facts that the engine relies on; measured choices may differ from load to load.

        Raises:
            CheckpointError, ConfigError: the checkpoint or a setting is refused.
            EngineError: the process failed.
        """
        self._module = module
        self._setup = setup_message(folder, config)
        self._files = _files(folder)
        self._folder = folder
        self._new_info = new_info
        self._limits_of = limits_of
        self.info = self._load()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def _load(self) -> _Info:
        self._process = ControlledProcess(self._module)
        try:
            self._process.send(self._setup)
            message, _ = self._process.receive()
            return self._new_info(**message["model"])
        except (EOFError, OSError):
            self._end()
            raise EngineError(ENDED) from None
        except BaseException:
            self._end()
            raise

    def _load_again(self) -> None:
        """Load the model that was loaded before, and no other.

        Raises:
            EngineError: it cannot be loaded, or has changed.
        """
        for pause in _PAUSES:
            if _files(self._folder) != self._files:
                raise EngineError("the files of the checkpoint have changed; reload the model")
            try:
                info = self._load()
            except VarlenError as error:
                _log.error("the model could not be loaded again: %s", error)
                time.sleep(pause)
                continue
            if self._limits_of(info) == self._limits_of(self.info):
                return
            self._end()
            raise EngineError("the cores or the memory have changed; reload the model")
        raise EngineError(ENDED)

    def _exchange(
        self, message: dict[str, object], descriptors: Sequence[int]
    ) -> tuple[dict[str, Any], list[int]]:
        """Send a message with file descriptors; return the answer and its file descriptors.

        Raises:
            EOFError, OSError, VarlenError: see `ControlledProcess.receive`.
        """
        self._process.send(message, descriptors)
        return self._process.receive()

    def _end(self) -> None:
        """End the process, once the connections of its workers are closed."""
        self._process.end()


def setup_message(folder: Path, config: EngineConfig) -> dict[str, object]:
    """Return the message that says which model a process loads."""
    return {
        "folder": str(folder),
        "config": asdict(config),
        "log_level": config.log_level.upper(),
    }


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of the files in a checkpoint's folder."""
    found = sorted(path for path in folder.iterdir() if path.is_file())
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in found]
