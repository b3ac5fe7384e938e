"""Ops timed one by one, and their sums by class."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

# What a run spends outside of ops.
REST = "Python and rest"
_OTHER = "other ops"
_CLASSES: Mapping[str, str] = {
    "matrix products": "linear linear_packed linear_activate linear_panels linear_panels_activate"
    " linear_int8 linear_int8_panels linear_int8_panels_activate term_weights top_terms",
    "attention": "attention_varlen attention_padded attention_paged attention_tiles paged_tiles",
    "norms and activations": "layer_norm add_layer_norm residual_layer_norm rms_norm residual_rms_norm norm_heads"
    " activate activate_gate silu_gate tanh",
    "KV cache": "append_kv copy_blocks",
    "beams and sampling": "beam_step follow_beams advance_searches edit_logits sample_tokens choose",
    _OTHER: "",
    REST: REST,
}
CLASSES = tuple(_CLASSES)
_CLASS_OF = {op: name for name, ops in _CLASSES.items() for op in ops.split()} | {REST: REST}


def class_of(op: str) -> str:
    """Return the class of an op: one of `CLASSES`."""
    return _CLASS_OF.get(op, _OTHER)


class TimedKernels:
    """The kernels of a module, each call timed.

    Attributes:
        seconds, calls: time and number of calls by name of the op.
        threads: the threads that ran ops.
    """

    def __init__(self, kernels: object) -> None:
        self._kernels = kernels
        # worker threads call at the same time
        self._lock = Lock()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.threads: set[int] = set()

    def __getattr__(self, name: str) -> object:
        return self.timed(name, getattr(self._kernels, name))

    def timed(self, name: str, call: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return the call, timed as the op of this name."""

        def measured(*operands: _P.args, **attributes: _P.kwargs) -> _R:
            began = time.perf_counter()
            result = call(*operands, **attributes)
            spent = time.perf_counter() - began
            with self._lock:
                self.seconds[name] += spent
                self.calls[name] += 1
                self.threads.add(get_ident())
            return result

        return measured

    def clear(self) -> None:
        """Forget all calls."""
        self.seconds.clear()
        self.calls.clear()
        self.threads.clear()


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the time of some runs went.

    Attributes:
        seconds: time of each op and of `REST`, summed over the threads that ran ops.
    """

    title: str
    calls: Mapping[str, int]
    seconds: Mapping[str, float]
    tokens_per_second: float

    def shares(self) -> dict[str, float]:
        """Return the share of each op, the largest first; together 1."""
        total = sum(self.seconds.values())
        by_time = sorted(self.seconds.items(), key=lambda entry: -entry[1])
        return {op: seconds / total for op, seconds in by_time}

    def class_shares(self) -> dict[str, float]:
        """Return the share of each class, in the order of `CLASSES`; together 1."""
        shares = dict.fromkeys(CLASSES, 0.0)
        for op, share in self.shares().items():
            shares[class_of(op)] += share
        return shares


def measure(
    title: str,
    runs: Sequence[Callable[[], object]],
    timed: TimedKernels,
    *,
    tokens: int,
    rounds: int,
    prepare: Callable[[], None] | None = None,
) -> Breakdown:
    """Return where the time of the runs goes, after one unmeasured round.

    Args:
        runs: functions that call ops of `timed`, in this thread or in others at the same time.
        timed: the kernels that the runs use; cleared.
        prepare: function to call before each run; not measured.
    """
    calls: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    elapsed = 0.0
    for number in range(1 + rounds):
        for run in runs:
            if prepare is not None:
                prepare()
            timed.clear()
            began = time.perf_counter()
            run()
            spent = time.perf_counter() - began
            if number == 0:
                continue
            elapsed += spent
            calls.update(timed.calls)
            for op, in_op in timed.seconds.items():
                seconds[op] += in_op
            # a worker thread that waits for another one is not in an op either
            seconds[REST] += spent * len(timed.threads) - sum(timed.seconds.values())
    return Breakdown(title, calls, seconds, rounds * tokens / elapsed)
