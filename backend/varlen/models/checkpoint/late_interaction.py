"""Settings of late interaction (ColBERT): a vector for each token, of queries and of documents.

Three forms are known: MultiVectorEncoder in sentence-transformers, whose settings are with its modules;
PyLate up to version 3, whose settings are among the model's; and the first release, which is refused.
Source: Khattab, Zaharia 2020, arXiv:2004.12832; the fields follow MultiVectorEncoder and PyLate.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import (
    Json,
    check_fields,
    read_choice,
    read_flag,
    read_int,
    read_optional_int,
    read_optional_object,
    show,
)

MODEL_TYPE = "MultiVectorEncoder"
_PYLATE_TYPE = "ColBERT"
STANFORD_ARCHITECTURE = "HF_ColBERT"

TRANSFORMER_FIELDS = frozenset({"query_length", "document_length", "query_expansion"})
# Fields of PyLate in config_sentence_transformers.json.
PYLATE_FIELDS = frozenset(
    "query_prefix document_prefix query_length document_length do_query_expansion attend_to_expansion_tokens"
    " skiplist_words".split()
)
_PYLATE_QUERY_LENGTH = 32
_EXPANSION_FIELDS = ("strategy", "attend", "token", "length")
# Whether queries longer than the expanded length are too long.
_STRATEGIES: Mapping[str, bool] = {"fixed": True, "min": False}
_ROLES = ("query", "document")


@dataclass(frozen=True, slots=True)
class QueryExpansion:
    """Tokens behind short queries, which have vectors too.

    Attributes:
        length: length to which queries are filled up, in tokens.
        limits: whether it is also the length of the longest query.
        is_attended: whether other tokens read the added ones; these read all tokens of the query in any case.
        token: text of the added token; None is the mask token.
    """

    length: int
    limits: bool = True
    is_attended: bool = False
    token: str | None = None


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """How queries and documents become tokens, and which of them have vectors.

    Attributes:
        query_length, document_length: the longest, in tokens; None is the limit of the model.
        text_length: the longest text that is neither; likewise.
        skipped_words: tokens without a vector, by their text.
        skipped_roles: the roles in which they have none; texts without a role are documents here.
        prefixes: texts in front of queries or documents that are one token, if the vocabulary has it.
    """

    query_length: int | None = None
    document_length: int | None = None
    text_length: int | None = None
    expansion: QueryExpansion | None = None
    skipped_words: tuple[str, ...] = ()
    skipped_roles: frozenset[str] = frozenset({"document"})
    prefixes: tuple[str, ...] = ()

    @property
    def longest_text(self) -> int:
        """Length of the longest query or document, in tokens; 0 where none has a limit."""
        return max(self.query_length or 0, self.document_length or 0)

    @property
    def has_unattended_tokens(self) -> bool:
        return self.expansion is not None and not self.expansion.is_attended


def is_pylate(model: Json) -> bool:
    """Return whether PyLate has written config_sentence_transformers.json."""
    # on older releases of sentence-transformers it wrote no type
    has_type = model.get("model_type") is not None
    return model["model_type"] == _PYLATE_TYPE if has_type else "query_prefix" in model


def is_late_interaction(model: Json) -> bool:
    """Return whether config_sentence_transformers.json belongs to such a model."""
    return model.get("model_type") == MODEL_TYPE or is_pylate(model)


def read_late_interaction(folder: Path, path: str, transformer: Json) -> LateInteraction:
    """Return the settings that MultiVectorEncoder has saved.

    Args:
        path: path of the folder of MultiVectorMask, relative to the checkpoint.

    Raises:
        CheckpointError: a file is damaged, or asks for something that is not served.
    """
    name = f"{path}/config.json"
    mask = read_optional_object(folder, name)
    known = ("skiplist_words", "skiplist_tasks")
    check_fields(mask, name, known=known, fixed={"keep_only_token_ids": None})
    roles = mask.get("skiplist_tasks")
    roles = ["document"] if roles is None else [roles] if isinstance(roles, str) else roles
    if not isinstance(roles, list) or not all(role in _ROLES for role in roles):
        raise CheckpointError(
            f"{name} has skiplist_tasks {show(roles)}; allowed: a list of {', '.join(_ROLES)}"
        )
    file = "sentence_bert_config.json"
    return _limited(
        LateInteraction(
            read_optional_int(transformer, "query_length", file),
            read_optional_int(transformer, "document_length", file),
            expansion=_read_expansion(transformer, file),
            skipped_words=_read_strings(mask, "skiplist_words", name),
            skipped_roles=frozenset(roles),
        ),
        file,
    )


def read_pylate(model: Json, name: str) -> LateInteraction:
    """Return the settings that PyLate has saved in config_sentence_transformers.json.

    Raises:
        CheckpointError: the file asks for something that is not served.
    """
    query_length, expansion = read_optional_int(model, "query_length", name), None
    is_expanded = not PYLATE_FIELDS.isdisjoint(model)
    if read_flag(model, "do_query_expansion", default=is_expanded, name=name):
        expansion = QueryExpansion(
            query_length or _PYLATE_QUERY_LENGTH,
            is_attended=read_flag(model, "attend_to_expansion_tokens", default=False, name=name),
        )
        query_length = None
    has_words = model.get("skiplist_words") is not None
    words = _read_strings(model, "skiplist_words", name) if has_words else tuple(string.punctuation)
    return _limited(
        LateInteraction(
            query_length,
            read_optional_int(model, "document_length", name),
            expansion=expansion,
            skipped_words=words,
            prefixes=tuple(text for role in _ROLES if (text := _pylate_prefix(model, role, name))),
        ),
        name,
    )


def pylate_prompts(model: Json, prompts: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the prompts of a model of PyLate, which begin with its prefixes."""
    made = dict(prompts)
    for role in _ROLES:
        prefix = _pylate_prefix(model, role, name)
        made[role] = prefix + made.get(role, "").removeprefix(prefix)
    return made


def _pylate_prefix(model: Json, role: str, name: str) -> str:
    prefix = model.get(f"{role}_prefix") or ""
    if not isinstance(prefix, str):
        raise CheckpointError(f"{name} has {role}_prefix {show(prefix)}; allowed: strings")
    return prefix


def _read_expansion(transformer: Json, name: str) -> QueryExpansion | None:
    config = transformer.get("query_expansion")
    if config is None:
        return None
    if not isinstance(config, dict):
        raise CheckpointError(f"{name} has query_expansion {show(config)}; allowed: an object")
    name = f"query_expansion of {name}"
    check_fields(config, name, known=_EXPANSION_FIELDS, fixed={})
    token = config.get("token")
    if not isinstance(token, str | None):
        raise CheckpointError(f"{name} has token {show(token)}; allowed: strings")
    return QueryExpansion(
        read_int(config, "length", name=name),
        read_choice(config, "strategy", _STRATEGIES, default="", name=name),
        read_flag(config, "attend", default=False, name=name),
        token,
    )


def _limited(settings: LateInteraction, name: str) -> LateInteraction:
    expansion, query_length = settings.expansion, settings.query_length
    if expansion is None:
        return settings
    if query_length is not None and query_length < expansion.length:
        raise CheckpointError(
            f"{name} has query_length {query_length} and queries expanded to {expansion.length};"
            " allowed: whole numbers from that length"
        )
    return replace(settings, query_length=expansion.length if expansion.limits else query_length)


def _read_strings(config: Json, key: str, name: str) -> tuple[str, ...]:
    texts = config.get(key) or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise CheckpointError(f"{name} has {key} {show(texts)}; allowed: a list of strings")
    return tuple(texts)
