"""The campaign's own checks: each finds its fault, and nothing where there is none."""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from threading import Event, Semaphore
from types import SimpleNamespace

import pytest

from varlen_bench.harness.rows import Provenance

from . import figures
from .attacks import constrained, oracle
from .beside import beside
from .counters import Counters
from .drive import Bounds, Least, Share, send_all
from .endings import Ending, Ledger, ModelEndings, find_leak
from .log import unexpected_lines
from .phases.generation_kills import unless_killed_twice
from .report import Report
from .state import MARK, State, left_over, marked

OUTCOMES = ("ok", "invalid", "refused", "cancelled", "failed")


def series(**grown: float) -> dict[str, float]:
    """Return the series of `minilm`, at 0 but for some."""
    names = [f"varlen_requests_total {outcome}" for outcome in OUTCOMES]
    names += ["varlen_sequences_total", "varlen_response_cache_entries"]
    names += ["varlen_arena_reserved_bytes", "varlen_arena_capacity_bytes"]
    found = dict.fromkeys(names, 0.0)
    return found | {name.replace("__", " "): value for name, value in grown.items()}


def seen(right: int = 0, left: int = 0, invalid: int = 0) -> dict[str, ModelEndings]:
    """Return what clients saw of `minilm`, in requests of one row."""
    ledger = Ledger()
    endings = [Ending("right", "minilm")] * right + [Ending("left", "minilm")] * left
    endings += [Ending("refused", "minilm", "INVALID_ARGUMENT", is_ours=True)] * invalid
    for ending in endings:
        ledger.add("a request", "kind", ending)
    return ledger.by_model


def test_a_request_without_an_end_is_lost():
    ledger, begun, answer = Ledger(), Semaphore(0), Event()

    def silent(draw: random.Random, target: None) -> Ending:
        begun.release()
        answer.wait()
        return Ending("right")

    # the patience ends at once, and the time to send not before both requests have begun
    sent = send_all(
        None, [Share(1, silent)], Bounds(60, 2), ledger, name="1", threads=2, patience=-60
    )
    assert all(begun.acquire(timeout=50) for _ in range(2))
    ledger.close()
    answer.set()

    assert sent == 0
    assert ledger.by_kind["silent"]["lost"] == ledger.num_problems == 2


def test_what_fails_beside_the_requests_is_a_problem():
    ledger, hold = Ledger(), Event()

    def failing(is_over: Event) -> None:
        is_over.wait()
        raise AssertionError("it is not unloaded")

    with beside("the thread that reloads", failing, ledger):
        assert not ledger.num_problems
    with beside("the kill", lambda _: hold.wait(), ledger, patience=0.05):
        pass
    with beside("the filler", lambda is_over: is_over.wait(), ledger):
        pass
    hold.set()

    reason = "the thread that reloads failed: AssertionError('it is not unloaded')"
    assert ledger.problems == [reason, "the kill did not end within 0.05 s"]


def test_a_wrong_answer_and_a_message_that_leaks_are_problems():
    ledger = Ledger()
    ledger.add("7", "embed", Ending("wrong", "minilm", message="the answer is another one"))
    ledger.add("8", "bad", Ending("refused", "minilm", message="no /opt/models/x/1/config.json"))
    ledger.add("9", "bad", Ending("refused", "minilm", message="text is empty"))

    assert ledger.num_problems == 2
    assert "7: embed is wrong" in ledger.problems[0]
    assert "/opt/models/x/1/config.json" in ledger.problems[1]


@pytest.mark.parametrize(
    "message",
    [
        "key 'triton_python_backend_shm_region_4'",
        'Traceback (most recent call last):\n File "x"',
        "at model.py:31",
        "an object at 0x7f3a9c0011d0",
    ],
)
def test_what_tells_of_the_inside_is_a_leak(message):
    assert find_leak(message)
    assert not find_leak("input_ids has 900 tokens; this model takes at most 512 (and/or truncate)")
    assert not find_leak('tokenizer.json cannot be read: invalid type: string "../../etc"')


def test_counters_that_agree_with_the_clients_are_no_problem():
    before = Counters({"minilm": series()})
    after = Counters(
        {
            "minilm": series(
                varlen_requests_total__ok=12,
                varlen_requests_total__invalid=3,
                varlen_sequences_total=12,
            )
        }
    )

    # two of the three clients that left were answered
    assert not before.disagreements(after, seen(right=10, left=3, invalid=3), is_complete=True)


@pytest.mark.parametrize(
    ("grown", "problem"),
    [
        ({"varlen_requests_total__ok": 9}, "9 requests as ok; clients saw 10 to 11"),
        ({"varlen_requests_total__ok": 12}, "12 requests as ok; clients saw 10 to 11"),
        ({"varlen_requests_total__failed": 2}, "2 requests as failed; clients saw 0 to 1"),
        ({"varlen_requests_total__invalid": 1}, "1 requests as invalid; clients saw 2 to 3"),
        ({"varlen_sequences_total": 9}, "9 sequences ran; clients saw 10 to 11 rows"),
        ({"varlen_arena_reserved_bytes": 1}, "the arena is larger than its limit"),
    ],
)
def test_counters_that_disagree_are_found(grown, problem):
    right = {
        "varlen_requests_total__ok": 10,
        "varlen_requests_total__invalid": 2,
        "varlen_sequences_total": 10,
    }
    before, after = series(), series(**(right | grown))

    [found] = Counters({"minilm": before}).disagreements(
        Counters({"minilm": after}), seen(right=10, left=1, invalid=2), is_complete=True
    )

    assert problem in found


def names(mark: str) -> list[str]:
    """Return the names of the processes with a mark."""
    return [Path(f"/proc/{pid}/comm").read_text().strip() for pid in marked(mark)]


@pytest.fixture
def marked_process():
    """A process with the mark "a test" that has started another one."""
    script = "tail -f /dev/null & wait"
    process = subprocess.Popen(
        ["/bin/sh", "-c", script], env={MARK: "a test"}, start_new_session=True
    )
    with process:
        # while a process starts a program, it has no environment for a moment
        while "tail" not in names("a test"):
            time.sleep(0.01)
        while len(names("a test")) < 2:
            time.sleep(0.01)
        yield process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_an_orphan_of_a_killed_process_is_found(marked_process):
    before = State.of("a test")
    assert not before.growth(State.of("a test"))
    [orphan] = set(marked("a test")) - {marked_process.pid}

    marked_process.kill()
    marked_process.wait()

    assert left_over("a test", seconds=0) == [orphan]
    [found] = before.growth(State.of("a test"))
    assert "processes: {'other': 2} became {'other': 1}" in found
    os.kill(orphan, signal.SIGKILL)
    assert not left_over("a test")


def test_leaked_descriptors_and_processes_are_found():
    before = State({"server": 1}, 50, 20, 300.0, 2.0)
    after = State({"server": 1, "worker": 1}, 57, 25, 370.0, 2.0)

    assert not before.growth(before)
    processes, *others = before.growth(after)
    assert processes == "processes: {'server': 1} became {'server': 1, 'worker': 1}"
    assert [each.partition(":")[0] for each in others] == ["descriptors", "threads", "memory"]


def test_a_kind_whose_requests_prove_nothing_is_a_problem():
    ledger = Ledger()
    for number, end in enumerate(("right", "refused", "refused", "refused")):
        ledger.add(str(number), "embed", Ending(end))
    sent: dict[str, Least] = {"embed": {"right": 0.25, "refused": 0.0}}

    ledger.check_least(sent)
    assert not ledger.problems

    ledger.check_least({**sent, "stream": {"right": 0.0}})
    ledger.check_least({"embed": {"right": 1.0}})
    assert ledger.problems == [
        "0 of 0 requests of the kind stream are right; at least 1 must be",
        "1 of 4 requests of the kind embed are right; at least 4 must be",
    ]


def test_the_rows_of_a_phase_add_up_and_its_page_names_every_problem():
    report = Report("mixed", seconds=12.34)
    report.before = report.after = State({"server": 1}, 50, 20, 300.04, 2.0)
    for ending in (Ending("right"), Ending("right"), Ending("wrong", message="[a](b)")):
        report.ledger.add("3 mixed 8", "embed", ending)
    report.ledger.add("3 mixed 9", "http_timeout", Ending("left"))
    run = Provenance("2026-01-01", "abc", "a CPU x2", 0, "python=3.11", "python -m tests.campaign")

    whole, *kinds = figures.rows([report], seed=3)

    assert [kind["kind"] for kind in kinds] == ["embed", "http_timeout"]
    for name in ("requests", "right", "wrong", "left"):
        assert whole[name] == sum(int(kind[name] or 0) for kind in kinds)
    assert (whole["problems"], whole["memory_mib_after"], kinds[0]["problems"]) == (1, 300.0, None)
    page = figures.page([report], 3, run)
    assert "\n    mixed: 3 mixed 8: embed is wrong:  [a](b)\n" in page  # code, not a link
    assert "4 requests, 1 wrong, 0 lost" in page


def test_lines_of_faults_are_found_in_a_log():
    log = "I1122 12:00:00 ready\nW1122 a warning\nE1122 12:00:01 failed to load 'x'\nSignal (11) received."

    assert len(unexpected_lines(log)) == 2
    assert unexpected_lines(log, ["failed to load"]) == ["log: Signal (11) received."]
    assert not unexpected_lines("Signal (15) received.")


def test_a_stream_of_requests_depends_on_its_name_alone_and_keeps_its_bounds():
    def run(threads: int) -> tuple[set[int], Counter[str]]:
        numbers: set[int] = set()

        def even(draw: random.Random, target: set[int]) -> Ending:
            target.add(draw.randrange(10**9))
            return Ending("right")

        def failing(draw: random.Random, target: set[int]) -> Ending:
            raise RuntimeError("a client has a bug")

        ledger = Ledger()
        mix = (Share(3, even), Share(1, failing))
        assert send_all(numbers, mix, Bounds(60, 40), ledger, name="1 x", threads=threads) == 40
        return numbers, Counter({kind: ends.total() for kind, ends in ledger.by_kind.items()})

    assert run(1) == run(5)
    numbers, kinds = run(2)
    assert kinds["failing"]
    assert len(numbers) == kinds["even"] == 40 - kinds["failing"]


@pytest.mark.parametrize(("kills", "end"), [(0, "wrong"), (1, "wrong"), (2, "refused")])
def test_a_request_may_fail_only_if_two_workers_were_killed_meanwhile(kills, end):
    message = "worker processes ended while they ran this request; the server's log says why"
    failed = Ending("wrong", "writer", "ServerError", message)
    victim = SimpleNamespace(kills_since=lambda began: kills)
    send = unless_killed_twice(lambda draw, target: failed, {"writer": victim})

    assert send(random.Random(0), None).end == end


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ((200, {"text_output": "8", "finish_reason": "stop"}), "right"),
        ((200, {"text_output": "b", "finish_reason": "stop"}), "wrong"),
        ((200, {"text_output": "b", "finish_reason": "length"}), "answered"),
        ((400, {"error": "structured_outputs cannot be served: 9 states are too many"}), "refused"),
        ((500, {"error": "the model failed"}), "wrong"),
    ],
)
def test_an_answer_that_breaks_its_constraint_is_wrong(answer, end, monkeypatch):
    monkeypatch.setattr(constrained, "http_call", lambda *_: answer)
    monkeypatch.setattr(constrained, "random_regex", lambda _: "[0-9]")
    fuzzed, target = constrained.FuzzedConstraints(), SimpleNamespace(server=None)

    endings = [fuzzed.constrained_regex(random.Random(seed), target).end for seed in range(3)]

    assert endings == [end] * 3
    assert fuzzed.num_distinct == 1
    assert fuzzed.refusals == ({"states are too many": 3} if end == "refused" else {})


def test_characters_that_python_does_not_know_are_not_judged():
    # a code point that no version of Unicode has assigned
    assert oracle.Oracle().holds({"regex": ".*"}, "a\U0003fffd") is None


def test_a_check_that_takes_too_long_is_given_up_and_later_ones_work(monkeypatch):
    checks = oracle.Oracle()
    assert checks.holds({"regex": "[0-9]+"}, "17")
    with monkeypatch.context() as patch:
        patch.setattr(oracle, "_SECONDS", 0.1)
        # each further letter doubles the time
        assert checks.holds({"regex": "(a*)*b"}, "a" * 60) is None

    assert checks.holds({"regex": "[0-9]+"}, "x") is False
    assert checks.holds({"json": {"type": "integer"}}, "17")
    assert checks.holds({"json": {"type": "integer"}}, "seventeen") is False
