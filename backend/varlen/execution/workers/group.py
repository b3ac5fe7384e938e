"""The processes that hold one model.

The leader starts the others, decides for all, and sends them their work. If one is lost, all end, and the engine starts
them again: each has keys and values that no other one has.

Ranks meet in memory of all, or on GPUs in a group of torch.distributed. Between two stages are memory for what one
hands to the other, and a connection that says when it is there.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor, distributed

from varlen.config import EngineConfig
from varlen.errors import AdapterFaultError, ConfigError, EngineError, VarlenError
from varlen.execution.device import device_name
from varlen.execution.rank_link import Handoffs
from varlen.execution.workers.messages import MEMBER, send_control
from varlen.execution.workers.process import ControlledProcess, Setup, longest_wait
from varlen.memory.planner import map_shared, new_shared
from varlen.processes import end_with_parent
from varlen.program.program import NO_STATES
from varlen.program.rank import ALONE, RANKS, Rank
from varlen.program.stages import NO_STAGES, Stage
from varlen_kernels.reference.rank_memory import LONGEST_WAIT, rank_words
from varlen_kernels.reference.ranks import failed_rank

_log = logging.getLogger(__name__)

# Message that says that all processes have loaded; others are work.
_LOADED = b""

_T = TypeVar("_T")


class LateError(Exception):
    """Another process, of this number, did not come in time."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class RankLinks:
    """The links of a rank: the memory in which all ranks meet. Rank 0 leads."""

    stage = NO_STAGES
    handoffs: Handoffs | None = None

    def __init__(self, config: EngineConfig, number: int, memory: int) -> None:
        """Map the memory of a file descriptor; see `varlen_kernels.reference.rank_memory`."""
        self.rank = Rank(number, config.tensor_parallel)
        os.ftruncate(memory, 8 * rank_words(config.tensor_parallel))
        self._memory = torch.frombuffer(map_shared(memory), dtype=torch.int64)
        os.close(memory)
        self.states: Mapping[str, Tensor] = {RANKS: self._memory}
        self._longest_wait = config.rank_timeout_seconds * 10**9

    @classmethod
    def new(cls, config: EngineConfig) -> tuple[RankLinks, list[list[int]]]:
        """Return the leader's links, and the file descriptors of each other rank."""
        memory = new_shared(0)
        others = [[os.dup(memory)] for _ in range(1, config.tensor_parallel)]
        return cls(config, 0, memory), others

    def name(self, number: int) -> str:
        return f"rank {number} of {self.rank.size}"

    def limit_waits(self) -> None:
        self._memory[LONGEST_WAIT] = self._longest_wait

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Return the context in which this rank runs.

        Ranks wait for each other in their collectives.

        Raises:
            LateError: a rank was late, and this is rank 0.
        """
        yield
        if not self.rank.number and (late := failed_rank(self._memory)) is not None:
            raise LateError(late)


class GpuLinks(RankLinks):
    """The links of a rank that has a GPU: a group of torch.distributed.

    That a rank hangs, the engine notices by the time of the leader.
    """

    def __init__(self, config: EngineConfig, number: int, file: int) -> None:
        """Keep the file in which the ranks find each other."""
        self.rank = Rank(number, config.tensor_parallel)
        # no op reads the state
        self.states = {RANKS: torch.empty(0, dtype=torch.int64)}
        self._file = file

    def connect(self, gpu: int) -> None:
        """Join the group, once all ranks have started.

        Raises:
            ConfigError: the GPU is another model than the one of rank 0.
        """
        # all ranks are on one machine
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        device, (number, size) = torch.device("cuda", gpu), (self.rank.number, self.rank.size)
        torch.cuda.set_device(device)
        path = f"/proc/self/fd/{self._file}"
        store = distributed.FileStore(path, size)  # type: ignore[attr-defined]
        store.set(f"gpu {number}", device_name(device))
        own, first = (store.get(f"gpu {each}").decode() for each in (number, 0))
        if own != first:
            raise ConfigError(
                f"tensor_parallel is {size}; GPU {gpu} is {own}, and the one of rank 0 is {first}:"
                " allowed are GPUs of one model"
            )
        distributed.init_process_group(
            "nccl", store=store, rank=number, world_size=size, device_id=device
        )

    def limit_waits(self) -> None:
        """Do nothing: the engine limits the time of a step."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Return the context in which this rank runs."""
        yield


class StageLinks:
    """The links of a stage to its neighbors. The last stage leads.

    Attributes:
        handoffs: values that it receives and sends.
    """

    rank = ALONE
    states: Mapping[str, Tensor] = NO_STATES

    def __init__(self, config: EngineConfig, number: int, *descriptors: int) -> None:
        """Take a connection and memory for each neighbor, the one before first."""
        count = config.pipeline_parallel
        self.stage = Stage(number, count)
        before = descriptors[:2] if number else ()
        behind = descriptors[len(before) :]
        self._before = Connection(before[0]) if before else None
        self._behind = Connection(behind[0]) if behind else None
        received, sent = (ends[1] if ends else None for ends in (before, behind))
        self.handoffs = Handoffs(received, sent, slots=count)
        self._config = config
        # nothing is late while models load
        self._longest_wait: float | None = None

    @classmethod
    def new(cls, config: EngineConfig) -> tuple[StageLinks, list[list[int]]]:
        """Return the leader's links, and the file descriptors of each other stage."""
        others: list[list[int]] = []
        before: list[int] = []
        for _ in range(config.pipeline_parallel - 1):
            (receives, sends), memory = socket.socketpair(), new_shared(0)
            others.append([*before, sends.detach(), memory])
            before = [receives.detach(), os.dup(memory)]
        return cls(config, config.pipeline_parallel - 1, *before), others

    def name(self, number: int) -> str:
        return f"stage {number + 1} of {self.stage.count}"

    def limit_waits(self) -> None:
        self._longest_wait = longest_wait(self._config, self.stage.number)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Return the context in which this stage runs, between its neighbors.

        Raises:
            LateError: the one before did not come in time.
            AdapterFaultError: this stage or one before it cannot read an adapter, so the stages behind it run nothing.
            EOFError, OSError: the one before has ended.
        """
        fault: AdapterFaultError | None = None
        if self._before is not None:
            if not self._before.poll(self._longest_wait):
                raise LateError(self.stage.number - 1)
            if message := self._before.recv_bytes():
                fault = AdapterFaultError(*json.loads(message))
        self.handoffs.next()
        try:
            if fault is not None:
                raise fault
            yield
        except AdapterFaultError as error:
            fault = error
        if self._behind is not None:
            message = b"" if fault is None else json.dumps([fault.adapter, str(fault)]).encode()
            self._behind.send_bytes(message)
        if fault is not None:
            raise fault


Links: TypeAlias = RankLinks | StageLinks


def links_of(config: EngineConfig) -> type[RankLinks] | type[StageLinks]:
    """Return the kind of links of a model that several processes hold."""
    if config.tensor_parallel == 1:
        return StageLinks
    return GpuLinks if config.device == "cuda" else RankLinks


class _Linked:
    """A process of a group: a `RankLink`."""

    def __init__(self, setup: Setup, links: Links) -> None:
        self._config = setup.config
        self._links = links
        self.rank, self.states = links.rank, links.states
        self.stage, self.handoffs = links.stage, links.handoffs

    def _connect(self, setup: Setup) -> None:
        if isinstance(self._links, GpuLinks):
            self._links.connect(setup.gpu)


class Leader(_Linked):
    """The process that leads: rank 0, or the last stage."""

    def __init__(self, setup: Setup, message_of: Callable[[Any], bytes]) -> None:
        """Start the others, which load their parts while this process loads its own.

        Args:
            message_of: returns some work as a message to the others.
        """
        # the engine's thread that starts it ends after its last step; the others end with the leader
        end_with_parent()
        links, others = links_of(setup.config).new(setup.config)
        super().__init__(setup, links)
        self._control = setup.control
        self._message_of = message_of
        self._is_ahead = False
        self._loaded: SimpleQueue[int] = SimpleQueue()
        self._connections: list[Connection] = []
        self._members: dict[int, ControlledProcess] = {}
        for number, descriptors in enumerate(others, start=1 if links.rank.size > 1 else 0):
            ours, theirs = socket.socketpair()
            self._connections.append(Connection(ours.detach()))
            self._members[number] = ControlledProcess(MEMBER, new_session=False)
            given = [theirs.detach(), *descriptors]
            try:
                # their log lines would all come several times
                more = {"log_level": "WARNING", "number": number}
                self._members[number].send(setup.fields | more, given)
            except OSError:
                # nothing watches it yet
                self._end_ended(number)
            for descriptor in given:
                os.close(descriptor)
        self._watcher = Thread(target=self._watch, name="varlen-watcher", daemon=True)
        self._watcher.start()
        self._connect(setup)

    def agree(self, decide: Callable[[], _T], _: Callable[[], None] | None = None, /) -> _T:
        """Return what this process decides, and tell the others."""
        try:
            for connection in self._connections:
                connection.recv_bytes()
            value = decide()
            for connection in self._connections:
                connection.send_bytes(json.dumps(value).encode())
        except (EOFError, OSError):
            self._end_with_watcher()
        return value

    def fault_of_ranks(self, fault: str, /) -> str:
        if self.stage.count > 1:
            return fault
        try:
            others = [connection.recv_bytes().decode() for connection in self._connections]
            found = next(filter(None, (fault, *others)), "")
            for connection in self._connections:
                connection.send_bytes(found.encode())
        except (EOFError, OSError):
            self._end_with_watcher()
        return found

    def finish_load(self) -> None:
        """Wait until all have loaded. From now on, none may keep others waiting."""
        for _ in self._members:
            self._loaded.get()
        self._links.limit_waits()
        self._send(_LOADED)

    def send_ahead(self, work: object) -> None:
        """Send the others what this process runs later, in another thread: `running` then sends nothing."""
        self._is_ahead = True
        self._send(self._message_of(work))

    @contextmanager
    def running(self, work: object) -> Iterator[None]:
        """Return the context in which this process runs some work, which the others get first."""
        if not self._is_ahead:
            self._send(self._message_of(work))
        try:
            with self._links.turn():
                try:
                    yield
                except AdapterFaultError:
                    # none of them has run the work
                    raise
                except BaseException:
                    # the others wait for this one, or have keys and values of this work, whatever it was
                    _log.exception("the leader failed")
                    self._end(f"{self._name(self._number)} failed; the server's log says why")
        except LateError as late:
            self._end(_late(self._name(late.number), self._config))
        except (EOFError, OSError):
            self._end_with_watcher()

    @property
    def _number(self) -> int:
        return self.rank.number or self.stage.number

    def _name(self, number: int) -> str:
        pid = os.getpid() if number == self._number else self._members[number].pid
        return f"{self._links.name(number)} (process {pid})"

    def _send(self, message: bytes) -> None:
        try:
            for connection in self._connections:
                connection.send_bytes(message)
        except OSError:
            self._end_with_watcher()
        except BaseException:
            # some have it, and some do not
            _log.exception("sending work failed")
            self._end("sending work failed; the server's log says why")

    def _end_with_watcher(self) -> NoReturn:
        """End after another process has ended: the watcher knows which one, and why."""
        self._watcher.join()
        self._end("a process ended")

    def _end(self, reason: str, error: str = "EngineError") -> NoReturn:
        """Tell the engine why, and end; the system then ends the others."""
        try:
            send_control(self._control, {"error": [error, reason]})
        finally:
            os._exit(1)

    def _end_ended(self, number: int) -> NoReturn:
        member = self._members[number]
        member.end()
        self._end(f"{self._name(number)} ended with code {member.code}")

    def _watch(self) -> None:
        """Read what the others report; end all if one ends."""
        arrivals = select.poll()
        numbers = {member.fileno(): number for number, member in self._members.items()}
        for descriptor in numbers:
            arrivals.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in arrivals.poll():
                self._read(numbers[descriptor])

    def _read(self, number: int) -> None:
        try:
            # the only message without a log line or an error says that it has loaded
            if self._members[number].receive_one() is not None:
                self._loaded.put(number)
        except VarlenError as error:
            self._end(f"{self._name(number)}: {error}", type(error).__name__)
        except (EOFError, OSError):
            self._end_ended(number)


class Member(_Linked):
    """A process that does not lead."""

    def __init__(self, setup: Setup) -> None:
        """Take the connection to the leader, then the descriptors of the links."""
        assert setup.number is not None
        connection, *descriptors = setup.descriptors
        links = links_of(setup.config)(setup.config, setup.number, *descriptors)
        super().__init__(setup, links)
        self._connect(setup)
        self.connection = Connection(connection)

    def agree(self, _: Callable[[], _T], meanwhile: Callable[[], None] | None = None, /) -> _T:
        # the leader waits for it
        self.connection.send_bytes(b"")
        while meanwhile is not None and not self.connection.poll():
            meanwhile()
        value: _T = json.loads(self.connection.recv_bytes())
        return value

    def fault_of_ranks(self, fault: str, /) -> str:
        if self.stage.count > 1:
            return fault
        self.connection.send_bytes(fault.encode())
        return self.connection.recv_bytes().decode()

    def follow(self, run: Callable[[bytes], object]) -> None:
        """Run the work of the leader's next message.

        Nothing runs if an adapter of it cannot be read.

        Raises:
            EOFError, BrokenPipeError: the leader has ended, or the stage behind.
        """
        message = self.connection.recv_bytes()
        if message == _LOADED:
            self._links.limit_waits()
            return
        with suppress(AdapterFaultError):
            run(message)

    @contextmanager
    def running(self, _: object, /) -> Iterator[None]:
        try:
            with self._links.turn():
                yield
        except LateError as late:
            raise EngineError(_late(f"stage {late.number + 1}", self._config)) from None


def _late(name: str, config: EngineConfig) -> str:
    return f"{name} did not answer within {config.rank_timeout_seconds} s (rank_timeout_seconds)"
