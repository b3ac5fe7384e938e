"""What a worker does between batches."""

from multiprocessing.connection import Pipe
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace

from varlen.execution.workers import child
from varlen.execution.workers.messages import receive_answers
from varlen.memory.memory_use import MemoryUse


def test_a_worker_without_batches_releases_memory_once(monkeypatch):
    monkeypatch.setattr(child, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(child._log, "handlers", [])
    monkeypatch.setattr(child.os, "_exit", lambda status: None)
    ours, theirs = Pipe()
    events: SimpleQueue[str] = SimpleQueue()

    def run(batch: bytes, _: object) -> tuple[()]:
        events.put(batch.decode())
        return ()

    work = SimpleNamespace(
        read=bytes,
        prepare=len,
        run=run,
        runner=SimpleNamespace(
            use=MemoryUse, new_swaps=tuple, release_arenas=lambda: events.put("released")
        ),
    )
    worker = Thread(target=child.answer_orders, args=(theirs, work))
    worker.start()
    assert events.get(timeout=60) == "released"
    worker.join(0.3)

    assert events.empty()
    ours.send_bytes(b"batch")
    receive_answers(ours)
    assert events.get(timeout=60) == "batch"
    assert events.get(timeout=60) == "released"
    ours.close()
    worker.join(60)
    assert not worker.is_alive()
