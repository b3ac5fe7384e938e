"""A stage that does not lead waits for the stage before, not for ever."""

import socket
from threading import Timer

import pytest

from varlen.config import EngineConfig
from varlen.errors import AdapterFaultError, EngineError
from varlen.execution.workers import group
from varlen.execution.workers.group import Member
from varlen.execution.workers.process import Setup
from varlen.memory.planner import new_shared

LIMIT = 0.05


@pytest.fixture
def stage(monkeypatch):
    """Return the second of three stages, and the stages before and behind it."""
    monkeypatch.setattr(group, "longest_wait", lambda config, before: before * LIMIT)
    # this thread may end before the process
    monkeypatch.setattr(group, "end_with_parent", lambda: None)
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    leader, behind, before = (ours for ours, _ in pairs)
    connection, sends, receives = (theirs.detach() for _, theirs in pairs)
    descriptors = [connection, receives, new_shared(0), sends, new_shared(0)]
    config = EngineConfig(device="cpu", pipeline_parallel=3)
    yield Member(Setup(leader, {"number": 1, "gpu": 0}, config, descriptors)), before, behind
    for each in (leader, behind, before):
        each.close()


def has_message(end):
    """Return whether a message of no bytes came, as `multiprocessing.connection` sends it."""
    end.settimeout(60)
    return end.recv(16) == bytes(4)


def test_a_stage_runs_after_the_one_before_it_and_before_the_one_behind(stage):
    member, before, behind = stage
    before.sendall(bytes(4))
    slot = member.handoffs.slot

    with member.running(None):
        behind.setblocking(False)
        with pytest.raises(BlockingIOError):
            behind.recv(1)
        assert member.handoffs.slot == (slot + 1) % 3

    assert has_message(behind)


def test_a_stage_runs_nothing_after_a_fault_of_the_one_before_it_and_passes_it_on(stage):
    member, before, behind = stage
    message = b'["a", "it was changed"]'
    framed = len(message).to_bytes(4, "big") + message
    before.sendall(framed)

    with pytest.raises(AdapterFaultError, match="it was changed") as caught, member.running(None):
        pytest.fail("it runs")

    assert caught.value.adapter == "a"
    behind.settimeout(60)
    assert behind.recv(64) == framed


def test_a_fault_of_a_stage_goes_to_the_one_behind_and_its_next_turn_is_its_own(stage):
    member, before, behind = stage
    before.sendall(bytes(8))

    with pytest.raises(AdapterFaultError), member.running(None):
        raise AdapterFaultError("b", "it is lost")
    behind.settimeout(60)
    assert behind.recv(64).endswith(b'["b", "it is lost"]')
    with member.running(None):
        pass

    assert has_message(behind)


def test_no_stage_is_late_until_all_have_loaded(stage):
    member, before, behind = stage
    Timer(4 * LIMIT, before.sendall, [bytes(4)]).start()
    with member.running(None):
        pass
    assert has_message(behind)

    member._links.limit_waits()
    with (
        pytest.raises(EngineError, match="stage 1 did not answer within 10 s"),
        member.running(None),
    ):
        pytest.fail("it runs")
