"""A server with little shared memory: only large answers fail.

The server gets a mount namespace with a small /dev/shm of its own, which needs the right to make one.
"""

import random
import shlex
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np

from tests.server.clients import AnswerError, integers
from varlen_tools.local_server import find_command

from ..attacks import good
from ..beside import beside
from ..drive import Share
from ..endings import TIMEOUT_SECONDS, Ending
from ..models import DECODER, HIDDEN
from ..phase import Campaign, attacked_server, send_mix
from ..report import Report
from ..target import MAX_ROWS, Target

_SIZE_MIB = 10
_MODELS = (HIDDEN, DECODER)
_NAMESPACE = ("unshare", "--map-root-user", "--mount", "--propagation", "private", "sh", "-c")
_MOUNT = f"mount -t tmpfs -o size={_SIZE_MIB}m tmpfs /dev/shm"
# What our backend and the server itself say; the latter names the region on server 2.51.
_OUR_REASONS = ("shared memory", "the queue is full")
_SERVER_REASON = "Failed to increase the shared memory pool"
# Errors of varlen's client by the codes of the server.
_CODES = {
    "InvalidRequest": "INVALID_ARGUMENT",
    "ServerUnavailable": "UNAVAILABLE",
    "ServerError": "INTERNAL",
}


def shared_memory(campaign: Campaign, report: Report, seconds: float) -> None:
    """Ask for answers that do not fit, while a file fills and frees /dev/shm."""
    if subprocess.run([*_NAMESPACE, _MOUNT], capture_output=True, check=False).returncode:
        report.count("skipped: no right to mount")
        return
    command = campaign.scratch / "tritonserver-with-little-memory"
    inner = f'{_MOUNT} && exec {shlex.quote(find_command("tritonserver"))} "$@"'
    line = shlex.join([*_NAMESPACE, inner, "tritonserver"])
    command.write_text(f'#!/bin/sh\nexec {line} "$@"\n')
    command.chmod(0o755)
    mix = (
        Share(4, large_hidden, {"right": 0.1, "refused": 0.0}),
        Share(2, _hidden, {"right": 0.5}),
        Share(1, _generate, {"right": 0.5}),
    )
    with attacked_server(
        campaign, report, _MODELS, command=command, allowed_log=(_SERVER_REASON, *_OUR_REASONS)
    ) as target:
        folder = Path(f"/proc/{target.server.pid}/root/dev/shm")
        fill = beside(
            "the thread that fills /dev/shm", partial(_fill, folder, campaign.seed), report.ledger
        )
        send_mix(campaign, report, target, mix, seconds, beside=fill)


def large_hidden(draw: random.Random, target: Target) -> Ending:
    """A vector for each of thousands of tokens: up to 8 MiB."""
    known = target.known.encoders[HIDDEN]
    row = draw.randrange(len(known.ids))
    rows = draw.choice((8, 32, MAX_ROWS))
    inputs = {"input_ids": integers([known.ids[row]] * rows)}
    client = draw.choice((target.grpc, target.http))
    try:
        answer = client.infer(HIDDEN, inputs, timeout=TIMEOUT_SECONDS)
    except AnswerError as error:
        return _refused(Ending("wrong", HIDDEN, error.code, error.message, rows))
    is_right = known.is_right(answer, np.stack([known.of_ids[row]] * rows))
    return Ending("right" if is_right else "wrong", HIDDEN, rows=rows)


def _hidden(draw: random.Random, target: Target) -> Ending:
    """Smaller answers."""
    return _refused(good.hidden(draw, target))


def _generate(draw: random.Random, target: Target) -> Ending:
    """Text, which takes next to nothing."""
    return _refused(good.generate(draw, target))


def _refused(ending: Ending) -> Ending:
    """Return too little shared memory, or a full queue, as a refusal."""
    if _SERVER_REASON in ending.message:
        # it never reached our backend, or never left it
        return Ending("left", ending.model, ending.code, rows=ending.rows)
    if ending.end == "wrong" and any(reason in ending.message for reason in _OUR_REASONS):
        code = _CODES.get(ending.code, ending.code)
        return Ending("refused", ending.model, code, ending.message, ending.rows, is_ours=True)
    return ending


def _fill(folder: Path, seed: int, is_over: Event) -> None:
    """Take a random part of /dev/shm for a moment, again and again."""
    draw, file = random.Random(f"{seed} fill"), folder / "filler"
    while not is_over.wait(draw.uniform(0.05, 0.5)):
        # up to what fits
        with suppress(OSError):
            file.write_bytes(bytes(draw.randint(1, _SIZE_MIB) << 20))
        time.sleep(draw.uniform(0.0, 0.5))
        file.unlink(missing_ok=True)
    file.unlink(missing_ok=True)
