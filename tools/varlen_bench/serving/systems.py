"""What is served: plain python-backend models as people write them, and ours by policy and execution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Engine: TypeAlias = Literal["varlen", "transformers", "onnxruntime"]

OURS = "varlen-dp"
TOKEN_BUDGET = "varlen-token-budget"  # noqa: S105 - a policy
DYNAMIC_BATCHER = "transformers-fp32-dynamic"
DP_PADDED, FIFO_PADDED = "varlen-dp-padded", "varlen-fifo-padded"


@dataclass(frozen=True, slots=True)
class System:
    """One way to serve the model.

    Attributes:
        name: of the rows.
        engine: what runs it.
        dtype: of weights; ours chooses, as it does by default.
        dynamic: whether the server's dynamic batcher puts requests together. Ours does without: it has its own.
        parameters: of our engine.
        is_key: a figure of the BENCH line is about it, or may be: it is searched in full.
    """

    name: str
    engine: Engine
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    dynamic: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)
    is_key: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether this project is measured, not a peer."""
        return self.engine == "varlen"


# The world of the paper: at most so many requests a batch, and no bound on tokens that would cut it first.
_PADDED = {"execution": "padded", "max_batch_sequences": "20", "max_batch_tokens": "10240"}


def _ours(name: str, policy: str, execution: str = "packed", *, is_key: bool = False) -> System:
    parameters = {"policy": policy} | (_PADDED if execution == "padded" else {})
    return System(name, "varlen", parameters=parameters, is_key=is_key)


# Ours first: they tell how far the others' load goes.
SYSTEMS = (
    _ours(TOKEN_BUDGET, "token_budget", is_key=True),
    _ours(OURS, "dp", is_key=True),
    _ours(DP_PADDED, "dp", "padded"),
    _ours(FIFO_PADDED, "fifo", "padded"),
    _ours("varlen-none", "none"),
    System(DYNAMIC_BATCHER, "transformers", "fp32", dynamic=True, is_key=True),
    System("onnxruntime-fp32-single", "onnxruntime", "fp32", is_key=True),
    System("onnxruntime-fp32-dynamic", "onnxruntime", "fp32", dynamic=True, is_key=True),
    System("transformers-fp32-single", "transformers", "fp32", is_key=True),
    System("transformers-bf16-dynamic", "transformers", "bf16", dynamic=True, is_key=True),
    System("transformers-bf16-single", "transformers", "bf16", is_key=True),
)
# A quick look leaves out what hardly any key of the BENCH line will be about.
_NOT_QUICK = ("varlen-none", "transformers-bf16", "transformers-fp32-single")


def chosen_systems(names: str, *, quick: bool) -> list[System]:
    """Return the systems of these names or beginnings of names, separated by commas; all if there is none.

    Raises:
        ValueError: a name fits none.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        return [s for s in SYSTEMS if not (quick and s.name.startswith(_NOT_QUICK))]
    known = {system.name for system in SYSTEMS}
    chosen: set[str] = set()
    for name in wanted:
        # a whole name is no beginning of longer ones
        fitting = {name} & known or {other for other in known if other.startswith(name)}
        if not fitting:
            raise ValueError(f"no system is called {name!r}; there are {[s.name for s in SYSTEMS]}")
        chosen |= fitting
    return [system for system in SYSTEMS if system.name in chosen]


def system(name: str) -> System:
    """Return the system of this name."""
    return next(system for system in SYSTEMS if system.name == name)
