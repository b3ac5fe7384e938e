"""Files that other users, or strangers, have written: caches, marks of a drain, checkpoints."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.processes import NOBODY, as_user, locked_by
from varlen.costs.store import CostStore
from varlen.server.draining import marker_of, read_state, write_state
from varlen_kernels.cache_files import CacheFolder, holder_pid
from varlen_kernels.cpu.calls import machine_code
from varlen_kernels.cpu.native.target_cpu import target_cpu

from ..phase import Campaign
from ..report import Report

_NAME = "run_alone"
_CODE = b"code of another user"
_PATTERN = "(a+)+b"
_SHORT_TEXT = "a" * 30
# Far longer than any refusal takes on a busy machine, and the memory that loading the libraries takes.
_SECONDS, _MEMORY_BYTES = 120.0, 8 << 30
_FILES = (
    "config.json",
    "modules.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_PROGRAM, _COMMANDS = "varlen_client.cli.main", ("fetch", "doctor")


def code_of_another_user(_: Campaign, report: Report) -> None:
    """Leave an object file where compiled code is looked for."""
    file = machine_code.file_name(_NAME, target_cpu().level)

    def leave(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        content = hashlib.sha256(file.encode() + b"\0" + _CODE).digest() + _CODE
        (folder / file).write_bytes(content)

    for user in (0, NOBODY):
        with _shared() as shared:
            folder = shared / "varlen" / "code"
            as_user(user, partial(leave, folder))
            found = machine_code._read(CacheFolder(folder), file)
            holds = (found == _CODE) == (user == 0)
            report.check(holds=holds, problem=f"code of user {user}: {found!r}")


def costs_of_another_user(_: Campaign, report: Report) -> None:
    """Point the lock of measurements at a file of ours, and hold it."""
    with _shared() as shared, TemporaryDirectory() as own:
        precious = Path(own, "precious")
        precious.write_text("to be kept")
        as_user(NOBODY, partial(os.mkdir, shared / "varlen"))
        as_user(NOBODY, partial(os.symlink, precious, shared / "varlen" / "measuring.lock"))
        with CostStore(shared / "varlen").measuring(timeout=1.0):
            pass
        kept = precious.read_text()
        report.check(holds=kept == "to be kept", problem="a file of ours was emptied")
        # a link of the folder itself
        as_user(NOBODY, partial(os.symlink, own, shared / "link"))
        CostStore(shared / "link").save_texts({}, {})
        left = sorted(path.name for path in Path(own).iterdir())
        report.check(holds=left == ["precious"], problem=f"files behind a link: {left}")

        ours = CacheFolder(shared / "ours")
        with ours.lock("lock", 0.0):
            pass
        stolen = as_user(NOBODY, partial(os.open, shared / "ours" / "lock", os.O_RDONLY))
        report.check(holds="PermissionError" in stolen, problem=f"another user locks: {stolen}")


def marks_of_another_user(_: Campaign, report: Report) -> None:
    """Mark a server for a drain, and take the names of its marks."""
    marker = marker_of(os.getpid())
    assert marker is not None

    def mark() -> None:
        for name in (marker.name, f"{marker.name}.refusing.0", f"{marker.name}.{os.getpid()}"):
            marker.with_name(name).write_text("refusing")

    as_user(NOBODY, mark)
    try:
        state = read_state(marker)
        report.check(holds=state == "serving", problem=f"another user drains: {state}")
        write_state(marker, "refusing")
        state = read_state(marker)
        report.check(holds=state == "refusing", problem=f"another user stops a drain: {state}")
        write_state(marker, "serving")
    finally:
        for path in marker.parent.glob(f"{marker.name}*"):
            path.unlink()
    with _shared() as shared, locked_by(NOBODY, shared) as pid:
        descriptor = os.open(shared, os.O_RDONLY)
        found = holder_pid(descriptor)
        os.close(descriptor)
        report.check(holds=found == pid, problem=f"the lock of {pid} is said to be of {found}")


def checkpoints_of_strangers(campaign: Campaign, report: Report) -> None:
    """Fetch and examine checkpoints with pipes, devices and links out in place of files."""
    checkpoint = campaign.checkpoints.minilm.resolve()
    kinds: dict[str, Callable[[Path], object]] = {
        "pipe": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "link": lambda path: path.symlink_to("/etc/hostname"),
    }
    with TemporaryDirectory() as scratch:
        for number, (name, kind) in enumerate((name, kind) for name in _FILES for kind in kinds):
            campaign.progress(f"{report.name}: {kind} as {name}")
            folder = Path(scratch, f"{number}")
            shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.py"))
            (folder / name).unlink(missing_ok=True)
            kinds[kind](folder / name)
            command = _COMMANDS[number % len(_COMMANDS)]
            report.count("hostile checkpoints")
            said = _run(command, folder, Path(scratch, "models"))
            report.check(holds=name in said, problem=f"{command}, {kind} as {name}: {said[-300:]}")
            shutil.rmtree(folder)


def endless_patterns(campaign: Campaign, report: Report) -> None:
    """Fetch a checkpoint whose tokenizer takes very long for a short text."""
    from tokenizers import Regex, pre_tokenizers

    began = time.thread_time()
    try:
        pre_tokenizers.Split(Regex(_PATTERN), "isolated").pre_tokenize_str(_SHORT_TEXT)
    except BaseException as error:  # a panic of the library is no Exception
        report.check(holds="retry-limit" in str(error), problem=repr(error))
    report.notes["ms of a short text without the check"] = round(
        1000 * (time.thread_time() - began)
    )
    with TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        shutil.copytree(campaign.checkpoints.minilm.resolve(), folder)
        tokenizer = (folder / "tokenizer.json").read_text()
        split = f'{{"type":"Split","pattern":{{"Regex":"{_PATTERN}"}},"behavior":"Isolated","invert":false}}'
        begin, key, rest = tokenizer.partition('"pre_tokenizer"')
        (folder / "tokenizer.json").write_text(f'{begin}"unused": 0, {key}: {split}, "was"{rest}')
        said = _run("fetch", folder, Path(scratch, "models"))
        report.check(holds=f'the pattern "{_PATTERN}"' in said, problem=f"a pattern: {said[-300:]}")


def _run(name: str, folder: Path, repository: Path) -> str:
    """Return the errors of a command that must refuse a checkpoint, within time and memory."""
    arguments = [name, str(folder)]
    arguments += ["--repository", str(repository)] if name == "fetch" else []
    limited = f'ulimit -v {_MEMORY_BYTES // 1024}; exec "$@"'
    command = ["sh", "-c", limited, "sh", sys.executable, "-m", _PROGRAM, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {_SECONDS:g} s"
    # lines are wrapped
    return " ".join((done.stdout + done.stderr).split()) if done.returncode else "it succeeds"


@contextmanager
def _shared() -> Iterator[Path]:
    """Yield a folder that every user can write."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)
