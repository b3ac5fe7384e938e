"""The parameters of a request: a JSON object, and the deadline of the server's protocol."""

from collections.abc import Container, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from varlen.errors import RequestError
from varlen.parameter import LONGEST_NEAR_MISS, read_json, refuse

# A shorter `timeout` of the server's protocol is a number in another unit: passing the request to this
# process and its response back takes about half of this.
_MIN_TIMEOUT_MICROSECONDS = 1000
# Refuses `trunc` and `deadline`, and ignores `priority` (0.67) and `request_id` (0.69).
_NEAR_MISS = 0.75
# Each name that is not ours is compared with all that are.
_MAX_NAMES = 100
# A name of ours with so few letters is another one with any other letter: top_k and top_n.
_SHORT_NAME = 5


def read_parameters(
    parameters: str, names: tuple[str, ...], foreign: Container[str] = ()
) -> Mapping[str, Any]:
    """Return the parameters of a request by name.

    Args:
        parameters: a JSON object, or nothing.
        names: names of our parameters; other names stay unless they look like a misspelt name of these.
        foreign: names of other servers, which are no misspelt ones.

    Raises:
        RequestError: this is no JSON object, or too long; or it has too many names, or a misspelt one.
    """
    options = read_json("parameters", parameters) if parameters else {}
    if not isinstance(options, dict):
        refuse("parameters", options, "a JSON object")
    if len(options) > _MAX_NAMES:
        raise RequestError(
            f"the request has {len(options)} parameters; allowed: up to {_MAX_NAMES}"
        )
    for name in options:
        is_short = len(name) <= LONGEST_NEAR_MISS and name not in foreign
        if is_short and (meant := _misspelt(name, names)):
            raise RequestError(
                f'unknown parameter "{name}". Did you mean "{meant}"? Allowed: {", ".join(names)}'
            )
    return options


def deadline_seconds(deadline_ms: float | None, timeout_microseconds: int) -> float | None:
    """Return the earlier of a request's two deadlines, in seconds from now."""
    if 0 < timeout_microseconds < _MIN_TIMEOUT_MICROSECONDS:
        raise RequestError(
            f"timeout is {timeout_microseconds} microseconds; send at least {_MIN_TIMEOUT_MICROSECONDS}"
            " microseconds, or no timeout (the model's setting ignore_request_timeout ignores it)"
        )
    deadlines = [timeout_microseconds / 1e6] if timeout_microseconds else []
    if deadline_ms is not None:
        deadlines.append(deadline_ms / 1e3)
    return min(deadlines, default=None)


@lru_cache(maxsize=1024)
def _misspelt(name: str, names: tuple[str, ...]) -> str | None:
    """Return the parameter that `name` is a near miss of, or None."""
    # the server passes on HTTP headers too; "X-Deadline-Ms" is not a parameter
    if name in names or name.lower().startswith("x-"):
        return None
    long = [each for each in names if len(each) > _SHORT_NAME]
    same = [each for each in names if _letters(each) == _letters(name)]
    return next(iter(same or get_close_matches(name.lower(), long, n=1, cutoff=_NEAR_MISS)), None)


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
