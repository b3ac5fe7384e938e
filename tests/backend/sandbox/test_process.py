"""The sandbox's host and its processes, whatever ends them or the host."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.backend.decoding.sandboxes import close_sandboxes, new_template
from varlen.errors import CheckpointError, EngineError
from varlen.sandbox import process as sandbox_process
from varlen.sandbox.limits import SandboxLimits

PLAIN = "{{ messages[0].content }}"


@pytest.fixture(scope="module", autouse=True)
def _sandboxes_end():
    yield
    close_sandboxes()


def template_of(source=PLAIN, *, max_characters=1 << 22, **options):
    return new_template(source, {}, max_characters=max_characters, **options)


def message(text):
    return [{"role": "user", "content": text}]


def test_a_prompt_of_megabytes_does_not_wait_for_room_in_the_socket():
    template = template_of()
    # three times as long in JSON as in UTF-8
    text = "ж" * 500_000

    assert template.render(message(text)) == text


def test_a_process_that_was_killed_between_two_prompts_is_replaced():
    template = template_of()
    [idle] = template._idle
    os.kill(idle._pid, signal.SIGKILL)

    assert template.render(message("a")) == "a"


def test_a_process_that_is_killed_is_no_fault_of_the_request():
    template = template_of()
    process = template._sandbox.fork("template")
    os.kill(process._pid, signal.SIGKILL)

    with pytest.raises(EngineError):
        template._answer_of(process, b"{}")


def test_the_end_of_a_process_of_a_former_host_does_no_harm_to_the_next_host():
    template = template_of()
    sandbox, [idle] = template._sandbox, template._idle
    former = sandbox._host._process
    os.kill(former.pid, signal.SIGKILL)
    former.wait(60)
    template._idle.clear()
    assert template.render(message("a")) == "a"
    host = sandbox._host

    idle.end()
    # nor does a number that the host does not know
    assert host.end(1) is None

    assert template.render(message("b")) == "b"
    assert sandbox._host is host


def test_too_many_open_files_of_the_engine_end_no_process(monkeypatch):
    template = template_of()
    host = template._sandbox._host

    def no_pair():
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(sandbox_process.socket, "socketpair", no_pair)
        with pytest.raises(EngineError, match="no process can be started: Too many open files"):
            template._sandbox.fork("template")

    assert template._sandbox._host is host
    assert template.render(message("a")) == "a"


def test_a_host_that_gets_no_descriptor_says_so(monkeypatch):
    template = template_of()

    def send_none(control, messages, _):
        control.send(messages[0])

    with monkeypatch.context() as patch:
        patch.setattr(sandbox_process.socket, "send_fds", send_none)
        with pytest.raises(EngineError, match="too many open files"):
            template._sandbox.fork("template")

    assert template.render(message("a")) == "a"


def test_a_template_nested_too_deeply_is_not_valid():
    source = "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}"

    with pytest.raises(CheckpointError, match="the chat template cannot be read"):
        template_of(source)


def test_limits_hold_in_a_process_that_ignores_the_ends_of_children_and_blocks_the_timer():
    program = """
        import signal
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
        from tests.backend.sandbox.test_process import refused_for_time
        print(refused_for_time())
    """
    assert "more than 0.1 s of processor time" in printed_by(program)


def refused_for_time():
    """Return why a costly template is refused; for another process."""
    loops = "{% for a in range(messages | length * 100000) %}{{ '' }}{% endfor %}"
    try:
        template_of(loops * 50 + PLAIN, limits=SandboxLimits(0.1, 1 << 28))
    except CheckpointError as error:
        return str(error)
    finally:
        close_sandboxes()
    return "served"


def printed_by(program):
    """Return what another process prints that runs a program."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_lower_limit_of_memory_that_holds_already_stays():
    # in the process of a template only: this one keeps its limits
    program = """
        import resource
        from varlen.sandbox.limits import limit_memory
        most = 1 << 33
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        limit_memory(1 << 40)
        print(resource.getrlimit(resource.RLIMIT_AS) == (most, most))
    """
    assert printed_by(program).strip() == "True"
