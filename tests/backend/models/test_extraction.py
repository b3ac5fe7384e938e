"""Spans and their scores match the arithmetic of the library gliner, see `tests.gliner_models`."""

import shutil

import pytest
import torch

from tests.checkpoints import set_fields
from tests.closeness import assert_close, encoder_roundings
from tests.gliner_models import MARK, SEPARATOR, Gliner, save_gliner, thresholds_of
from varlen import Encoder
from varlen.config import EngineConfig
from varlen.errors import ConfigError
from varlen.execution.programs import WholeSequences, load_programs
from varlen.models.checkpoint_folder import Checkpoint

from ..refusals import refused_checkpoint as refused
from ..refusals import refused_request

TEXTS = [
    "the cat, sat on the river-bank at 5.",
    "a",
    "river, the river! is it 42? the cat's river_bank - no",
    "e@mail.com, +49-30-12345; the (cat)",
    "",
]
LABELS = ["person name", "the river", "x", "number 42"]
FORMS = [
    {"flat_ner": flat_ner, "multi_label": multi_label}
    for flat_ner in (True, False)
    for multi_label in (True, False)
]
SPANS, WORDS = {"hidden_size": 16}, {"span_mode": "token_level"}
# an encoder of labels, with which the library does not run the LSTM; scores of this seed are not near 1
APART = {"labels_kind": "BertModel", "num_rnn_layers": 1, "hidden_size": 16, "seed": 1}
VARIANTS = {
    "spans": SPANS,
    "no LSTM": {"num_rnn_layers": 0},
    "two layers": {"num_rnn_layers": 2},
    "last token": {"subtoken_pooling": "last"},
    "label's token": {"embed_ent_token": False},
    "words": WORDS,
    "words, projection": {**WORDS, "hidden_size": 16},
    "labels apart": APART,
    "labels apart, no LSTM": {"labels_kind": "BertModel", "num_rnn_layers": 0, "seed": 1},
    "labels apart, words": {**APART, **WORDS, "seed": 2},
    "labels apart, two ModernBERT": {
        "kind": "ModernBertModel",
        "labels_kind": "ModernBertModel",
        "subtoken_pooling": "last",
    },
    "labels apart, DeBERTa": {"labels_kind": "DebertaV2Model", "hidden_size": 16},
}
# in the fast tests
CORE = ("spans", "words", "labels apart")
KINDS = ["DebertaV2Model", "ModernBertModel", "BertModel"]


@pytest.fixture
def make(tmp_path):
    """Return a function that saves a model and returns its folder."""
    return lambda **fields: save_gliner(tmp_path / "model", **fields)


@pytest.fixture(scope="module")
def shared_model(tmp_path_factory):
    """Return the folder of a model that no test changes."""
    return save_gliner(tmp_path_factory.mktemp("gliner") / "model")


def scores_of(encoder, texts, labels):
    """Return the logits of each text, as the engine answers them."""
    steps = encoder._service.intake.word_prompts.steps(texts, labels, truncate=False)
    return encoder._answers(tuple(prompt for step in steps for prompt in step.run()))


def expected_scores(oracle, text, labels):
    """Return the logits of the oracle in the order of the engine, `[pairs, columns]`."""
    logits = oracle.logits(text, labels)
    if oracle.config["span_mode"] != "token_level":
        logits = logits.transpose(1, 2)
    return logits.flatten(0, 1)


def check(folder):
    """Compare all texts, alone and mixed, with the oracle."""
    oracle, roundings = Gliner(folder), encoder_roundings(folder / "encoder")
    texts = TEXTS[:-1]
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        mixed = scores_of(encoder, texts, LABELS)
        for text, row in zip(texts, mixed, strict=True):
            (alone,) = scores_of(encoder, [text], LABELS)
            expected = expected_scores(oracle, text, LABELS)
            inside = expected > -torch.inf
            for found in map(torch.from_numpy, (row, alone)):
                assert torch.equal(found > -torch.inf, inside)
                assert_close(found[inside], expected[inside], roundings=4 * roundings)
        limits = thresholds_of(oracle, texts, LABELS)
        for form in [{**form, "threshold": limit} for form in FORMS for limit in limits]:
            for text, row in zip(TEXTS, encoder.extract(TEXTS, LABELS, **form), strict=True):
                found = [(each.start, each.end, each.text, each.label) for each in row]
                assert found == [each[:4] for each in oracle.entities(text, LABELS, **form)]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(fields, id=name, marks=[] if name in CORE else pytest.mark.full)
        for name, fields in VARIANTS.items()
    ],
)
def test_scores_and_spans_match_the_library(make, fields):
    check(make(**fields))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("fields", [SPANS, WORDS], ids=["spans", "words"])
def test_encoders_of_other_families_match(make, kind, fields):
    check(make(kind=kind, **fields))


@pytest.mark.parametrize("fields", [SPANS, WORDS, APART], ids=["spans", "words", "labels apart"])
def test_bf16_scores_are_near_fp32(make, fields):
    folder = make(**fields)
    oracle = Gliner(folder)
    with Encoder.from_pretrained(folder, dtype="bf16", warmup_seconds=0) as encoder:
        rows = scores_of(encoder, TEXTS[:-1], LABELS)
    found = torch.cat([torch.from_numpy(row).flatten() for row in rows])
    wanted = torch.cat([expected_scores(oracle, text, LABELS).flatten() for text in TEXTS[:-1]])
    inside = wanted > -torch.inf
    assert torch.cosine_similarity(found[inside], wanted[inside], dim=0) > 0.999


@pytest.mark.parametrize("fields", [SPANS, APART], ids=["spans", "labels apart"])
def test_texts_with_other_labels_share_a_batch(make, fields):
    folder = make(**fields)
    oracle, roundings = Gliner(folder), encoder_roundings(folder / "encoder")
    several = [
        (TEXTS[0], ["x"]),
        (TEXTS[2], LABELS),
        (TEXTS[4], ["x", "y"]),
        (TEXTS[3], LABELS[:2]),
    ]
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        intake = encoder._service.intake
        steps = [intake.word_prompts.steps([t], ls, truncate=False) for t, ls in several]
        rows = encoder._answers(tuple(p for each in steps for step in each for p in step.run()))
    for (text, labels), row in zip(several, rows, strict=True):
        if not text:
            assert row.shape == (0, 4)
            continue
        expected = expected_scores(oracle, text, labels)
        inside = expected > -torch.inf
        assert_close(torch.from_numpy(row)[inside], expected[inside], roundings=4 * roundings)


def test_a_text_that_is_too_long_is_refused_or_loses_its_last_words(make):
    folder = make(**SPANS)
    text = " ".join(f"w{number}" for number in range(40))
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        with refused_request("row 0: text has more than 30 words; this model takes at most 30"):
            encoder.extract([text], ["cat"])
        whole = encoder.extract([text], ["cat"], threshold=0, truncate=True)
        first = encoder.extract([" ".join(text.split()[:30])], ["cat"], threshold=0)
        assert [each.text for each in whole[0]] == [each.text for each in first[0]]
        short = encoder.extract(
            [text],
            ["cat"],
            threshold=0,
            flat_ner=False,
            multi_label=True,
            truncate_prompt_tokens=14,
        )
        assert max(each.end for each in short[0]) < len("w0 w1 w2 w3 w4 w5")
        with refused_request("no token is left for the text; 4 tokens are read"):
            encoder.extract([text], ["cat"], truncate_prompt_tokens=4)


def test_labels_are_refused(make):
    folder = make(**SPANS)
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        for labels in (
            [],
            [""],
            ["x", " \n"],
            ["x"] * 3 + [7],
            "x",
            [f"label {n}" for n in range(257)],
        ):
            with refused_request("labels is"):
                encoder.extract(["a"], labels)
        with refused_request("inputs is one string; send a list of them"):
            encoder.extract("the cat", ["x"])
        with refused_request(f"row 0: the label 'a {MARK}' holds the token {MARK}"):
            encoder.extract(["a"], [f"a {MARK}"])
        twice = encoder.extract(["the cat"], ["x", "y", "x"], threshold=0)
        assert twice == encoder.extract(["the cat"], ["x", "y"], threshold=0)


def test_too_many_candidates_are_refused(make, monkeypatch):
    monkeypatch.setattr("varlen.request.spans.MAX_CANDIDATES", 5)
    with (
        Encoder.from_pretrained(make(**SPANS), dtype="fp32", warmup_seconds=0) as encoder,
        refused_request("Send a higher threshold, or fewer labels"),
    ):
        encoder.extract(["the cat sat on the river"], ["x"], threshold=0)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"labels_encoder": "org/name"},
            'no labels_encoder_config, only the name of a model ("org/name"), whose files `varlen fetch`',
        ),
        ({"labels_decoder": "org/name"}, "labels_decoder"),
        ({"relations_layer": "dot"}, "relations_layer"),
        ({"post_fusion_schema": "l2l-l2t"}, "post_fusion_schema"),
        ({"fuse_layers": True}, "fuse_layers"),
        ({"represent_spans": True}, "represent_spans"),
        ({"span_mode": "markerV1"}, 'span_mode "markerV1"; allowed: markerV0, token_level'),
        ({"subtoken_pooling": "mean"}, 'subtoken_pooling "mean"; allowed: first, last'),
        ({"words_splitter_type": "spacy"}, 'words_splitter_type "spacy"; allowed: whitespace'),
        ({"encoder_config": None}, '("encoder"), whose files `varlen fetch` reads and adds'),
        ({"encoder_config": {"model_type": "t5"}}, "allowed: deberta-v2, modernbert, bert"),
        ({"max_width": 9999}, "max_width 9999"),
        ({"num_rnn_layers": 99}, "num_rnn_layers 99"),
        ({"hidden_size": 16}, "token_rep_layer.projection.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_changes_an_answer_is_refused_by_name(tmp_path, shared_model, fields, message):
    folder = tmp_path / "changed"
    shutil.copytree(shared_model, folder)
    set_fields(folder, "gliner_config.json", **fields)
    with refused(message):
        Checkpoint.open(folder).check_task("extract")


def test_other_tasks_and_other_folders_are_refused(shared_model):
    checkpoint = Checkpoint.open(shared_model)
    assert checkpoint.task == "extract"
    assert checkpoint.tasks == ("extract",)
    with refused('task "embed" is not served with a model of GLiNER or GLiNER2; allowed: extract'):
        checkpoint.check_task("embed")
    with refused('task "extract" needs a model of GLiNER'):
        Checkpoint.open(shared_model / "encoder").check_task("extract")


def test_a_load_on_a_gpu_is_refused_with_the_remedy(shared_model):
    checkpoint, gpu = Checkpoint.open(shared_model), torch.device("cuda", 0)
    message = '"extract" runs on CPUs only in this version; set device to cpu, or the instance to KIND_CPU'
    with pytest.raises(ConfigError, match=message):
        load_programs(
            WholeSequences, checkpoint, EngineConfig(), "extract", gpu, None, longest=8, seconds=0
        )


def test_a_mark_of_another_token_is_refused(tmp_path, shared_model):
    folder = tmp_path / "changed"
    shutil.copytree(shared_model, folder)
    set_fields(folder, "gliner_config.json", ent_token=SEPARATOR)
    with refused("which is not the token <<SEP>> of tokenizer.json"):
        Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0)


def test_a_word_without_tokens_is_read_at_the_token_before_it(shared_model):
    # the tokenizer removes the control character
    text = "the \x7f cat"
    with Encoder.from_pretrained(shared_model, dtype="fp32", warmup_seconds=0) as encoder:
        (row,) = encoder.extract([text], ["x"], threshold=0, flat_ner=False)
        with refused_request("20 words and 1 labels have 5 tokens; allowed: a token for each"):
            encoder.extract(["\x7f " * 20], ["x"])
    assert {text[each.start : each.end] for each in row} >= {"the", "cat"}


class Counted:
    """Runs a program, and counts sequences."""

    def __init__(self, device):
        self.program, self.input_names, self.longest_first = (
            device.program,
            device.input_names,
            False,
        )
        self.counts, self._device = [], device

    def launch(self, arrays, dims):
        self.counts.append(dims["sequences"])
        return self._device.launch(arrays, dims)

    def close(self):
        self._device.close()


def count_labels(encoder):
    """Count the labels that the encoder of labels reads, batch by batch."""
    state = encoder._service.model.workers.runners[0].state
    state._labels.device = device = Counted(state._labels.device)
    return device.counts, state


def test_a_label_is_read_once(make, monkeypatch):
    folder = make(**APART)
    with Encoder.from_pretrained(
        folder, dtype="fp32", warmup_seconds=0, threads=1, max_batch_tokens=32
    ) as encoder:
        counts, state = count_labels(encoder)
        first = encoder.extract(TEXTS, LABELS, threshold=0)
        assert sum(counts) == len(LABELS)
        # several batches, by their tokens
        assert len(counts) > 1
        again = encoder.extract(TEXTS, LABELS[::-1], threshold=0)
        assert sum(counts) == len(LABELS)
        encoder.extract(TEXTS[:1], [*LABELS, "y"])
        assert sum(counts) == len(LABELS) + 1
        # what is not kept is read again, and gives the same answers
        monkeypatch.setattr(state, "_most_kept", 1)
        assert encoder.extract(TEXTS, LABELS[::-1], threshold=0) == again
        assert encoder.extract(TEXTS, LABELS, threshold=0) == first
        assert sum(counts) > len(LABELS) + 1
        assert len(state._kept) == 1


def test_more_labels_than_tokens_run_in_parts(make):
    folder, texts = make(**APART), ["a", "x", "the"]
    labels = [f"label {number}" for number in range(150)]
    roundings = encoder_roundings(folder / "encoder")
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0, threads=1) as encoder:
        state = encoder._service.model.workers.runners[0].state
        # the arena of a model of 256 tokens
        state._largest = {**state._largest, "labels": 256}
        state.device = device = Counted(state.device)
        mixed = scores_of(encoder, texts, labels)
        assert device.counts == [1, 1, 1]
        for text, row in zip(texts, mixed, strict=True):
            (alone,) = map(torch.from_numpy, scores_of(encoder, [text], labels))
            inside = alone > -torch.inf
            assert_close(torch.from_numpy(row)[inside], alone[inside], roundings=4 * roundings)


def test_labels_apart_are_bounded(make):
    folder = make(**APART, max_len=3000)
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        with refused_request("tokens; allowed: 4096. Send fewer or shorter labels"):
            encoder.extract(["a"], [f"{'x ' * 200}{number}" for number in range(256)])
        with refused_request("no token is left for the text; 2 tokens are read"):
            encoder.extract(["the cat"], ["x"], truncate_prompt_tokens=2)
        with refused_request("no token is left for the text; 1 tokens are read"):
            # it has no tokens but special ones
            encoder.extract([""], ["x"], truncate_prompt_tokens=1)
        with refused_request("text has 3002 tokens; this model takes at most 2048"):
            encoder.extract(["a b " * 1500], ["x"])


def test_a_bi_encoder_without_the_tokenizer_of_labels_is_refused(tmp_path, make):
    folder = make(**APART)
    shutil.rmtree(folder / "labels_tokenizer")
    with refused("labels_tokenizer has no tokenizer.json"):
        Checkpoint.open(folder)


def test_an_encoder_of_labels_has_the_tensors_of_its_configuration(make):
    folder = make(**APART)
    config = Checkpoint.open(folder).extraction.labels.config
    set_fields(
        folder, "gliner_config.json", labels_encoder_config={**config, "num_hidden_layers": 9}
    )
    with refused('the checkpoint has no tensor "encoder.layer.'):
        Checkpoint.open(folder).check_task("extract")
