"""Vectors of tokens match MultiVectorEncoder in sentence-transformers."""

from itertools import pairwise

import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from tokenizers import AddedToken
from tokenizers import Tokenizer as HuggingFaceTokenizer
from torch import nn

from tests.checkpoints import (
    LETTERS,
    SPECIAL_TOKENS,
    change_tensors,
    drop_field,
    module,
    set_fields,
    write_file,
)
from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import RequestOptions
from varlen.request.row_parameters import TextPrefix
from varlen.service.one_shot import EncoderParts
from varlen.service.service import Service
from varlen.telemetry.metrics import Stats

from ..refusals import refused_checkpoint as refused
from ..refusals import refused_request, refused_setting

TEXTS = ["the cat", "a", "river, the river! is it 42?", "0123456789 river, cat"]
# Names of roles in MultiVectorEncoder and in a request.
ROLES = ("query", "document", None)
PROMPTS = {"query": "the ", "document": "cat ", "other": "river "}
PYLATE_DENSE = "pylate.models.Dense.Dense"
EXPANSION = {"strategy": "fixed", "length": 26}
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 60,
    **{f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS},
}


@pytest.fixture(scope="module")
def make_encoder(make_checkpoint):
    """Return a function that saves an encoder whose tokenizer has names for its special tokens."""

    def make(kind, **config):
        # the token of RoBERTa's padding is the mask otherwise, which would have no position
        folder = make_checkpoint(kind, pad_token_id=0, **config)
        write_file(folder, "tokenizer_config.json", TOKENIZER)
        return folder

    return make


def save(folder, target, *, widths=(8,), mask=None, prompts=PROMPTS, **transformer):
    """Save a checkpoint for MultiVectorEncoder, and return that."""
    made = Transformer(str(folder), **transformer)
    sizes = [made.get_embedding_dimension(), *widths]
    layers = [
        Dense(
            fan_in,
            fan_out,
            bias=index > 0,
            activation_function=nn.Tanh() if index else nn.Identity(),
            module_input_name="token_embeddings",
        )
        for index, (fan_in, fan_out) in enumerate(pairwise(sizes))
    ]
    modules = [made, *layers, mask or MultiVectorMask(), Normalize("token_embeddings")]
    encoder = MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu")
    encoder.save_pretrained(str(target), create_model_card=False)
    return encoder


def vectors_of(oracle, texts, role):
    """Return what MultiVectorEncoder answers to texts, one at a time."""
    encode = {"query": oracle.encode_query, "document": oracle.encode_document}
    return [encode.get(role, oracle.encode)(text, convert_to_numpy=True) for text in texts]


def check(folder, oracle, *, texts=TEXTS, roles=ROLES):
    """Compare vectors of texts in each role, single and beside other roles."""
    roundings = encoder_roundings(folder) + 100
    with Encoder.from_pretrained(folder, dtype="fp32", threads=1) as encoder:
        assert encoder.task == "token_embed"
        for role in roles:
            expected = vectors_of(oracle, texts, role)
            together = encoder.token_embed(texts, prompt_name=role, truncate=True)
            alone = [
                encoder.token_embed([text], prompt_name=role, truncate=True)[0] for text in texts
            ]
            for right, first, second in zip(expected, together, alone, strict=True):
                assert first.shape == right.shape
                assert_close(first, right, roundings=roundings)
                assert_close(second, first, roundings=roundings)


@pytest.mark.parametrize("kind", ["BertModel", "ModernBertModel", "RobertaModel", "MPNetModel"])
def test_every_role_has_the_vectors_of_sentence_transformers(make_encoder, tmp_path, kind):
    """Some expansion tokens read nothing in ModernBERT's window of 6 tokens."""
    mask = MultiVectorMask(skiplist_words=[*",!?.", "no such token"])
    oracle = save(
        make_encoder(kind),
        tmp_path / "saved",
        mask=mask,
        document_length=14,
        query_expansion=EXPANSION,
    )

    check(tmp_path / "saved", oracle)


@pytest.mark.parametrize(
    "transformer, mask",
    [
        ({}, {}),
        ({"query_expansion": {**EXPANSION, "attend": True}}, {}),
        ({"query_expansion": {**EXPANSION, "strategy": "min", "length": 12}}, {}),
        ({"query_expansion": {"strategy": "min", "length": 9}, "query_length": 20}, {}),
        ({"query_expansion": {**EXPANSION, "token": "cat"}, "document_length": 7}, {}),
        ({"query_length": 6}, {"skiplist_words": ["the", "a"], "skiplist_tasks": ["query"]}),
        (
            {"query_expansion": EXPANSION},
            {"skiplist_words": ["cat", "[MASK]", "[UNK]"], "skiplist_tasks": list(ROLES[:2])},
        ),
    ],
    ids=str,
)
def test_settings_are_those_of_sentence_transformers(make_encoder, tmp_path, transformer, mask):
    oracle = save(
        make_encoder("BertModel"), tmp_path / "saved", mask=MultiVectorMask(**mask), **transformer
    )

    check(tmp_path / "saved", oracle)


def test_layers_and_prompts_are_those_of_sentence_transformers(make_encoder, tmp_path):
    """Several layers with biases and activations, or none; and a default prompt without a role."""
    for name, widths in (("three", (12, 7, 5)), ("none", ())):
        save(make_encoder("BertModel"), tmp_path / name, widths=widths)
        set_fields(
            tmp_path / name, "config_sentence_transformers.json", default_prompt_name="other"
        )
        oracle = MultiVectorEncoder(str(tmp_path / name), device="cpu")

        check(tmp_path / name, oracle)

    with Encoder.from_pretrained(tmp_path / "none", dtype="fp32", threads=1) as encoder:
        [named] = encoder.token_embed(["a"], prompt_name="other")
        expected = oracle.encode("a", prompt_name="other", convert_to_numpy=True)
        assert_close(named, expected, roundings=encoder_roundings(tmp_path / "none"))
        with refused_request(
            "prompt_name is 'passage'; this model has the prompts: document, other, query"
        ):
            encoder.token_embed(["a"], prompt_name="passage")


@pytest.fixture
def saved(make_encoder, tmp_path):
    """Return a checkpoint of MultiVectorEncoder that a test may change."""
    folder = tmp_path / "saved"
    save(make_encoder("BertModel"), folder, query_expansion=EXPANSION, mask=MultiVectorMask(["?"]))
    return folder


def test_bf16_has_the_directions_of_fp32(saved):
    oracle = MultiVectorEncoder(str(saved), device="cpu")
    with Encoder.from_pretrained(saved, dtype="bf16", threads=1) as encoder:
        for role in ROLES:
            actual = encoder.token_embed(TEXTS, prompt_name=role)
            for ours, theirs in zip(actual, vectors_of(oracle, TEXTS, role), strict=True):
                assert (ours * theirs).sum(axis=1).min() > 0.999


@pytest.mark.parametrize("execution", ["packed", "padded"])
def test_texts_of_all_roles_share_a_batch(saved, execution):
    oracle = MultiVectorEncoder(str(saved), device="cpu")
    config = EngineConfig(dtype="fp32", threads=1, execution=execution)
    runner = Runner(Checkpoint.open(saved), config)
    service = Service.load(EncoderParts, saved, config, Stats())
    text = "the river? a cat?"
    prompts = [
        service.intake.texts([text], truncate=False, prefix=TextPrefix(role))[0]
        for role in (*ROLES, *ROLES)
    ]
    service.close()

    actual = runner.run(prompts, [RequestOptions(normalize=True)] * len(prompts))

    for role, got in zip((*ROLES, *ROLES), actual, strict=True):
        [right] = vectors_of(oracle, [text], role)
        assert_close(got, right, roundings=encoder_roundings(saved) + 100)


def test_the_response_cache_tells_roles_apart(saved):
    """Without prompts, a document with masks has the tokens of a shorter query."""
    set_fields(saved, "config_sentence_transformers.json", prompts={})
    set_fields(saved, "sentence_bert_config.json", query_expansion={"strategy": "min", "length": 9})
    texts = ["cat? [MASK] [MASK]", "cat?", "cat? cat? cat? cat?"]
    with Encoder.from_pretrained(saved, dtype="fp32", threads=1) as encoder:
        expected = [encoder.token_embed(texts, prompt_name=role) for role in ROLES]
    with Encoder.from_pretrained(
        saved, dtype="fp32", threads=1, response_cache_bytes=1 << 20
    ) as encoder:
        for _ in range(2):
            for role, rows in zip(ROLES, expected, strict=True):
                for got, right in zip(
                    encoder.token_embed(texts, prompt_name=role), rows, strict=True
                ):
                    assert_close(got, right, roundings=encoder_roundings(saved))


def test_token_ids_are_those_of_a_text_without_a_role(saved):
    oracle = MultiVectorEncoder(str(saved), device="cpu")
    ids = oracle.tokenizer(TEXTS)["input_ids"]
    with Encoder.from_pretrained(saved, dtype="fp32", threads=1) as encoder:
        for ours, theirs in zip(
            encoder.token_embed(ids), vectors_of(oracle, TEXTS, None), strict=True
        ):
            assert_close(ours, theirs, roundings=encoder_roundings(saved) + 100)


def test_added_tokens_have_the_first_type_in_a_pair(saved):
    """Prompts are put before single texts alone, and before pairs in sentence-transformers."""
    set_fields(saved, "config_sentence_transformers.json", prompts={})
    names = ["input_ids", "token_type_ids", "attention_mask"]
    set_fields(saved, "tokenizer_config.json", model_input_names=names)
    oracle = MultiVectorEncoder(str(saved), device="cpu")
    with Encoder.from_pretrained(saved, dtype="fp32", threads=1) as encoder:
        [ours] = encoder.token_embed([("the cat?", "a river")], prompt_name="query")
    [theirs] = oracle.encode_query([("the cat?", "a river")], convert_to_numpy=True)
    assert_close(ours, theirs, roundings=encoder_roundings(saved) + 100)


def test_a_text_of_skipped_tokens_alone_has_no_vectors(saved):
    ids = MultiVectorEncoder(str(saved), device="cpu").tokenizer(["?", "cat?"])["input_ids"]
    with Encoder.from_pretrained(
        saved, dtype="fp32", threads=1, response_cache_bytes=1 << 20
    ) as encoder:
        for _ in range(2):
            shapes = [each.shape for each in encoder.token_embed([ids[0][1:-1], ids[1]])]
            assert shapes == [(0, 8), (3, 8)]


def test_a_text_longer_than_its_role_allows_is_refused_unless_cut(saved):
    set_fields(saved, "sentence_bert_config.json", document_length=6)
    with Encoder.from_pretrained(saved, dtype="fp32", threads=1) as encoder:
        for role, most in (("query", 26), ("document", 6), (None, 60)):
            text = "cat " * (most - 1)
            with refused_request(f"this model takes at most {most} (truncate=true cuts it)"):
                encoder.token_embed([text], prompt_name=role)
            assert len(encoder.token_embed([text], prompt_name=role, truncate=True)[0]) == most


def test_a_longer_role_makes_no_other_text_longer_but_the_setting_does(make_encoder, tmp_path):
    folder, text = tmp_path / "saved", "cat " * 60
    save(make_encoder("BertModel"), folder, query_length=50)
    set_fields(folder, TRANSFORMER, max_seq_length=20)
    oracle = MultiVectorEncoder(str(folder), device="cpu")

    for setting, longest in ((None, 20), (55, 55)):
        with Encoder.from_pretrained(
            folder, dtype="fp32", threads=1, max_sequence_tokens=setting
        ) as encoder:
            for role, most in (("query", 50), ("document", longest), (None, longest)):
                [ours] = encoder.token_embed([text], prompt_name=role, truncate=True)
                assert len(ours) == most
                if setting is None:
                    assert len(vectors_of(oracle, [text], role)[0]) == most


@pytest.mark.parametrize(
    "fields",
    [
        {"query_length": 20, "document_length": 30},
        {"attend_to_expansion_tokens": True, "skiplist_words": ["cat", "."], "document_length": 9},
        {"do_query_expansion": False, "query_length": 5, "skiplist_words": []},
        {"query_prefix": "river", "prompts": {"query": "the ", "document": "[Q] cat "}},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_type", [True, False], ids=["", "before types"])
def test_models_of_pylate_are_served(make_encoder, tmp_path, fields, has_type):
    """Their prefixes are single tokens: one that was added, and one of the vocabulary."""
    folder = tmp_path / "saved"
    save(make_encoder("BertModel", vocab_size=100), folder, prompts=None)
    tokenizer = HuggingFaceTokenizer.from_file(str(folder / "tokenizer.json"))
    # a normalized token never matches a lowercased text
    tokenizer.add_tokens([AddedToken("[Q] ", normalized=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    modules = [module("Transformer"), {**module("Dense", "1_Dense"), "type": PYLATE_DENSE}]
    write_file(folder, "modules.json", modules)
    drop_field(folder, "1_Dense/config.json", "module_input_name")
    drop_field(folder, "1_Dense/config.json", "module_output_name")
    write_file(folder, "sentence_bert_config.json", {"max_seq_length": 29, "do_lower_case": False})
    model = {"query_prefix": "[Q] ", "document_prefix": "##9 ", "prompts": {}, **fields}
    model |= {"model_type": "ColBERT"} if has_type else {}
    write_file(folder, "config_sentence_transformers.json", model)

    check(folder, MultiVectorEncoder(str(folder), device="cpu"))

    # a length in the file of the other form
    set_fields(folder, TRANSFORMER, query_length=20)
    with refused("query_length"):
        Encoder.from_pretrained(folder)


MODEL, TRANSFORMER = "config_sentence_transformers.json", "sentence_bert_config.json"
MASK = "2_MultiVectorMask/config.json"


@pytest.mark.parametrize(
    "name, fields, message",
    [
        (MASK, {"keep_only_token_ids": [7]}, "has keep_only_token_ids [7]; allowed: null"),
        (MASK, {"skiplist_tasks": ["passage"]}, "allowed: a list of query, document"),
        (MASK, {"skiplist_words": "the"}, 'has skiplist_words "the"; allowed: a list of strings'),
        (TRANSFORMER, {"query_expansion": 32}, "has query_expansion 32; allowed: an object"),
        (TRANSFORMER, {"query_expansion": {"strategy": "fixed"}}, "length None; allowed: whole"),
        (
            TRANSFORMER,
            {"query_expansion": {"strategy": "longest", "length": 9}},
            'strategy "longest"; allowed: fixed, min',
        ),
        (
            TRANSFORMER,
            {"query_expansion": {"strategy": "min", "length": 9, "side": "left"}},
            'has the field "side" ("left"), which this version does not know',
        ),
        (TRANSFORMER, {"query_length": 20}, "query_length 20 and queries expanded to 26"),
        (TRANSFORMER, {"document_length": 0}, "document_length 0; allowed: whole numbers from 1"),
        ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, '"token_embeddings"'),
        (MODEL, {"query_prefix": "[Q] "}, 'has the field "query_prefix" ("[Q] ")'),
        ("config.json", {"architectures": ["HF_ColBERT"]}, "save_pretrained(NEW_FOLDER)"),
    ],
)
def test_refuses_what_it_does_not_serve(saved, name, fields, message):
    set_fields(saved, name, **fields)

    with refused(message):
        Checkpoint.open(saved)


@pytest.mark.parametrize(
    "kinds, fields, message",
    [
        (["Transformer", "Dense"], {}, "the modules Transformer, Dense; allowed with a vector for"),
        (["Transformer", "MultiVectorMask", "MultiVectorMask"], {}, "and MultiVectorMask once"),
        (["Transformer", "Normalize", "Dense", "MultiVectorMask"], {}, "Normalize or none, and"),
        (["Transformer", "MultiVectorMask", "TokenPooling"], {}, 'a module "TokenPooling"'),
        (
            ["Transformer", "MultiVectorMask"],
            {"model_type": "ColBERT"},
            "allowed with a vector for each token: Transformer, Dense any number of times",
        ),
        (["Transformer", "MultiVectorMask"], {"model_type": "SentenceTransformer"}, "modules"),
    ],
    ids=str,
)
def test_refuses_modules_in_another_order(saved, kinds, fields, message):
    write_file(saved, "modules.json", [module(kind) for kind in kinds])
    set_fields(saved, MODEL, **fields)

    with refused(message):
        Checkpoint.open(saved)


def test_tasks_are_those_of_a_model_with_a_vector_for_each_token(saved, small_bert):
    assert Checkpoint.open(saved).tasks == ("token_embed", "hidden")
    assert "token_embed" not in Checkpoint.open(small_bert).tasks
    with refused("with a vector for each token; allowed: token_embed, hidden"):
        Checkpoint.open(saved).check_task("embed")
    with refused('task "token_embed" needs a model with a vector for each token'):
        Checkpoint.open(small_bert).check_task("token_embed")


def test_deberta_has_no_tokens_that_others_do_not_read(make_encoder, tmp_path):
    """Its mask hides them as queries too: they would get the mean of all values."""
    folder = make_encoder("DebertaV2Model")
    save(folder, tmp_path / "hidden", query_expansion=EXPANSION)
    oracle = save(folder, tmp_path / "read", query_expansion={**EXPANSION, "attend": True})

    with refused('which model_type "deberta-v2" does not know; allowed: attend true'):
        Checkpoint.open(tmp_path / "hidden").check_task("token_embed")
    check(tmp_path / "read", oracle, roles=["query"])


def test_expanded_queries_need_a_token_and_enough_room(saved):
    with refused_setting("queries of this checkpoint are expanded to 26 tokens; this model takes"):
        Encoder.from_pretrained(saved, max_sequence_tokens=25)
    expansion = {**EXPANSION, "token": "[QUERY]"}
    set_fields(saved, TRANSFORMER, query_expansion=expansion)
    with refused("expanded by the token [QUERY], which tokenizer.json does not have"):
        Encoder.from_pretrained(saved)
    set_fields(saved, TRANSFORMER, query_expansion=EXPANSION)
    set_fields(saved, "tokenizer_config.json", mask_token="[none]")
    with refused("has no token [none], which the expansion of queries needs"):
        Encoder.from_pretrained(saved)


@pytest.mark.parametrize("kind, padding", [("RobertaModel", "z"), ("MPNetModel", "[UNK]")])
def test_queries_are_not_expanded_by_a_token_without_a_position(
    make_checkpoint, tmp_path, kind, padding
):
    """The padding token of MPNet has the id 1, whatever config.json says."""
    pad = (*SPECIAL_TOKENS, *LETTERS).index(padding)
    folder = make_checkpoint(kind, pad_token_id=pad)
    write_file(folder, "tokenizer_config.json", TOKENIZER)
    expansion = {**EXPANSION, "attend": True, "token": padding}
    save(folder, tmp_path / "saved", query_expansion=expansion)

    with refused(f"queries are expanded by the padding token, {pad}, which is no position"):
        Encoder.from_pretrained(tmp_path / "saved")
    expansion["token"] = "river"
    set_fields(tmp_path / "saved", TRANSFORMER, query_expansion=expansion)
    check(tmp_path / "saved", MultiVectorEncoder(str(tmp_path / "saved"), device="cpu"))


def test_the_token_of_expanded_queries_is_one_of_the_model(saved):
    """It may be past the end of the model's table of tokens."""
    tokenizer = HuggingFaceTokenizer.from_file(str(saved / "tokenizer.json"))
    tokenizer.add_tokens([f"more{number}" for number in range(100)])
    tokenizer.save(str(saved / "tokenizer.json"))
    set_fields(saved, TRANSFORMER, query_expansion={**EXPANSION, "token": "more99"})

    with refused("of tokenizer.json; config.json has vocab_size"):
        Encoder.from_pretrained(saved)


def test_the_form_of_the_first_release_is_served_once_converted(make_encoder, tmp_path):
    """The refusal names the command; markers of roles stay single tokens."""
    folder = make_encoder("BertModel", words=[*LETTERS, "[unused0]", "[unused1]"])
    set_fields(folder, "config.json", architectures=["HF_ColBERT"])
    write_file(folder, "artifact.metadata", {"query_maxlen": 16, "doc_maxlen": 20})

    def add_projection(tensors):
        inner = {f"bert.{name}": tensors.pop(name) for name in list(tensors)}
        tensors |= inner | {"linear.weight": torch.randn(8, 24)}

    change_tensors(folder, add_projection)
    oracle = MultiVectorEncoder(str(folder), device="cpu")

    oracle.save_pretrained(str(tmp_path / "saved"), create_model_card=False)

    with refused("MultiVectorEncoder(FOLDER).save_pretrained(NEW_FOLDER)"):
        Checkpoint.open(folder)
    check(tmp_path / "saved", oracle)
