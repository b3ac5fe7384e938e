"""The server's log: what models do while they load, and why one did not load."""

import re

# Time, process, file and line come before each message. Newer servers quote it.
_MESSAGE = re.compile(r'^[IWE]\d{4} [\d:.]+ \d+ [\w.]+:\d+\] "?(.*?)"?$')
_LOADING = re.compile(r"loading: (?P<model>.+):\d+")
# A line of varlen, in which each model names itself.
_VARLEN = re.compile(r"varlen: (?P<model>\S+) v\d+: (?P<text>.+)")
# A line of a process that a model has forked.
_WORKER = re.compile(r"varlen: worker \d+: (?P<text>.+)")
_LOADED = re.compile(r"successfully loaded '(?P<model>.+)'")
_FAILED = re.compile(r"failed to load '(?P<model>.+)' version \d+: (?P<reason>.+)")
_NOT_READ = re.compile(r"Poll failed for model directory '(?P<model>.+)': (?P<reason>.+)")
# What comes before the message of a Python model's error: its code and its class.
_KIND = re.compile(
    r"^(Internal|Invalid argument|Unavailable|Unsupported): (TritonModelException: )?"
)
# Details of a line, which a stage leaves out.
_DETAILS = re.compile(r"(: |; | \().*")
# What the server adds to an error of a Python model: where it was raised.
_TRACE = "\n\nAt:"


def loading_stage(log: str) -> str | None:
    """Return the latest stage of a load; None if no model has begun."""
    for line in reversed(log.splitlines()):
        if found := _WORKER.fullmatch(line):
            return _DETAILS.sub("", found["text"])
        message = _message(line)
        if message is None:
            continue
        if found := _LOADING.fullmatch(message):
            return f"loading {found['model']}"
        if found := _LOADED.fullmatch(message):
            return f"{found['model']} is loaded"
        if found := _VARLEN.fullmatch(message):
            return f"loading {found['model']}: {_DETAILS.sub('', found['text'])}"
    return None


def load_failures(log: str) -> list[str]:
    """Return why each model was not loaded, with its name first."""
    found: dict[str, str] = {}
    for message in filter(None, map(_message, log.splitlines())):
        failed = _FAILED.fullmatch(message) or _NOT_READ.fullmatch(message)
        if failed:
            found.setdefault(failed["model"], _reason(failed["reason"]))
    return [f"{model} cannot be loaded: {reason}" for model, reason in found.items()]


def _message(line: str) -> str | None:
    """Return the server's message in a line; None if there is none."""
    found = _MESSAGE.match(line)
    return found[1] if found else None


def _reason(text: str) -> str:
    r"""Return a reason as it was raised; the log has `\n` and `\"` in it."""
    text = re.sub(r"\\(.)", lambda each: {"n": "\n"}.get(each[1], each[1]), text)
    return _KIND.sub("", text).partition(_TRACE)[0].strip()
