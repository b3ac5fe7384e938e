"""Models that rank documents: late interaction, and language models by their next token.

Late interaction (ColBERT) has a vector for each token, of queries and of documents. Three forms are known:
MultiVectorEncoder in sentence-transformers, whose settings are with its modules; PyLate up to version 3, whose settings
are among the model's; and the first release, which is refused.
Source: Khattab, Zaharia 2020, arXiv:2004.12832; the fields follow MultiVectorEncoder and PyLate.

A language model ranks pairs by tokens such as "yes" or "no". The score is the difference of two logits: one output of a
linear layer whose weights are the difference of two rows of the output matrix. What is around a pair in the prompt is
the checkpoint's chat template, if modules.json has LogitScore of sentence-transformers, or if the template itself has
the question of a known form. Otherwise the setting `rerank_form` names one of these forms.
"""

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from varlen.config import RerankForm
from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import (
    TOKENIZER,
    Json,
    check_fields,
    read_choice,
    read_flag,
    read_int,
    read_object,
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
_FORMATS = ("flat", "structured")
# Roles of the messages that a template has to read.
_TEMPLATE_ROLES = re.compile(r"""(?s)(?=.*['"]query['"]).*['"]document['"]""")


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


@dataclass(frozen=True, slots=True)
class PairForm:
    """The texts around a pair; each is tokenized apart from the others.

    Attributes:
        true_word, false_word: the tokens of the answers; None if the score is one logit.
        question: part of the prompt that no other form has.
        instruction, query, document: texts with `{}` for what the request gives; the first two are one text. An empty
            `instruction` refuses instructions of requests.
        default_instruction: instruction of a request without one; empty leaves the instruction out.
        ending: texts behind the document, which are never cut.
        query_part: largest part of a cut pair that the query with its instruction may have.
    """

    true_word: str
    false_word: str | None
    question: str
    opening: str
    instruction: str
    query: str
    document: str
    ending: tuple[str, ...]
    default_instruction: str = ""
    between: str = ""
    query_part: float = 1.0


_MXBAI_TASK = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document"
    " pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment"
    " (0 for not relevant, 1 for relevant).\nRelevance:"
)
_BGE_TASK = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a"
    " prediction of either 'Yes' or 'No'."
)
# Sources: the model cards of Qwen3-Reranker; MxbaiRerankV2 in mixedbread-ai/mxbai-rerank; BaseLLMReranker in
# FlagOpen/FlagEmbedding.
PAIR_FORMS: Mapping[RerankForm, PairForm] = {
    "qwen3": PairForm(
        true_word="yes",
        false_word="no",
        question='the answer can only be "yes" or "no"',
        opening=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
            ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        ),
        instruction="<Instruct>: {}\n",
        default_instruction="Given a web search query, retrieve relevant passages that answer the query",
        query="<Query>: {}\n",
        document="<Document>: {}",
        ending=("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",),
    ),
    "mxbai": PairForm(
        true_word="1",
        false_word="0",
        question="(0 for not relevant, 1 for relevant)",
        opening=(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\n"
        ),
        instruction="instruction: {}\n",
        query="query: {}",
        between="\n",
        document="document: {}",
        ending=("\n", _MXBAI_TASK, "<|im_end|>\n<|im_start|>assistant\n"),
        query_part=0.75,
    ),
    "bge": PairForm(
        true_word="Yes",
        false_word=None,
        question=_BGE_TASK,
        opening="<bos>",
        instruction="",
        query="A: {}",
        between="\n",
        document="B: {}",
        ending=("\n", _BGE_TASK),
        query_part=0.75,
    ),
}


@dataclass(frozen=True, slots=True)
class LogitScore:
    """How scores are made, and how a pair becomes a prompt.

    Attributes:
        system: text of the first message; empty without one.
        has_parts: whether the content of a message is a list of parts, not a text.
        form: texts around a pair; None if the chat template has them.
    """

    true_token: int
    false_token: int | None
    system: str = ""
    has_parts: bool = False
    form: PairForm | None = None


def read_logit_score(folder: Path, path: str, transformer: Json, system: str) -> LogitScore:
    """Return the settings of the module.

    Args:
        system: the default prompt of the model.

    Raises:
        CheckpointError: a file is damaged, or asks for something that is not served.
    """
    name = f"{path}/config.json"
    config = read_object(folder, name)
    known = ("true_token_id", "false_token_id")
    check_fields(config, name, known=known, fixed={"module_input_name": "causal_logits"})
    has_false = config.get("false_token_id") is not None
    return LogitScore(
        read_int(config, "true_token_id", lowest=0, name=name),
        read_int(config, "false_token_id", lowest=0, name=name) if has_false else None,
        system,
        _message_format(transformer) == "structured",
    )


def find_logit_score(
    folder: Path, form: RerankForm, architecture: str, chat_template: str | None
) -> LogitScore | None:
    """Return the settings of a checkpoint without the module, if it ranks.

    Args:
        form: `auto` is the form whose question stands in the chat template, which then needs the roles of a pair.

    Raises:
        CheckpointError: a form is named, and the checkpoint cannot have it.
    """
    is_decoder = architecture.endswith("ForCausalLM")
    if form != "auto":
        if not is_decoder:
            raise CheckpointError(
                f"rerank_form is {form}, which is for a …ForCausalLM; this checkpoint is a {architecture}: leave"
                " rerank_form out"
            )
        found = PAIR_FORMS[form]
        return LogitScore(*_answer_tokens(folder, found), form=found)
    if not is_decoder or chat_template is None or not _TEMPLATE_ROLES.match(chat_template):
        return None
    # a text in a Jinja source may have escaped quotes
    text = chat_template.replace("\\", "")
    for found in PAIR_FORMS.values():
        if found.question in text:
            return LogitScore(*_answer_tokens(folder, found))
    return None


def _answer_tokens(folder: Path, form: PairForm) -> tuple[int, int | None]:
    model = read_object(folder, TOKENIZER).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    known = vocabulary if isinstance(vocabulary, dict) else {}

    def token_of(word: str) -> int:
        token = known.get(word)
        if not isinstance(token, int):
            raise CheckpointError(
                f'tokenizer.json has no token "{word}", by which this form of a reranker answers (rerank_form)'
            )
        return token

    false_word = form.false_word
    return token_of(form.true_word), None if false_word is None else token_of(false_word)


def _message_format(transformer: Json) -> str:
    modalities = transformer.get("modality_config")
    messages = modalities.get("message") if isinstance(modalities, dict) else None
    form = messages.get("format") if isinstance(messages, dict) else None
    if not isinstance(form, str) or form not in _FORMATS:
        raise CheckpointError(
            f"sentence_bert_config.json has messages of the format {show(form)}; allowed: {', '.join(_FORMATS)}"
        )
    return form


def check_score_tokens(score: LogitScore, vocab_size: int) -> None:
    """Raise CheckpointError unless the model has logits of the two tokens."""
    for token in (score.true_token, score.false_token):
        if token is not None and token >= vocab_size:
            raise CheckpointError(
                f"the module LogitScore names the token {token}; this model has tokens below {vocab_size}"
            )
