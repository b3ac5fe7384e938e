"""Whole messages between the engine and a process of the sandbox, and their kinds."""

import select
import socket
import struct
import weakref

# Orders and answers of a grammar begin with a kind and the number of a sequence.
HEAD = struct.Struct("<BI")
# Orders: tokens of a sequence, int32, whose next mask is asked for; the end of a sequence.
ADVANCE, FORGET = 0, 1
# Answers: a mask of a bit for each token; a reason in UTF-8; the private memory of the process, in bytes.
MASK, REFUSED, MEMORY = 0, 1, 2
# Number in answers that concern the grammar itself.
COMPILED = 0
# Answers of a template begin with a kind: a text; `REFUSED` with a reason; nothing, as the text is too long; a reason
# why the template itself is not valid; a variable that it does not read, and all that it reads, as a JSON list.
TEXT, TOO_LONG, INVALID, UNREAD = 3, 4, 5, 6

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18


class Frames:
    """The child's end: blocks until a message has come or gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")

    def send(self, message: bytes) -> None:
        self._connection.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        """Return the next message.

        Raises:
            EOFError: the engine has closed its end.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError
        return data


class QueuedFrames:
    """The engine's end: never blocks. Not for two threads at once."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        # a process without an owner ends
        weakref.finalize(self, connection.close)
        self._unsent = bytearray()
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, which becomes readable when a message comes."""
        return self._connection.fileno()

    def send(self, message: bytes) -> None:
        """Send a message, now or in later calls of `receive`."""
        self._unsent += _LENGTH.pack(len(message)) + message
        self._flush()

    def wait(self) -> None:
        """Wait until something has come, or can be sent that is not yet."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.poll()

    def receive(self) -> list[bytes]:
        """Return the messages that have come.

        Raises:
            EOFError: the process has ended.
        """
        self._flush()
        try:
            while data := self._connection.recv(_READ_BYTES):
                self._received += data
        except BlockingIOError:
            return self._messages()
        except OSError:
            pass
        # what it sent before it ended
        if messages := self._messages():
            return messages
        raise EOFError

    def close(self) -> None:
        """Close the socket, which ends the process once it is idle."""
        self._connection.close()

    def _messages(self) -> list[bytes]:
        messages, begin = [], 0
        received = self._received
        while len(received) >= begin + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, begin)
            end = begin + _LENGTH.size + length
            if len(received) < end:
                break
            messages.append(bytes(received[begin + _LENGTH.size : end]))
            begin = end
        del received[:begin]
        return messages

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # the next `receive` finds the end of the process
            self._unsent.clear()
