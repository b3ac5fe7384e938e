"""Rerankers whose files do not say how they rank match their authors' programs."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.checkpoints import save_checkpoint, set_fields, write_file
from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen.errors import RequestError
from varlen.models.checkpoint_folder import Checkpoint

from ..refusals import refused_checkpoint as refused

# The pieces of text of Qwen's tokenizers, where punctuation and line ends are one token.
_QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PAIRS = [("is it a cat?", "a river"), ("the cat\n", "b" * 30), ("thé 河 ", "is it 42?"), ("a", "")]
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the"
    ' answer can only be "yes" or "no".'
)
_RELEVANCE = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document"
    " pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment"
    " (0 for not relevant, 1 for relevant).\nRelevance:"
)


def save(folder, kind="Qwen3ForCausalLM"):
    saved = save_checkpoint(folder, kind, max_position_embeddings=2048)
    tokenizer = json.loads((saved / "tokenizer.json").read_text())
    model = tokenizer["model"]
    names = {70: "yes", 80: "no", 90: "?Ċ"}
    model["vocab"] = {
        text: index for text, index in model["vocab"].items() if index not in names
    } | {text: index for index, text in names.items()}
    model["merges"] = [["?", "Ċ"]]
    split = {"type": "Split", "pattern": {"Regex": _QWEN_PIECES}, "behavior": "Isolated"}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    steps = [{**split, "invert": False}, level]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    write_file(saved, "tokenizer.json", tokenizer)
    set_fields(
        saved,
        "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        pad_token="<|endoftext|>",
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
    )
    return saved


def qwen_tokens(tokenize, query, document, instruction, limit):
    """Return the tokens of the program on the model card of Qwen3-Reranker."""
    before = tokenize(f"<|im_start|>system\n{_JUDGE}<|im_end|>\n<|im_start|>user\n")
    after = tokenize("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    if instruction is None:
        instruction = "Given a web search query, retrieve relevant passages that answer the query"
    body = tokenize(f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}")
    return before + body[: limit - len(before) - len(after)] + after


def mxbai_tokens(tokenize, query, document, instruction, limit):
    """Return the tokens of MxbaiRerankV2 with a `max_length` that leaves `limit` tokens in all."""
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    before = tokenize(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")
    task, after = tokenize(_RELEVANCE), tokenize("<|im_end|>\n<|im_start|>assistant\n")
    line = tokenize("\n")
    most = limit - len(before) - len(task) - len(after) - len(line)
    asked = (
        f"query: {query}" if instruction is None else f"instruction: {instruction}\nquery: {query}"
    )
    first = tokenize(asked)[: most * 3 // 4]
    second = (line + tokenize(f"document: {document}"))[: most - len(first)]
    return before + first + second + line + task + after


FORMS = {
    "qwen3": ("Qwen3ForCausalLM", qwen_tokens, "yes", "no"),
    "mxbai": ("Qwen2ForCausalLM", mxbai_tokens, "1", "0"),
}


def expected_scores(folder, form, pairs, instruction=None, limit=10**6):
    """Return the scores of the authors' program, in fp32."""
    _, tokens_of, true, false = FORMS[form]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def tokenize(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    scores = []
    for query, document in pairs:
        ids = tokens_of(tokenize, query, document, instruction, limit)
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        yes, no = (tokenizer.convert_tokens_to_ids(word) for word in (true, false))
        scores.append(float(logits[yes] - logits[no]))
    return np.array(scores, np.float32)[:, None]


@pytest.mark.parametrize("form", FORMS)
def test_scores_match_the_authors_program(tmp_path, form):
    folder = save(tmp_path, FORMS[form][0])

    with Encoder.from_pretrained(folder, dtype="fp32", rerank_form=form) as encoder:
        mixed = encoder.classify(PAIRS)
        alone = np.concatenate([encoder.classify([pair]) for pair in PAIRS])
        told = encoder.classify(PAIRS, instruction="find the river?")

    roundings = 4 * encoder_roundings(folder)
    assert_close(mixed, expected_scores(folder, form, PAIRS), roundings=roundings)
    assert_close(alone, mixed, roundings=roundings)
    expected = expected_scores(folder, form, PAIRS, "find the river?")
    assert_close(told, expected, roundings=roundings)
    assert not np.allclose(told, mixed)


@pytest.mark.parametrize("form", FORMS)
def test_a_long_pair_is_cut_as_by_the_authors_program(tmp_path, form):
    folder = save(tmp_path, FORMS[form][0])
    limit = 600
    pairs = [("the cat", "river " * 300), ("is it a cat? " * 100, "river " * 100), ("a", "b")]

    with Encoder.from_pretrained(
        folder, dtype="fp32", rerank_form=form, max_sequence_tokens=limit
    ) as encoder:
        actual = encoder.classify(pairs, truncate=True)
        with pytest.raises(
            RequestError, match="row 0: text has .* tokens; this model takes at most"
        ):
            encoder.classify(pairs)

    expected = expected_scores(folder, form, pairs, limit=limit)
    assert_close(actual, expected, roundings=4 * encoder_roundings(folder))


@pytest.mark.parametrize("form", FORMS)
def test_bf16_scores_are_near_those_in_fp32(tmp_path, form):
    folder = save(tmp_path, FORMS[form][0])
    documents = ["river " * count for count in range(1, 40)]
    pairs = [("is it a cat?", document) for document in documents]

    with Encoder.from_pretrained(folder, dtype="bf16", rerank_form=form) as encoder:
        actual = encoder.classify(pairs)[:, 0]

    expected = expected_scores(folder, form, pairs)[:, 0]
    cosine = actual @ expected / (np.linalg.norm(actual) * np.linalg.norm(expected))
    assert cosine > 0.999


@pytest.mark.parametrize("form", FORMS)
def test_a_chat_template_with_the_question_of_a_form_names_its_answers(tmp_path, form):
    *_, true, false = FORMS[form]
    folder = save(tmp_path, FORMS[form][0])
    question = {"qwen3": _JUDGE, "mxbai": _RELEVANCE}[form]
    template = (
        f"{question}{{% for m in messages if m.role == 'system' %}}{{{{ m.content }}}}{{% endfor %}}"
        "{{ (messages | selectattr('role', 'eq', 'query') | first).content }}"
        "{{ (messages | selectattr('role', 'eq', 'document') | first).content }}"
    )
    set_fields(folder, "tokenizer_config.json", chat_template=template)

    checkpoint = Checkpoint.open(folder)

    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert checkpoint.task == "rerank"
    assert checkpoint.logit_score is not None
    found = checkpoint.logit_score.true_token, checkpoint.logit_score.false_token
    assert found == (vocabulary[true], vocabulary[false])
    assert checkpoint.logit_score.form is None


def test_a_folder_that_does_not_say_its_form_is_refused_with_the_setting_that_names_it(tmp_path):
    folder = save(tmp_path)

    with refused(
        'task "rerank" needs a Qwen3ForSequenceClassification checkpoint; this one is a Qwen3ForCausalLM, whose files'
        " do not say how it ranks: name the form of its pairs with the setting rerank_form (qwen3, mxbai)"
    ):
        Checkpoint.open(folder).check_task("rerank")

    named = Checkpoint.open(folder, rerank_form="qwen3")
    named.check_task("rerank")
    assert named.task == "rerank"


def test_a_form_is_refused_where_no_checkpoint_has_it(tmp_path):
    classifier = save_checkpoint(tmp_path / "bert", "BertForSequenceClassification", num_labels=1)
    with refused("rerank_form is qwen3, which is for a …ForCausalLM; this checkpoint is a Bert"):
        Checkpoint.open(classifier, rerank_form="qwen3")

    folder = save_checkpoint(tmp_path / "plain", "Qwen3ForCausalLM")
    with refused('tokenizer.json has no token "yes", by which this form of a reranker answers'):
        Checkpoint.open(folder, rerank_form="qwen3")


def test_an_instruction_is_refused_by_a_model_that_does_not_read_it(tmp_path):
    folder = save_checkpoint(tmp_path, "BertForSequenceClassification", num_labels=1)

    with Encoder.from_pretrained(folder, task="rerank") as encoder:
        with pytest.raises(RequestError, match="has instruction, which this model does not read"):
            encoder.classify([("a", "b")], instruction="find it")
