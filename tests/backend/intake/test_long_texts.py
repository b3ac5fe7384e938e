"""Tokens of a text are in some window, and tokens of a span count once."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from varlen.errors import RequestError
from varlen.intake import tokenization
from varlen.intake.checks import Intake
from varlen.intake.long_texts import InputLimits, LongTextForm, LongTextRules, LongTexts
from varlen.intake.roles import TextRole, TextRoles
from varlen.intake.tokenization import Tokenizer
from varlen.request.row_parameters import NO_PREFIX, TextPrefix

from .test_context_windows import byte_pairs, unigrams

LONGEST = 16
LIMITS = InputLimits(
    max_sequence_tokens=LONGEST, max_text_bytes=4000, vocab_size=10_000, type_vocab_size=2
)
WORDS = ["the", "cat", "é", "...", "🐈the", "can't", "a"]
SPACES = ["", " ", "  ", "\n", "\t ", " "]


def prompted(prompt):
    return TextRole(prompt)


@pytest.fixture(scope="module", params=["word pieces", "byte pairs", "unigrams"])
def intake(request, small_bert, tmp_path_factory):
    """Return the intake of a model of 16 tokens."""
    folder = small_bert
    if request.param != "word pieces":
        folder = tmp_path_factory.mktemp("tokenizer")
        make = byte_pairs if request.param == "byte pairs" else unigrams
        make().save(str(folder / "tokenizer.json"))
    return Intake(Tokenizer(folder, LONGEST), LIMITS, roles=TextRoles({}, prompted=prompted))


def made(intake, text, prefix=NO_PREFIX, **form):
    """Return the long texts of one text, and its prompts."""
    long = LongTexts(intake, [text], LongTextForm(**form), prefix)
    return long, [prompt for step in long.steps for prompt in step.run()]


def tokens_of(intake, text):
    """Return the ids of a text, and where each of its own tokens begins."""
    [found] = intake.tokenizer.tokens_of([text], truncate=False)
    begins, latest = [], 0
    for is_added, (begin, end) in zip(found.is_special, found.offsets, strict=True):
        part = text[begin:end]
        skipped = len(part) - len(part.lstrip()) if part.strip() else 0
        latest = latest if is_added else max(latest, begin + skipped)
        begins.append(None if is_added else latest)
    return found.token_ids, begins


texts = st.lists(
    st.tuples(st.sampled_from(WORDS), st.sampled_from(SPACES)), min_size=1, max_size=40
).map(lambda parts: "".join(word + space for word, space in parts))


@settings(max_examples=150)
@given(data=st.data(), text=texts, prompt=st.sampled_from(["", "the: ", "a cat "]))
def test_each_token_is_in_some_window_and_counts_once_for_a_span(intake, data, text, prompt):
    overlap = data.draw(st.integers(0, 4))
    ids, begins = tokens_of(intake, prompt + text)
    own = [
        place for place, begin in enumerate(begins) if begin is not None and begin >= len(prompt)
    ]
    first, last = (own[0], own[-1]) if own else (len(ids), len(ids) - 1)
    head, tail = ids[:first], ids[last + 1 :]
    ends = data.draw(st.lists(st.integers(1, len(text)), unique=True, max_size=6).map(sorted))
    spans = list(zip([0, *ends], [*ends, len(text)], strict=True))
    # the tokens that begin in a span, those in front of the text and behind it at its ends
    expected = {}
    for number, (begin, end) in enumerate(spans):
        places = {place for place in own if begin <= begins[place] - len(prompt) < end}
        if first in places:
            places |= set(range(first))
        if last in places:
            places |= set(range(last + 1, len(ids)))
        if places and begin < end:
            expected[number] = places
    if not expected:
        return
    kept = [spans[number] for number in expected]
    prefix = TextPrefix(prompt=prompt) if prompt else NO_PREFIX

    whole, windows = made(intake, text, prefix, windows=True, overlap=overlap)
    long, prompts = made(
        intake,
        text,
        prefix,
        windows=True,
        overlap=overlap,
        spans=[at for each in kept for at in each],
    )

    step = LONGEST - len(head) - len(tail) - overlap
    seen = []
    for number, window in enumerate(windows):
        assert len(window.token_ids) <= LONGEST
        at = first + number * step
        part = ids[at : at + len(window.token_ids) - len(head) - len(tail)]
        assert window.token_ids.tolist() == [*head, *part, *tail]
        seen += range(at, at + len(part))
    assert sorted(set(seen)) == own
    assert whole.count([len(each.token_ids) for each in windows]) == [
        sum(len(each.token_ids) for each in windows)
    ]
    # the same tokens as in the whole text, each in one window
    counted = [[] for _ in kept]
    for part, prompt_ in zip(long._parts[0], prompts, strict=True):
        assert len(part.vectors) == len(set(part.vectors.tolist()))
        for vector, count, (begin, end) in zip(
            part.vectors.tolist(), part.counts.tolist(), prompt_.spans, strict=True
        ):
            assert count == end - begin
            counted[vector] += prompt_.token_ids[begin:end].tolist()
    for found, places in zip(counted, expected.values(), strict=True):
        assert sorted(found) == sorted(ids[place] for place in places)


@settings(max_examples=60)
@given(data=st.data(), text=texts)
def test_vectors_of_windows_are_means_by_tokens(intake, data, text):
    overlap, normalize = data.draw(st.integers(0, 4)), data.draw(st.booleans())
    long, prompts = made(intake, text, windows=True, overlap=overlap, normalize=normalize)
    outputs = np.random.default_rng(0).normal(size=(len(prompts), 5)).astype(np.float32)

    [vector] = long.vectors(list(outputs))

    others = 2 if intake.tokenizer.num_special_tokens(is_pair=False) else 0
    weights = [max(1, len(prompt.token_ids) - others) for prompt in prompts]
    expected = np.average(outputs.astype(np.float64), axis=0, weights=weights)
    if len(prompts) == 1:
        assert np.array_equal(vector, outputs[0])
    elif normalize:
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), rtol=1e-5)
    else:
        np.testing.assert_allclose(vector, expected, rtol=1e-5, atol=1e-6)


@settings(
    max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(data=st.data(), text=texts, prompt=st.sampled_from(["", "the: ", " "]))
def test_a_text_in_parts_has_the_prompts_of_the_whole_text(intake, monkeypatch, data, text, prompt):
    spans = None
    if text.strip() and data.draw(st.booleans()):
        spans = [0, len(text)]
    prefix = TextPrefix(prompt=prompt) if prompt else NO_PREFIX
    form = {"windows": True, "overlap": 2, "spans": spans}
    whole, expected = made(intake, text, prefix, **form)

    monkeypatch.setattr(tokenization, "_APART_CHARACTERS", 8)
    monkeypatch.setattr(tokenization, "_APART_MORE", 12)
    long, found = made(intake, text, prefix, **form)
    monkeypatch.undo()

    assert [each.token_ids.tolist() for each in found] == [
        each.token_ids.tolist() for each in expected
    ]
    for mine, its in zip(found, expected, strict=True):
        assert type(mine.payload) is type(its.payload)
        assert mine.payload.count == its.payload.count
        assert np.array_equal(mine.payload.tokens, its.payload.tokens)
    for mine, its in zip(long._parts[0], whole._parts[0], strict=True):
        assert mine.vectors.tolist() == its.vectors.tolist()
        assert mine.counts.tolist() == its.counts.tolist()


def test_a_long_text_is_tokenized_in_short_steps(small_bert):
    text = "the cat sat on the mat. " * 40_000
    limits = replace(LIMITS, max_sequence_tokens=512, max_text_bytes=1 << 20)
    intake = Intake(Tokenizer(small_bert, 512), limits)

    long = LongTexts(intake, ["the cat", text], LongTextForm(windows=True), NO_PREFIX)
    sizes = [step.num_bytes for step in long.steps]

    assert sum(sizes) == len(text) + len("the cat")
    assert max(sizes) < 10_000
    for step in long.steps[1:4]:
        assert not step.run()


def test_a_window_without_a_span_does_not_run(intake):
    text = "the cat " * 20

    _, every = made(intake, text, windows=True, overlap=0)
    _, some = made(intake, text, windows=True, overlap=0, spans=[0, 8, 150, 158])

    assert len(every) >= 3
    assert 1 < len(some) < len(every)


@pytest.mark.parametrize(
    "text, form, message",
    [
        (
            "the cat",
            {"spans": [0, 8]},
            r"spans\[0\] is \[0, 8\] and is outside of the text, which has 7",
        ),
        (
            "the cat",
            {"spans": [0, 3, 1, 3]},
            r"spans\[1\] is \[1, 3\] and has no token of the text that begins",
        ),
        ("   ", {"spans": [0, 3]}, r"spans\[0\] is \[0, 3\] and"),
        (
            "the cat",
            {"spans": [0, 7] * 20},
            "20 spans are in 4 tokens; allowed: a span for each token",
        ),
        (
            "the cat " * 20,
            {"spans": [0, 8]},
            "this model takes at most 16; windows: true reads it in parts",
        ),
        ("the cat", {"overlap": 3}, "the request has window_overlap without windows"),
        (
            "the cat " * 9,
            {"windows": True, "overlap": 16},
            r"two windows share 16 \(window_overlap\)",
        ),
        (
            "the cat " * 1000,
            {"windows": True},
            "row 0: text has 8000 bytes; this model takes at most 4000",
        ),
        (("a", "b"), {"windows": True}, "row 0: text is a pair, which has no spans or windows"),
    ],
    ids=lambda value: None,
)
def test_refuses_what_it_does_not_serve(small_bert, text, form, message):
    intake = Intake(Tokenizer(small_bert, LONGEST), LIMITS, long_texts=LongTextRules(100))
    if text == "   ":
        # white space has no token in this tokenizer
        message += " has no token"

    with pytest.raises(RequestError, match=message):
        made(intake, text, **form)


def test_spans_that_overlap_too_often_are_refused(small_bert):
    intake = Intake(Tokenizer(small_bert, LONGEST), LIMITS)

    # 14 spans of 16 tokens, which are all
    with pytest.raises(
        RequestError,
        match="spans of 224 tokens are in 16 tokens; allowed: each token in 8 spans on average",
    ):
        made(intake, "the cat " * 7, spans=[0, 55] * 14)


def test_a_model_that_serves_no_spans_says_why(small_bert):
    rules = LongTextRules(no_spans="pools by cls: a vector of a span is the mean of its tokens")
    intake = Intake(Tokenizer(small_bert, LONGEST), LIMITS, long_texts=rules)

    with pytest.raises(RequestError, match="the request has spans, and this model pools by cls"):
        made(intake, "the cat", spans=[0, 3])
    assert len(made(intake, "the cat " * 20, windows=True)[1]) > 1


def test_a_span_in_two_windows_needs_linear_layers(small_bert):
    rules = LongTextRules(behind="dense 24 to 12, tanh")
    intake = Intake(Tokenizer(small_bert, LONGEST), LIMITS, long_texts=rules)
    text = "the cat " * 20

    made(intake, text, windows=True, spans=[0, 8])
    with pytest.raises(
        RequestError,
        match=r"spans\[1\] is \[8, 160\] and is in . windows, which the layer behind pooling .*tanh",
    ):
        made(intake, text, windows=True, spans=[0, 8, 8, 160])
