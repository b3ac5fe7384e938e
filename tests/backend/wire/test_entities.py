"""Entities equal the pipeline of transformers, whatever the tokenizer."""

import json
import warnings

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TokenClassificationPipeline
from transformers.modeling_outputs import TokenClassifierOutput

from tests.checkpoints import LETTERS, save_checkpoint
from varlen.intake.checks import Intake
from varlen.intake.tokenization import Tokenizer
from varlen.models.checkpoint.family import Labels
from varlen.wire.entities import EntityReader
from varlen.wire.outputs import ArrayAnswer, ModelOutputs
from varlen.wire.rows import read_request

from ..fakes.input_limits import input_limits
from ..refusals import refused_request as refused

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC-old")
STRATEGIES = ("none", "simple", "first", "average", "max")
TEXTS = [
    "the cat, the river! is it 42?",
    "thé  河 vers 0123the cat-river",
    "a\u200bb \U0001f600 Straße (USA)",
    "b" * 30,
    " x ",
]


class _Model(torch.nn.Module):
    """Gives the logits that a test wants."""

    def __init__(self, config, logits):
        super().__init__()
        self.config, self.logits = config, logits
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def can_generate(self):
        return False

    def forward(self, **_):
        return TokenClassifierOutput(logits=torch.tensor(self.logits)[None])


def word_pieces(folder):
    save_checkpoint(folder, "BertForTokenClassification", words=[*LETTERS, "the", "cat", "##s"])


def byte_pairs(folder):
    save_checkpoint(folder, "GPT2LMHeadModel")


def unigrams(folder):
    save_checkpoint(folder, "BertForTokenClassification")
    pieces = [("<unk>", 0.0), ("▁", -2.0), *((f"▁{word}", -3.0) for word in ("the", "cat"))]
    pieces += [(letter, -4.0) for letter in "abcdeihrstv"]
    tokenizer = HuggingFaceTokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("save", [word_pieces, byte_pairs, unigrams])
def test_entities_match_the_pipeline(tmp_path, save, strategy):
    save(tmp_path)
    ours = Tokenizer(tmp_path, 128)
    unknown = ours.word_rules.unknown
    known = {} if unknown is None else {"unk_token": ours.huggingface.id_to_token(unknown)}
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **known)
    config = type("Config", (), {})()
    config.id2label = dict(enumerate(LABELS))
    rng = np.random.default_rng(0)

    def tokens_of(texts):
        return ours.tokens_of(texts, truncate=False)

    reader = EntityReader(strategy, TEXTS, tokens_of, ours.word_rules)
    for row, text in enumerate(TEXTS):
        encoded = theirs(text, return_offsets_mapping=True, return_special_tokens_mask=True)
        logits = rng.normal(size=(len(encoded["input_ids"]), len(LABELS)), scale=2)
        logits = logits.astype(np.float32)
        scores = torch.softmax(torch.tensor(logits), -1).numpy()
        expected = _pipeline_entities(theirs, config, logits, text, strategy)

        actual = json.loads(reader.json_of(row, scores, LABELS))

        for each in (*actual, *expected):
            each["score"] = pytest.approx(float(each["score"]), rel=1e-5)
        assert actual == expected


def _pipeline_entities(tokenizer, config, logits, text, strategy):
    """Return what the pipeline makes of the logits of a text's tokens."""
    pipeline = TokenClassificationPipeline.__new__(TokenClassificationPipeline)
    pipeline.tokenizer, pipeline.model = tokenizer, _Model(config, logits)
    encoded = tokenizer(
        text, return_offsets_mapping=True, return_special_tokens_mask=True, return_tensors="np"
    )
    outputs = {
        "logits": torch.tensor(logits)[None],
        "special_tokens_mask": torch.tensor(encoded["special_tokens_mask"]),
        "offset_mapping": torch.tensor(encoded["offset_mapping"]),
        "input_ids": torch.tensor(encoded["input_ids"]),
        "sentence": text,
        "is_last": True,
    }
    kinds = {each.name.lower(): each for each in _strategies()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pipeline.postprocess([outputs], aggregation_strategy=kinds[strategy])


def read(intake, parameters, **tensors):
    labels = Labels(LABELS, "softmax")
    outputs = ModelOutputs("token_classify", len(LABELS), labels, normalize=False)
    draft, options = read_request(
        tensors, json.dumps(parameters), intake, outputs, requested=["entities", "num_tokens"]
    )
    return ArrayAnswer.to(draft.complete(), outputs, options)


def test_a_response_has_the_entities_of_each_text(small_bert):
    intake = Intake(Tokenizer(small_bert, 12), input_limits())
    texts = np.array([["the cat"], ["a " * 30]], dtype=np.object_)
    texts = np.vectorize(str.encode, otypes=[object])(texts)
    maker = read(intake, {"aggregation_strategy": "simple", "truncate": True}, text=texts)
    logits = [np.full((n, len(LABELS)), -9, np.float32) for n in maker.num_tokens]
    for row in logits:
        row[:, 1] = 9

    arrays = maker.tensors(list(enumerate(logits)))

    first, second = (json.loads(row) for row in arrays["entities"][:, 0])
    assert [(each["start"], each["end"]) for each in first] == [(0, 3), (4, 7)]
    assert {each["entity_group"] for each in second} == {"PER"}
    # 12 tokens with the two special ones
    assert [each["start"] for each in second] == list(range(0, 20, 2))
    assert sum(4 + len(row) for row in arrays["entities"][:, 0]) <= maker.num_bytes
    without = read(intake, {"truncate": True}, text=texts).tensors(list(enumerate(logits)))
    assert without["entities"].tolist() == [[b""], [b""]]


def test_offsets_count_from_the_beginning_of_a_text_whose_beginning_is_cut(small_bert):
    intake = Intake(Tokenizer(small_bert, 12), input_limits(max_text_bytes=100))
    cut = {"aggregation_strategy": "simple", "truncate": True, "truncation_side": "left"}
    text = np.array([[b"a " * 49 + b"b"]], dtype=np.object_)
    maker = read(intake, cut, text=text)
    logits = np.zeros((12, len(LABELS)), np.float32)
    logits[:, 1] = 9

    (row,) = maker.tensors([(0, logits)])["entities"][0]

    assert [each["start"] for each in json.loads(row)] == list(range(80, 100, 2))
    # of a longer one only the end would be read
    with refused("row 0: text has 101 bytes"):
        read(intake, cut, text=np.array([[b"a " * 50 + b"b"]], dtype=np.object_))


def test_entities_need_single_texts_and_probabilities(small_bert):
    intake = Intake(Tokenizer(small_bert, 12), input_limits())
    text = np.array([[b"the cat"]], dtype=np.object_)
    simple = {"aggregation_strategy": "simple"}

    with refused("has aggregation_strategy and text, text_pair; entities are parts of single"):
        read(intake, simple, text=text, text_pair=text)
    with refused("the request has aggregation_strategy and input_ids"):
        read(intake, simple, input_ids=np.array([[2, 5, 3]]))
    with refused("aggregation_strategy and activation sigmoid; the scores of entities"):
        read(intake, simple | {"activation": "sigmoid"}, text=text)
    with refused('aggregation_strategy is "best"; allowed: none, simple, first, average, max'):
        read(intake, {"aggregation_strategy": "best"}, text=text)


def _strategies():
    from transformers.pipelines.token_classification import AggregationStrategy

    return AggregationStrategy
