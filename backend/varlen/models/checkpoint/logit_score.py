"""Language models that rank pairs by their next token, such as "yes" or "no".

The score is the difference of two logits: one output of a linear layer whose weights are the difference of two rows of
the output matrix. What is around a pair in the prompt is the checkpoint's chat template, if modules.json has LogitScore
of sentence-transformers, or if the template itself has the question of a known form. Otherwise the setting
`rerank_form` names one of these forms.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from varlen.config import RerankForm
from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import (
    TOKENIZER,
    Json,
    check_fields,
    read_int,
    read_object,
    show,
)

_FORMATS = ("flat", "structured")
# Roles of the messages that a template has to read.
_ROLES = re.compile(r"""(?s)(?=.*['"]query['"]).*['"]document['"]""")


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
    if not is_decoder or chat_template is None or not _ROLES.match(chat_template):
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
