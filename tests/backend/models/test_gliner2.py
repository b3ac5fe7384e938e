"""Spans and their scores match the arithmetic of the library gliner2 2.1.0, see `tests.gliner2_models`."""

import shutil

import pytest
import torch

from tests.checkpoints import set_fields
from tests.closeness import assert_close, encoder_roundings
from tests.gliner2_models import (
    PARTS,
    SCHEMA,
    Gliner2,
    assert_same,
    clear_of_scores,
    save_gliner2,
    tasks_of,
)
from tests.gliner_models import thresholds_of
from varlen import Encoder
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.schema import read_schema

from ..refusals import refused_checkpoint as refused
from ..refusals import refused_request
from .test_extraction import scores_of

TEXTS = [
    "the cat, sat on the river-bank at 5.",
    "a",
    "River, the river! is it 42? the Cat's river_bank - no",
    "e@mail.com, see https://river.example/a?b=c; @cat",
    "",
]
LABELS = ["person name", "the river", "x", "number 42"]
ATTENDED = {"counting_layer": "count_lstm_v2"}


def logits_of(oracle, text, labels):
    """Return the logits of the oracle in the order of the engine, `[pairs, columns]`."""
    return oracle.logits(text, labels).transpose(1, 2).flatten(0, 1)


def assert_near(rows, expected, roundings):
    """Compare the logits of all texts; an error grows with the largest of them."""
    found, inside = torch.cat([*map(torch.from_numpy, rows)]), expected > -torch.inf
    assert torch.equal(found > -torch.inf, inside)
    assert_close(found[inside], expected[inside], roundings=4 * roundings)


def check(folder):
    """Compare all texts, alone and mixed, with the oracle."""
    oracle, roundings = Gliner2(folder), encoder_roundings(folder / "encoder_config")
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        mixed = scores_of(encoder, TEXTS, LABELS)
        alone = [row for text in TEXTS for row in scores_of(encoder, [text], LABELS)]
        expected = torch.cat([logits_of(oracle, text, LABELS) for text in TEXTS])
        for rows in (mixed, alone):
            assert_near(rows, expected, roundings)
        for limit in thresholds_of(oracle, TEXTS, LABELS):
            for flat in (True, False):
                rows = encoder.extract(TEXTS, LABELS, threshold=limit, flat_ner=flat)
                for text, row in zip(TEXTS, rows, strict=True):
                    found = sorted((each.start, each.end, each.text, each.label) for each in row)
                    wanted = oracle.entities(text, LABELS, threshold=limit, flat_ner=flat)
                    assert found == [each[:4] for each in wanted]


@pytest.mark.parametrize("fields", [{}, ATTENDED], ids=["count_lstm", "count_lstm_v2"])
def test_scores_and_spans_match_the_library(tmp_path, fields):
    check(save_gliner2(tmp_path / "model", **fields))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ModernBertModel", "BertModel"])
def test_encoders_of_other_families_match(tmp_path, kind):
    long = {"max_position_embeddings": 128}
    check(save_gliner2(tmp_path / "model", kind=kind, encoder=long, **ATTENDED))


def check_schemas(folder, schemas):
    """Compare the answers to schemas, each alone and all texts of a request together."""
    oracle = Gliner2(folder)
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        for given in schemas:
            for flat, near in ((True, 0.5), (False, 0.55)):
                schema, threshold = clear_of_scores(oracle, TEXTS, given, near)
                form = {"threshold": threshold, "flat_ner": flat}
                together = encoder.extract_schema(TEXTS, schema, **form)
                for text, found in zip(TEXTS, together, strict=True):
                    (alone,) = encoder.extract_schema([text], schema, **form)
                    wanted = oracle.extract(text, schema, **form)
                    assert_same(found, wanted)
                    assert_same(alone, wanted)


def test_answers_to_a_schema_match_the_library(tmp_path):
    folder = save_gliner2(tmp_path / "model", scale=1.2, **ATTENDED)
    check_schemas(folder, [SCHEMA])
    tasks = [each[:3] for each in tasks_of({**PARTS["structures"], **PARTS["relations"]})]
    counts = {len(each) for text in TEXTS for each in Gliner2(folder).scored(text, tasks)}
    assert max(counts) > 1


@pytest.mark.full
@pytest.mark.parametrize("kind", ["DebertaV2Model", "ModernBertModel"])
@pytest.mark.parametrize("counts", [True, False])
def test_answers_to_parts_of_a_schema_match_the_library(tmp_path, kind, counts):
    long = {"max_position_embeddings": 256} if kind == "ModernBertModel" else None
    folder = save_gliner2(tmp_path / "model", kind=kind, counts=counts, scale=1, encoder=long)
    check_schemas(folder, PARTS.values())


def test_requests_with_other_schemas_share_a_batch(tmp_path):
    """More labels than memory is planned for run in parts."""
    folder = save_gliner2(tmp_path / "model", scale=1)
    oracle = Gliner2(folder)
    several = [*PARTS.values(), SCHEMA, {"entities": LABELS}]
    asked = [clear_of_scores(oracle, TEXTS[:1], each) for each in several] * 3
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        parts = [
            encoder._span_texts([TEXTS[0]], schema=read_schema(schema), threshold=threshold)
            for schema, threshold in asked
        ]
        rows = encoder._answers(
            tuple(p for each in parts for step in each.steps for p in step.run())
        )
        for (schema, threshold), part, row in zip(asked, parts, rows, strict=True):
            wanted = oracle.extract(TEXTS[0], schema, threshold=threshold)
            assert_same(part.results([row])[0], wanted)


def test_bf16_classes_are_near_fp32(tmp_path):
    folder = save_gliner2(tmp_path / "model", **ATTENDED)
    with Encoder.from_pretrained(folder, dtype="bf16", warmup_seconds=0) as encoder:
        rows = encoder.extract_schema(TEXTS, PARTS["classifications"])
    for text, row in zip(TEXTS, rows, strict=True):
        wanted = Gliner2(folder).extract(text, PARTS["classifications"])
        assert row["mood"]["confidence"] == pytest.approx(wanted["mood"]["confidence"], abs=0.03)


@pytest.mark.parametrize(
    "schema, message",
    [
        ("[]", "schema is []; allowed: a JSON object as"),
        ({}, "schema is {}; allowed"),
        ({"entity": ["x"]}, 'a key of schema is "entity"; allowed: structures, entities'),
        ({"entities": ["x", "x"]}, "names that differ"),
        ({"entities": ["x"], "entity_attributes": {}}, '"entity_attributes", which is not served'),
        ({"entities": {"x": {"threshold": 2}}}, "schema.entities.x.threshold is 2; allowed"),
        ({"entities": [" "]}, "not blank"),
        ({"structures": {"a": {"fields": []}}}, "schema.structures.a has no labels"),
        (
            {"structures": {"a": {"fields": [{"name": "b"}], "mode": "latent"}}},
            'schema.structures.a has "mode", which only models of GLiNER2 read that score where',
        ),
        ({"structures": {"a": {"fields": [{"name": "b", "dtype": "int"}]}}}, "allowed: str, list"),
        ({"classifications": [{"task": "a", "labels": ["b"]}]}, "two labels or more"),
        ({"classifications": [{"task": "a", "labels": ["b", "c"], "top_k": 0}]}, "top_k is 0"),
        (
            {"entities": ["x"], "classifications": [{"task": "entities", "labels": ["b", "c"]}]},
            'two tasks that answer "entities"',
        ),
        (
            {"relations": [f"r{number}" for number in range(14)]},
            "schema has 532 labels; labels of structures and relations count 19 times",
        ),
    ],
)
def test_a_schema_that_is_not_served_is_refused(schema, message):
    with refused_request(message):
        read_schema(schema)


def test_a_text_that_is_said_to_have_no_span_has_none(tmp_path):
    """One model counts none, whatever the scores of spans are."""
    folder = save_gliner2(tmp_path / "model", counts=False)
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        rows = encoder.extract(TEXTS, LABELS, threshold=0)
    assert rows == [[]] * len(TEXTS)


def test_bf16_scores_are_near_fp32(tmp_path):
    folder = save_gliner2(tmp_path / "model", **ATTENDED)
    oracle = Gliner2(folder)
    with Encoder.from_pretrained(folder, dtype="bf16", warmup_seconds=0) as encoder:
        rows = scores_of(encoder, TEXTS, LABELS)
    found = torch.cat([torch.from_numpy(row).flatten() for row in rows])
    wanted = torch.cat([logits_of(oracle, text, LABELS).flatten() for text in TEXTS])
    inside = wanted > -torch.inf
    assert torch.cosine_similarity(found[inside], wanted[inside], dim=0) > 0.999


def test_texts_with_other_labels_share_a_batch(tmp_path):
    folder = save_gliner2(tmp_path / "model", **ATTENDED)
    oracle, roundings = Gliner2(folder), encoder_roundings(folder / "encoder_config")
    several = [(TEXTS[0], ["x"]), (TEXTS[2], LABELS), (TEXTS[4], ["x", "y"]), (TEXTS[3], ["[P]"])]
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        intake = encoder._service.intake
        steps = [intake.word_prompts.steps([t], ls, truncate=False) for t, ls in several]
        rows = encoder._answers(tuple(p for each in steps for step in each for p in step.run()))
    assert_near(rows, torch.cat([logits_of(oracle, *each) for each in several]), roundings)


def test_words_and_labels_are_those_of_the_text_as_it_came(tmp_path):
    folder = save_gliner2(tmp_path / "model")
    text = "İ see\u200da Cat at https://river.example/a"
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        (row,) = encoder.extract([text], ["x"], threshold=0, flat_ner=False)
        # the library reads marks by their places, so a label may hold one
        (marked,) = encoder.extract([text], ["a [E]", "x"], threshold=0)
    wanted = Gliner2(folder).entities(text, ["a [E]", "x"], threshold=0)
    assert sorted((each.start, each.end, each.label) for each in marked) == sorted(
        (start, end, label) for start, end, _, label, _ in wanted
    )
    assert {each.text for each in row} >= {"see\u200da", "Cat", "https://river.example/a"}
    assert all(each.text == text[each.start : each.end] for each in row)


def test_a_long_word_is_no_long_search(tmp_path):
    """A search for an address that begins at each word reads few characters."""
    folder = save_gliner2(tmp_path / "model")
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        with refused_request("text has more than 2048 words"):
            encoder.extract(["a." * 100_000], ["x"])


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"architecture": "boundary"}, 'architecture "boundary", a model of GLiNER2'),
        ({"counting_layer": "count_lstm_moe"}, 'counting_layer "count_lstm_moe"; allowed: count_'),
        ({"counting_layer": "count_lstm_v2"}, "count_embed.transformer.in_projector.weight"),
        ({"token_pooling": "mean"}, 'token_pooling "mean"; allowed: first'),
        ({"max_width": 9999}, "config.json has max_width 9999; allowed: up to 256"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(next(iter(value.items()))),
)
def test_what_changes_an_answer_is_refused_by_name(tmp_path, fields, message):
    folder = save_gliner2(tmp_path / "model")
    set_fields(folder, "config.json", **fields)
    with refused(message):
        Checkpoint.open(folder).check_task("extract")


def test_an_encoder_of_another_family_is_refused(tmp_path):
    folder = save_gliner2(tmp_path / "model")
    set_fields(folder, "encoder_config/config.json", model_type="t5")
    with refused('encoder_config/config.json has model_type "t5"; allowed: deberta-v2, modernbert'):
        Checkpoint.open(folder)
    shutil.rmtree(folder / "encoder_config")
    with refused("encoder_config/config.json"):
        Checkpoint.open(folder)


def test_its_task_is_extract(tmp_path):
    checkpoint = Checkpoint.open(save_gliner2(tmp_path / "model"))
    assert checkpoint.tasks == ("extract",)
    with refused('task "classify" is not served with a model of GLiNER or GLiNER2'):
        checkpoint.check_task("classify")
