"""What a checkpoint folder holds: family, tasks, limits, weights, tokenizer; for people to read."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from varlen.config import EngineConfig
from varlen.models.checkpoint.files import TOKENIZER, has_file, read_object, read_text
from varlen.models.checkpoint.quantized_tensors import BYTES, FLOATS
from varlen.models.checkpoint.ranking import LateInteraction
from varlen.models.checkpoint.weights import read_headers, shards
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.notes import checkpoint_notes, unserved_head_notes
from varlen.tasks import TASKS, Task

# Entries of a long list that are shown.
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What is known of the texts of a checkpoint beside its own files.

    Attributes:
        languages: languages that the model card states.
        made_of: the files that tokenizer.json was made of, if it had none.
        unserved: files of heads that are not served, which are not copied.
    """

    languages: tuple[str, ...] = ()
    made_of: tuple[str, ...] = ()
    unserved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Findings:
    """What a checkpoint holds.

    Attributes:
        family: `model_type` of config.json.
        tasks: that it may serve; the first is the default.
        vectors: the steps after the last hidden states that make an embedding, or the vectors of tokens.
        roles: limits of queries and of documents, of a model with a vector for each token.
        prompts: texts that `embed` puts before texts, by name; `default_prompt` is the one without a name.
        position_limit: longest sequence that it has positions for.
        weight_dtypes: share of the parameters by dtype, see `TensorHeader`.
        tokenizer: kind of its model, such as WordPiece.
    """

    family: str
    architecture: str
    tasks: tuple[Task, ...]
    vectors: tuple[str, ...]
    roles: Mapping[str, str]
    features: int
    prompts: Mapping[str, str]
    default_prompt: str
    labels: tuple[str, ...]
    max_sequence_tokens: int
    position_limit: int
    parameters: int
    weight_bytes: int
    weight_files: int
    weight_dtypes: Mapping[str, float]
    vocab_size: int
    tokenizer: str
    text: TextFacts
    notes: tuple[str, ...]


def find(checkpoint: Checkpoint, config: EngineConfig, text: TextFacts | None = None) -> Findings:
    """Return what a checkpoint holds; reads the headers of its weights, not the weights.

    Raises:
        CheckpointError: the weights or the tokenizer cannot be read.
        ConfigError: a setting does not fit the checkpoint.
    """
    from varlen.execution import model_info  # imports torch

    counts, size = Counter[str](), 0
    for header in read_headers(checkpoint.weights_folder).values():
        parts = (header,) if header.quantized is None else header.quantized.parts
        # integers are positions, which no model needs
        if header.quantized is not None or header.dtype in FLOATS:
            counts[header.dtype] += prod(header.shape)
            size += sum(BYTES[each.dtype] * prod(each.shape) for each in parts)
    parameters = sum(counts.values())
    task = config.task or checkpoint.task
    text, longest = text or TextFacts(), model_info.longest_sequence(task, checkpoint, config)
    return Findings(
        family=str(checkpoint.config["model_type"]),
        architecture=checkpoint.architecture,
        tasks=tuple(dict.fromkeys((task, *checkpoint.tasks))),
        vectors=tuple(_vector_steps(checkpoint)),
        roles={} if checkpoint.late is None else _roles(checkpoint.late),
        features=checkpoint.embedding_size,
        prompts=checkpoint.prompts,
        default_prompt=checkpoint.default_prompt,
        labels=checkpoint.labels.names,
        max_sequence_tokens=checkpoint.max_sequence_tokens,
        position_limit=checkpoint.position_limit,
        parameters=parameters,
        weight_bytes=size,
        weight_files=len(shards(checkpoint.weights_folder)),
        weight_dtypes={dtype: count / parameters for dtype, count in counts.most_common()},
        vocab_size=checkpoint.vocab_size,
        tokenizer=_tokenizer_kind(checkpoint.weights_folder),
        text=text,
        notes=tuple(
            dict.fromkeys(
                (
                    *checkpoint_notes(checkpoint, task, longest, keeps_codes=config.keeps_codes),
                    *model_info.limit_notes(checkpoint, config, longest),
                    *unserved_head_notes(text.unserved),
                )
            )
        ),
    )


def read_languages(card: Path) -> tuple[str, ...]:
    """Return the languages that a model card states in its first lines."""
    from huggingface_hub import RepoCard  # takes a second

    if not has_file(card.parent, card.name):
        return ()
    try:
        text = read_text(card.parent, card.name)
        stated = RepoCard(text, ignore_metadata_errors=True).data.get("language")
    except Exception:  # the card is for people: a damaged one stops nothing
        return ()
    stated = [stated] if isinstance(stated, str) else stated
    entries = stated if isinstance(stated, list) else []
    # a list may hold others many times over
    return tuple(each for each in entries if isinstance(each, str))


def table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and texts, a line for each."""
    made = Table(show_header=False, box=None, pad_edge=False)
    made.add_column(style="bold", no_wrap=True)
    for name, value in rows:
        made.add_row(name, escape(value))
    return made


def rows(findings: Findings) -> Iterator[tuple[str, str]]:
    """Yield name and text of each finding that the checkpoint has."""
    first, *others = findings.tasks
    yield "family", f"{findings.family}, {findings.architecture}"
    also = f"; it may also serve {', '.join(others)} (--set task={others[0]})" if others else ""
    yield "task", f"{first}{also}"
    has_vectors = TASKS[first].width == "embedding"
    if has_vectors:
        yield "vectors", f"{' > '.join(findings.vectors)}, {findings.features} features"
    yield from findings.roles.items()
    if findings.prompts and has_vectors:
        texts = [f"{name}: {text!r}" for name, text in findings.prompts.items()]
        default = repr(findings.default_prompt) if findings.default_prompt else "none"
        yield "prompts", f"{_some(texts)}; default: {default}"
    if findings.labels:
        yield "labels", f"{len(findings.labels)}: {_some(findings.labels)}"
    yield (
        "longest text",
        f"{findings.max_sequence_tokens} tokens; it has positions for {findings.position_limit}",
    )
    dtypes = ", ".join(findings.weight_dtypes)
    yield (
        "weights",
        f"{findings.parameters / 1e6:.1f} million, {dtypes}, {findings.weight_bytes / 1e6:.1f} MB"
        f" in {_count(findings.weight_files, 'file')}",
    )
    made = f", made of {' and '.join(findings.text.made_of)}" if findings.text.made_of else ""
    yield "tokenizer", f"{findings.tokenizer}, {findings.vocab_size} token ids{made}"
    if findings.text.languages:
        yield "languages", f"{_some(findings.text.languages)} (model card)"
    for note in findings.notes:
        yield "note", note


def _vector_steps(checkpoint: Checkpoint) -> Iterator[str]:
    if not {"embed", "token_embed"} & set(checkpoint.tasks):
        return
    is_default = not (checkpoint.folder / "modules.json").is_file()
    if checkpoint.late is not None:
        yield "one for each token"
    else:
        default = " (no modules.json)" if is_default else ""
        yield f"{' + '.join(checkpoint.pooling)} pooling{default}"
    for layer in checkpoint.dense:
        yield layer.shown
    if checkpoint.normalize:
        yield "normalized"


def _roles(late: LateInteraction) -> dict[str, str]:
    texts = {}
    for role, most in (("query", late.query_length), ("document", late.document_length)):
        parts = [f"up to {most} tokens"] if most else []
        if role == "query" and late.expansion is not None:
            reads = "read" if late.expansion.is_attended else "do not read"
            parts.append(f"expanded to {late.expansion.length}, by tokens that others {reads}")
        if role in late.skipped_roles and late.skipped_words:
            parts.append(f"no vectors of {_count(len(late.skipped_words), 'word')}")
        if parts:
            texts["queries" if role == "query" else "documents"] = "; ".join(parts)
    return texts


def _tokenizer_kind(folder: Path) -> str:
    model = read_object(folder, TOKENIZER).get("model") or {}
    # the first releases of tokenizers stored no kind
    return str(model.get("type") or "tokenizer.json")


def _some(entries: list[str] | tuple[str, ...]) -> str:
    more = len(entries) - _SHOWN
    return ", ".join(entries[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
