"""What the engine knows of a loaded model; its workers may run in other processes."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace

import numpy as np

from varlen.config import BYTES_PER_TOKEN, SHORTEST_QUEUE, SHORTEST_TEXT, EngineConfig
from varlen.errors import ConfigError, RequestError, shorten
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import (
    MAX_MASKS,
    ApartLabels,
    Masks,
    Payload,
    RequestOptions,
    Words,
)
from varlen.scheduling.device_plan import EditLimits
from varlen.tasks import TASKS, Task
from varlen.telemetry.metrics import MetricsSnapshot, SnapshotMetric

# Largest step unless the settings say otherwise; docs/decisions/0049-size-of-a-step.md compares sizes.
_STEP_TOKENS = 512
# Longest source text, likewise.
_SOURCE_TOKENS = 512
# Bytes of all edit lists, and of an entry: token, count and bias.
_EDIT_BYTES, _ENTRY_BYTES = 64 << 20, 12
# Entries for end tokens and biased tokens, beside the tokens of the sequence. Lists begin at an address of 64 bytes.
_OTHER_EDITS, _ALIGNED_ENTRIES = 2048, 16


def longest_sequence(task: Task, checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Return the longest sequence of a model, in tokens; see `sequence_limit` and `generation_limit`."""
    limit_of = generation_limit if TASKS[task].is_iterative else sequence_limit
    return limit_of(checkpoint, config)


def sequence_limit(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Return the longest sequence of a model that does not generate, in tokens.

    Where no setting says it, it is the checkpoint's own limit, or what a configured queue can hold.

    Raises:
        ConfigError: the configured one is longer than the checkpoint or the queue can hold.
    """
    limit, queued = config.max_sequence_tokens, config.max_queued_tokens
    if limit is None:
        return min(checkpoint.max_sequence_tokens, queued or checkpoint.max_sequence_tokens)
    if limit > checkpoint.position_limit:
        raise ConfigError(
            f"max_sequence_tokens is {limit}; this checkpoint has position embeddings for {checkpoint.position_limit}"
        )
    if queued is not None and limit > queued:
        raise ConfigError(
            f"max_queued_tokens is {queued}; it must hold the longest sequence, {limit} tokens"
        )
    return limit


def generation_limit(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Return the longest sequence of a model that generates, prompt and answer together, in tokens.

    Raises:
        ConfigError: the configured one is longer than the checkpoint allows.
    """
    limit = config.max_sequence_tokens or checkpoint.max_sequence_tokens
    if checkpoint.translate is not None:
        limit = min(limit, _source_limit(config))
    if limit > checkpoint.position_limit:
        raise ConfigError(
            f"max_sequence_tokens is {limit}; this checkpoint has positions for {checkpoint.position_limit}"
        )
    return limit


def queue_limit(config: EngineConfig, longest: int) -> int:
    """Return the largest queue of a model, in tokens, given its longest sequence."""
    return config.max_queued_tokens or max(SHORTEST_QUEUE, longest)


def text_limit(config: EngineConfig, longest: int) -> int:
    """Return the longest text of a model, in bytes, given its longest sequence in tokens."""
    return config.max_text_bytes or max(SHORTEST_TEXT, BYTES_PER_TOKEN * longest)


def limit_notes(
    checkpoint: Checkpoint, config: EngineConfig, longest: int, held: int | None = None
) -> tuple[str, ...]:
    """Return a sentence for each limit that is less than the checkpoint's.

    Args:
        longest: longest sequence of the model, in tokens.
        held: longest sequence that its memory holds; None if that is not known, or a longer one runs in chunks.
    """
    notes, own = [], checkpoint.max_sequence_tokens
    if longest < own:
        name = "max_sequence_tokens"
        if config.max_sequence_tokens is None:
            name = "max_queued_tokens" if checkpoint.translate is None else "max_step_tokens"
        notes.append(
            f"the checkpoint takes {own} tokens, this model {longest} ({name}): longer texts are refused, or cut there"
            " if a request has truncate"
        )
    if held is not None and held < longest:
        notes.append(
            f"memory holds a sequence of {held} tokens (arena_bytes), the checkpoint takes {longest}: longer texts are"
            " refused, unless a request has truncate_prompt_tokens"
        )
    read, needed = text_limit(config, longest), text_limit(EngineConfig(), longest)
    if read < needed:
        notes.append(
            f"texts have up to {read} bytes (max_text_bytes); {longest} tokens may have up to {needed}"
        )
    return tuple(notes)


def step_limit(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Return the size of the largest step, in tokens."""
    if config.max_step_tokens:
        return config.max_step_tokens
    if checkpoint.translate is not None:
        return _source_limit(config) + config.max_running_sequences
    return max(_STEP_TOKENS, config.max_running_sequences)


def edit_limits(checkpoint: Checkpoint, config: EngineConfig) -> EditLimits:
    """Return the number and the size of edit lists on the device.

    A translation has none: all its answers are searched.
    """
    if checkpoint.translate is not None:
        return EditLimits(0, 0)
    longest = generation_limit(checkpoint, config) + _OTHER_EDITS
    entries = min(longest, checkpoint.target_vocab_size)
    entries = -(-entries // _ALIGNED_ENTRIES) * _ALIGNED_ENTRIES
    running = config.max_running_sequences + config.short_slots
    return EditLimits(min(running, _EDIT_BYTES // (entries * _ENTRY_BYTES)), entries)


def _source_limit(config: EngineConfig) -> int:
    """Return the longest source, which is encoded in one step beside every running sequence.

    Raises:
        ConfigError: a step has no room for one.
    """
    if not config.max_step_tokens:
        return _SOURCE_TOKENS
    if config.max_step_tokens <= config.max_running_sequences:
        raise ConfigError(
            f"max_step_tokens is {config.max_step_tokens}; it must hold a source text beside a token of each of the"
            f" {config.max_running_sequences} running sequences (max_running_sequences)"
        )
    return config.max_step_tokens - config.max_running_sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A loaded model.

    Attributes:
        vocab_size, type_vocab_size: ids below these are valid.
        max_sequence_tokens: longest sequence, in tokens; prompt and answer together.
        max_batch_tokens: largest batch of several sequences of a worker, padding included, or largest step, in tokens.
        max_arena_tokens: longest sequence that the arena of a worker holds, in tokens.
        weight_bytes: memory of the weights, in bytes; workers share it.
        arena_bytes: largest memory of intermediates, in bytes, of one worker.
        cost_fields: fields that decide the run time of batches beside settings.
        adapters: names of its adapters, and why each is refused; empty for those that are served.
        has_apart_labels: whether an encoder of their own reads labels.
        adapter_bytes: memory of an adapter in a worker.
        is_padded: whether sequences are padded to the longest of their batch, for comparison.
        workers: number of batches that run at the same time.
        max_logit_rows: most rows of logits of a step.
    """

    task: Task
    device: str
    device_name: str
    dtype: str
    vocab_size: int
    type_vocab_size: int
    max_sequence_tokens: int
    max_batch_tokens: int
    max_arena_tokens: int
    weight_bytes: int
    arena_bytes: int
    cost_fields: Mapping[str, str]
    outputs: tuple[Task, ...] = ()
    adapters: tuple[tuple[str, str], ...] = ()
    has_apart_labels: bool = False
    adapter_bytes: int = 0
    is_padded: bool = False
    workers: int = 1
    max_logit_rows: int = 0
    num_blocks: int = 0
    block_size: int = 0
    block_bytes: int = 0

    @property
    def has_sources(self) -> bool:
        """Whether each sequence has a source text, which an encoder reads."""
        return self.task == "translate"

    @property
    def limits(self) -> tuple[object, ...]:
        """The facts that the engine relies on; measured choices may differ from load to load."""
        return astuple(replace(self, device_name="", weight_bytes=0, arena_bytes=0, cost_fields={}))

    def check_adapter(self, name: str) -> None:
        """Raise RequestError unless the model serves the adapter of this name."""
        reasons = dict(self.adapters)
        if reason := reasons.get(name):
            raise RequestError(f'the adapter "{name}" is damaged, or not served: {reason}')
        if name not in reasons:
            has = ", ".join(each for each, reason in self.adapters if not reason)
            allowed = f"allowed: {shorten(has)}" if has else "this model has none"
            raise RequestError(f"adapter is {shorten(name)}; {allowed}")

    @property
    def most_work(self) -> RequestOptions:
        """Options of a request that asks for every output, and has an adapter."""
        adapter = next((name for name, reason in self.adapters if not reason), "")
        outputs = (self.task, *self.outputs) if self.outputs else ()
        return RequestOptions(outputs=outputs, adapter=adapter)

    def payload_of(self, length: int) -> Payload:
        """Return a payload with much work, for a prompt of this length.

        An eighth of the tokens of a text with labels are labels, or there are as many labels that are no tokens of it.
        """
        if self.task == "extract":
            places, count = np.arange(length, dtype=np.int32), max(1, length // 8)
            if self.has_apart_labels:
                return ApartLabels.of([places[:1]] * count, places)
            return Words.at(places[:count], places[count:], [(0, 0, count)])
        count = min(length, MAX_MASKS) if self.task == "fill_mask" else 0
        return Masks(np.arange(count, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class GraphUse:
    """What the captured CUDA graphs of a model cost.

    Attributes:
        num_bytes: device memory that they took, in bytes, with kernels and workspaces loaded for them.
        seconds: time that the captures took.
    """

    count: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: "GraphUse") -> "GraphUse":
        return GraphUse(
            self.count + other.count,
            self.num_bytes + other.num_bytes,
            self.seconds + other.seconds,
        )

    def metrics(self) -> MetricsSnapshot:
        return {
            SnapshotMetric.GRAPHS: self.count,
            SnapshotMetric.GRAPH_BYTES: self.num_bytes,
            SnapshotMetric.GRAPH_SECONDS: self.seconds,
        }
