"""Scores of pairs are the MaxSim of sentence-transformers."""

import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from torch import nn

from tests.checkpoints import SPECIAL_TOKENS, write_file
from tests.closeness import assert_close, encoder_roundings
from varlen.config import EngineConfig
from varlen.in_process.encoder import _FutureReply
from varlen.service.one_shot import EncoderParts
from varlen.service.service import Service
from varlen.telemetry.metrics import Stats
from varlen.wire.outputs import AnswerOptions, ModelOutputs, ScoreAnswer, ScoredPairs, max_sim
from varlen.wire.rows import read_request

from ..refusals import refused_request

QUERIES = ["the cat", "the cat", "river 42", "the cat"]
DOCUMENTS = ["a cat is it?", "river", "river", "0123 river, the cat"]


@pytest.fixture(scope="module")
def colbert(make_checkpoint, tmp_path_factory):
    """Return a checkpoint with roles, and MultiVectorEncoder of it."""
    folder, target = make_checkpoint("BertModel", pad_token_id=0), tmp_path_factory.mktemp("late")
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 60}
    write_file(folder, "tokenizer_config.json", kind | names)
    made = Transformer(str(folder), query_expansion={"strategy": "fixed", "length": 12})
    dense = Dense(
        made.get_embedding_dimension(),
        8,
        bias=False,
        activation_function=nn.Identity(),
        module_input_name="token_embeddings",
    )
    modules = [made, dense, MultiVectorMask(), Normalize("token_embeddings")]
    prompts = {"query": "the ", "document": "a "}
    oracle = MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu")
    oracle.save_pretrained(str(target), create_model_card=False)
    return target, oracle


@pytest.fixture(scope="module")
def service(colbert):
    config = EngineConfig(dtype="fp32", warmup_seconds=0)
    service = Service.load(EncoderParts, colbert[0], config, Stats())
    yield service
    service.close()


def read(service, parameters="", names=("scores", "num_tokens"), further=(), **texts):
    """Return the draft of a request of these texts, and the form of its answer."""
    tensors = {
        name: np.array([[text.encode()] for text in rows], object) for name, rows in texts.items()
    }
    outputs = ModelOutputs.of("token_embed", service.checkpoint, further)
    return read_request(tensors, parameters, service.intake, outputs, requested=names)


def test_scores_are_those_of_sentence_transformers(colbert, service):
    folder, oracle = colbert
    draft, pairs = read(service, text=QUERIES, text_pair=DOCUMENTS)
    request = draft.complete()
    reply = _FutureReply(len(request.prompts))

    service.model.submit(request, reply)
    answer = ScoreAnswer.to(request, pairs)
    tensors = answer.tensors(list(enumerate(reply.rows.result()))[::-1])

    # each text runs once
    assert len(request.prompts) == len({*QUERIES}) + len({*DOCUMENTS})
    expected = [
        float(oracle.similarity([oracle.encode_query(query)], [oracle.encode_document(document)]))
        for query, document in zip(QUERIES, DOCUMENTS, strict=True)
    ]
    assert tensors["scores"].shape == (4, 1)
    # a score is a sum over the tokens of a query
    roundings = encoder_roundings(folder) + 8 + 12
    assert_close(tensors["scores"][:, 0], expected, roundings=roundings)
    # queries are expanded to 12 tokens
    assert (tensors["num_tokens"][:, 0] > 12).all()
    assert answer.num_bytes == sum(each.nbytes for each in tensors.values())


def test_a_response_without_lengths_has_scores_alone(service):
    _, pairs = read(service, names=("scores", "token_embeddings"), text=["a"], text_pair=["b"])

    rows = [np.ones((2, 8), np.float32), np.ones((3, 8), np.float32)]
    tensors = ScoreAnswer(pairs, [2, 3]).tensors(list(enumerate(rows)))

    assert {name: each.tolist() for name, each in tensors.items()} == {"scores": [[16.0]]}


def test_pairs_of_a_model_with_further_outputs_have_scores_alone(service):
    names = ("scores", "token_embeddings", "last_hidden_state")

    draft, pairs = read(service, names=names, further=["hidden"], text=["a"], text_pair=["b"])

    # the engine's answers are the vectors of tokens, from which scores are made
    assert isinstance(pairs, ScoredPairs)
    assert draft.options.outputs == ()


def test_single_texts_have_no_scores(service):
    draft, form = read(service, names=("token_embeddings", "scores"), text=["the cat"])

    assert isinstance(form, AnswerOptions)
    assert len(draft.complete().prompts) == 1


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"names": ("token_embeddings",), "text": ["a"], "text_pair": ["b"]},
            "the request has text_pair, whose answer is scores; name that output",
        ),
        ({"names": ("scores",), "text": ["a"]}, "the request names only scores, of pairs; send"),
        (
            {"parameters": '{"prompt_name": "query"}', "text": ["a"], "text_pair": ["b"]},
            "the request has prompt_name and text_pair; text is a query and text_pair a document",
        ),
        ({"text": ["a"], "text_pair": ["b", "c"]}, "text_pair has 2 rows; text has 1"),
    ],
)
def test_refuses_what_has_no_scores(service, given, message):
    with refused_request(message):
        read(service, **given)


def test_max_sim_adds_the_largest_products():
    query = np.array([[1, 0], [0, 2]], np.float32)
    document = np.array([[3, 1], [1, 4], [0, 0]], np.float32)

    assert max_sim(query, document) == 3 + 8
    assert max_sim(query, document[:0]) == max_sim(query[:0], document) == 0
