"""What a run measures: systems, ours and plain python-backend models, and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from varlen_bench.compare.systems import NamedEngine, by_name
from varlen_bench.harness.accuracy import EQUAL_QUALITY
from varlen_bench.harness.command import select
from varlen_bench.peers.checkpoints import config_field
from varlen_bench.peers.engines import Precision
from varlen_tools.workloads import Mix

# The tensors of every model.
INPUT, OUTPUT = "input_ids", "sentence_embedding"

OURS = "varlen-dp"
NONE = "varlen-none"
TOKEN_BUDGET = "varlen-token-budget"  # noqa: S105 - a policy
DYNAMIC_BATCHER = "transformers-fp32-dynamic"
# an older commit
BEFORE = "varlen-before"
OURS_FP32, OURS_INT8 = "varlen-fp32", "varlen-int8"
OURS_PADDED, FIFO_PADDED = "varlen-dp-padded", "varlen-fifo-padded"


@dataclass(frozen=True, slots=True)
class ServedSystem(NamedEngine):
    """One way to serve the model; its first model has its name."""

    # of a peer
    precision: Precision = "fp32"
    # whether the server's dynamic batcher joins requests; our backend has a scheduler instead
    dynamic: bool = False
    # whether the server runs an instance of the model on each core; else one on all
    per_core: bool = False
    # commit of our backend; the working tree if empty
    revision: str = ""
    # of our backend
    parameters: Mapping[str, str] = field(default_factory=dict)
    # models of one server; requests go to one after another
    copies: int = 1

    @property
    def models(self) -> list[str]:
        """Names of its models."""
        return [self.name, *(f"{self.name}-{i}" for i in range(2, self.copies + 1))]

    @property
    def least_cosine(self) -> float:
        """Mean cosine to fp32 of random token ids below which answers are wrong."""
        if self.precision == "int8":
            # peers quantize more; how far they are off is in the encoder's rows
            return 0.95
        # of real text int8 has 0.9997
        return 0.99 if self.parameters.get("dtype") == "int8" else EQUAL_QUALITY

    @property
    def is_key(self) -> bool:
        """Whether the BENCH line may have its `sustained`, which is then searched in full."""
        return not self.is_ours or self.name in {OURS, OURS_FP32, OURS_INT8, TOKEN_BUDGET}


def before(revision: str) -> ServedSystem:
    """Return our backend as of a commit, with a token budget."""
    return ServedSystem(BEFORE, "varlen", revision=revision, parameters={"policy": "token_budget"})


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run measures.

    Attributes:
        seconds: measured seconds of a load of a key system, or of an overload.
        turns: turns of the paired comparison.
        peer_batch: largest batch of the server's dynamic batcher.
        note: note in every row.
    """

    model: Path
    systems: Sequence[ServedSystem]
    mixes: Sequence[Mix]
    seconds: float
    turns: int
    quick: bool
    peer_batch: int
    threads: int
    seed: int
    note: str = ""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return config_field(self.model, "vocab_size")

    def search_effort(self, system: ServedSystem, *, is_hopeless: bool) -> tuple[float, int]:
        """Return the measured seconds of each load of a search, and its number of steps."""
        if self.quick:
            return self.seconds, 2 if system.is_key and not is_hopeless else 0
        if is_hopeless:
            return 0.75 * self.seconds, 1
        return (self.seconds, 4) if system.is_key else (0.75 * self.seconds, 2)


# The conditions of the paper: at most 20 requests a batch, and no token limit below that.
_PADDED = {"execution": "padded", "max_batch_sequences": "20", "max_batch_tokens": "10240"}


def _ours(name: str, policy: str, **parameters: str) -> ServedSystem:
    padded = _PADDED if name.endswith("-padded") else {}
    return ServedSystem(name, "varlen", parameters={"policy": policy} | padded | parameters)


# The strongest peers, each with both forms of batching and of instances.
_PEERS = [
    ServedSystem(
        f"{engine}-{precision}-{'dynamic' if dynamic else 'single'}{'-per-core' if per_core else ''}",
        engine,
        precision,
        dynamic=dynamic,
        per_core=per_core,
    )
    for engine in ("onnxruntime", "openvino")
    for precision in ("fp32", "int8")
    for dynamic in (False, True)
    for per_core in (False, True)
]
# Ours first: they decide the load at which the peers are saturated.
SYSTEMS = by_name(
    _ours(TOKEN_BUDGET, "token_budget"),
    _ours(OURS, "dp"),
    ServedSystem(OURS_FP32, "varlen", parameters={"dtype": "fp32"}),
    ServedSystem(OURS_INT8, "varlen", parameters={"dtype": "int8"}),
    ServedSystem("varlen-int8-eight", "varlen", parameters={"dtype": "int8"}, copies=8),
    _ours(OURS_PADDED, "dp", dp_pressure="infinite"),
    _ours(FIFO_PADDED, "fifo"),
    _ours(NONE, "none"),
    ServedSystem(DYNAMIC_BATCHER, "transformers", dynamic=True),
    *_PEERS,
    ServedSystem("transformers-fp32-single", "transformers"),
    ServedSystem("transformers-bf16-dynamic", "transformers", "bf16", dynamic=True),
    ServedSystem("transformers-bf16-single", "transformers", "bf16"),
)
# Compared in turns unless others are chosen.
PAIRED = (TOKEN_BUDGET, OURS)
# Sent requests one by one unless others are chosen.
LONE = (
    OURS_FP32,
    OURS_INT8,
    "onnxruntime-fp32-single",
    "onnxruntime-int8-single",
    "openvino-fp32-single",
    "openvino-int8-single",
)
# Left out of a quick run: the BENCH line is hardly ever about them.
_NOT_QUICK = (NONE, "varlen-int8-eight", "transformers-bf16", "transformers-fp32-single")


def chosen_systems(only: str, *, quick: bool) -> list[ServedSystem]:
    """Return the systems that `only` names; by default all, or the important ones if `quick`."""
    excluded = _NOT_QUICK if quick and not only else ()
    return [SYSTEMS[name] for name in select(only, SYSTEMS) if not name.startswith(excluded)]
