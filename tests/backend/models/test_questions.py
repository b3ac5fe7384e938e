"""Answers to questions match the pipeline of transformers, see `tests.question_pipeline`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.checkpoints import save_checkpoint, set_fields
from tests.closeness import assert_close, encoder_roundings
from tests.question_pipeline import QuestionPipeline
from varlen import Encoder
from varlen.intake.found import ContextWindows
from varlen.request.spans import QuestionForm

from ..refusals import refused_checkpoint, refused_request

PAIRS = [
    ("the cat?", "the river, the cat sat on the river at 5.0 and The Cat's cat-food was 42"),
    ("a", "the"),
    ("is it the river!", "river the cat " * 40),
    ("the e-m?", "ada@mail.com ada's, or 17-4"),
    ("a?", " "),
]
FORMS = [
    {},
    {"top_k": 7, "max_answer_len": 3},
    {"top_k": 3, "handle_impossible_answer": True, "align_to_words": False},
    {"top_k": 20, "max_seq_len": 24, "doc_stride": 5},
    {"top_k": 4, "max_seq_len": 40, "doc_stride": 0, "handle_impossible_answer": True},
]
KINDS = [
    "Bert",
    "Roberta",
    "DistilBert",
    "Electra",
    "Albert",
    "MPNet",
    "DebertaV2",
    "ModernBert",
    "XLMRoberta",
    "Camembert",
    "Deberta",
    "JinaEmbeddingsV3",
]
WITH_TYPES = ("Bert", "Electra", "DebertaV2", "Deberta")


NAMED_CLASS = {"tokenizer_class": "BertTokenizer"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Return an encoder that no test changes."""
    folder = save_checkpoint(tmp_path_factory.mktemp("shared") / "qa", "BertForQuestionAnswering")
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        yield encoder


@pytest.fixture
def make(tmp_path):
    """Return a function that saves a checkpoint and returns its folder."""

    def save(kind="Bert", **fields):
        return save_checkpoint(tmp_path / kind, f"{kind}ForQuestionAnswering", **fields)

    return save


def oracle_of(folder, kind, **more):
    return QuestionPipeline(
        folder, f"{kind}ForQuestionAnswering", gives_types=kind in WITH_TYPES, **more
    )


def logits_of(encoder, pairs):
    """Return the logits of all windows, as the engine answers them."""
    intake = encoder._service.intake
    windows = ContextWindows(intake.tokenizer, intake.limits, pairs, QuestionForm())
    prompts = tuple(prompt for step in windows.steps for prompt in step.run())
    return encoder._answers(prompts)


def assert_same_answers(actual, expected, *, rel):
    assert [(e["start"], e["end"], e["answer"]) for e in actual] == [
        (e["start"], e["end"], e["answer"]) for e in expected
    ]
    assert [e["score"] for e in actual] == pytest.approx([e["score"] for e in expected], rel=rel)


def has_unknown(oracle, pair):
    """Return whether a pair has the token 1, which MPNet counts as no position."""
    return any(1 in window.ids for window in oracle.windows(*pair))


def check(folder, kind, **more):
    """Compare logits and answers, alone and mixed, with the oracle."""
    oracle, roundings = oracle_of(folder, kind, **more), encoder_roundings(folder)
    pairs = [pair for pair in PAIRS if kind != "MPNet" or not has_unknown(oracle, pair)]
    windows = [window for pair in pairs for window in oracle.windows(*pair)]
    expected = [oracle.logits(window) for window in windows]
    # a logit of n roundings moves a probability by as many
    rel = 400 * roundings * np.finfo(np.float32).eps
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        mixed = logits_of(encoder, pairs)
        alone = [row for pair in pairs for row in logits_of(encoder, [pair])]
        assert len(mixed) == len(windows)
        for found in (mixed, alone):
            for row, logits in zip(found, expected, strict=True):
                assert_close(torch.from_numpy(row), logits, roundings=8 * roundings)
        for form in FORMS:
            together = encoder.question_answer(pairs, **form)
            for pair, row in zip(pairs, together, strict=True):
                assert_same_answers(row, oracle(*pair, **form), rel=rel)
                assert_same_answers(encoder.question_answer([pair], **form)[0], row, rel=rel)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("Bert", "ModernBert") else pytest.mark.full)
        for kind in KINDS
    ],
)
def test_answers_match_the_pipeline(make, kind):
    check(make(kind), kind)


def test_windows_begin_at_the_end_where_the_tokenizer_cuts_on_the_left(make):
    folder = make()
    set_fields(folder, "tokenizer_config.json", truncation_side="left", **NAMED_CLASS)

    check(folder, "Bert", side="left")


def test_bf16_logits_are_near_fp32(make):
    folder = make()
    oracle = oracle_of(folder, "Bert")
    expected = [oracle.logits(window) for pair in PAIRS for window in oracle.windows(*pair)]
    with Encoder.from_pretrained(folder, dtype="bf16", warmup_seconds=0) as encoder:
        found = torch.from_numpy(np.concatenate(logits_of(encoder, PAIRS)))

    cosine = torch.cosine_similarity(found.flatten(), torch.cat(expected).flatten(), dim=0)
    assert cosine > 0.999


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_k": 101}, "top_k is 101; allowed: whole numbers from 1 to 100"),
        ({"max_answer_len": 0}, "max_answer_len is 0; allowed: whole numbers from 1 to 512"),
        ({"max_seq_len": 65}, "max_seq_len is 65; allowed: whole numbers from 1 to 64"),
        ({"max_seq_len": 9, "doc_stride": 10}, "doc_stride is 10; allowed: whole numbers from 0"),
        ({"max_seq_len": 10}, "row 0: the question leaves 4 tokens for the context in a window of"),
    ],
)
def test_wrong_options_are_refused(shared, options, message):
    with refused_request(message):
        shared.question_answer([("the cat a", "the river " * 20)], **options)


@pytest.mark.parametrize(
    "pair, message",
    [
        (("", "a"), "row 1: the question is empty; send a text"),
        (("a", ""), "row 1: the context is empty; send a text"),
        ("a", "row 1: the context is missing; send a pair of two texts"),
        (("the " * 62, "a a"), "row 1: the question leaves 0 tokens for the context in a window"),
        (("a", "the " * 20_000), "row 1: the context has 20000 tokens, which are"),
    ],
)
def test_questions_and_contexts_out_of_bounds_are_refused(shared, pair, message):
    with refused_request(message):
        shared.question_answer([("a", "a"), pair])


def test_a_context_with_too_many_bytes_is_refused_before_it_is_tokenized(shared):
    intake = shared._service.intake
    limits = replace(intake.limits, max_text_bytes=100)
    # nothing cuts a context
    with refused_request("row 0: text has 101 bytes; this model takes at most 100"):
        ContextWindows(intake.tokenizer, limits, [("a", "a" * 101)], QuestionForm())


def test_other_tasks_of_the_checkpoint_and_other_checkpoints_of_the_task(make):
    folder = make()
    with Encoder.from_pretrained(folder, task="embed", warmup_seconds=0) as encoder:
        assert encoder.embed(["a"]).shape == (1, 24)
    set_fields(folder, "tokenizer_config.json", padding_side="left", **NAMED_CLASS)
    with refused_checkpoint("tokenizer_config.json has padding_side left"):
        Encoder.from_pretrained(folder)


def test_a_head_with_other_outputs_is_refused(make):
    with refused_checkpoint("qa_outputs"):
        Encoder.from_pretrained(make(num_labels=3))
