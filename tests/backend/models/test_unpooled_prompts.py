"""Prompts that pooling leaves out (include_prompt false) give the vectors of sentence-transformers."""

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer import modules

from tests.checkpoints import END_OF_TEXT, set_fields
from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen.config import EngineConfig
from varlen.errors import RequestError
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import RequestOptions
from varlen.request.row_parameters import TextPrefix
from varlen.service.one_shot import EncoderParts
from varlen.service.service import Service
from varlen.telemetry.metrics import Stats

from ..refusals import refused_checkpoint as refused

MODES = modules.Pooling.POOLING_MODES
# The tokens "ri" of a prompt are one with the start of "ver" behind it, so it has more tokens by itself.
PROMPTS = {"query": "the cat is: ", "document": "the river ", "none": "", "part": "a ri"}
INSTRUCTED = {"document": "", "web": "Instruct: the river\nQuery:", "other": "Instruct: a\nQuery: "}
TEXTS = ["the cat", "a", "river, the river! is it 42?", "ver", "vers 0123 the cat, the river"]
POOLING = "1_Pooling/config.json"
BYTE_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
}


def save(folder, target, *, pooling, more=(), prompts=PROMPTS, **tokenizer):
    """Save a checkpoint whose pooling leaves prompts out, and return it in sentence-transformers."""
    transformer = modules.Transformer(str(folder), processor_kwargs=tokenizer or None)
    pool = modules.Pooling(
        transformer.get_embedding_dimension(), pooling_mode=pooling, include_prompt=False
    )
    made = SentenceTransformer(modules=[transformer, pool, *more], prompts=prompts, device="cpu")
    made.save_pretrained(str(target), create_model_card=False)
    return SentenceTransformer(str(target), device="cpu")


def roundings_of(folder):
    return encoder_roundings(folder) + 100


@pytest.fixture
def saved(small_bert, tmp_path):
    """Return a checkpoint that normalizes its means, which a test may change."""
    save(small_bert, tmp_path / "saved", pooling="mean", more=[Normalize()])
    return tmp_path / "saved"


@pytest.mark.parametrize("pooling", ["mean", "lasttoken", MODES], ids=["mean", "last", "all"])
def test_every_pooling_leaves_prompts_out(small_bert, tmp_path, pooling):
    folder = tmp_path / "saved"
    made = save(small_bert, folder, pooling=pooling)

    with Encoder.from_pretrained(folder, dtype="fp32", threads=1) as encoder:
        for name in (*PROMPTS, None):
            expected = made.encode(TEXTS, prompt_name=name)
            actual = encoder.embed(TEXTS, prompt_name=name)
            alone = [encoder.embed([text], prompt_name=name)[0] for text in TEXTS]

            assert_close(actual, expected, roundings=roundings_of(folder))
            assert_close(alone, expected, roundings=roundings_of(folder))
        made.set_pooling_include_prompt(include_prompt=True)
        if pooling != "lasttoken":
            pooled = made.encode(TEXTS, prompt_name="query")
            assert abs(encoder.embed(TEXTS, prompt_name="query") - pooled).max() > 0.01


@pytest.mark.parametrize("limit", [4, 6, 20])
def test_a_cut_text_may_leave_nothing_but_its_prompt(small_bert, tmp_path, limit):
    """The prompt is cut too where it is counted; the last token is left."""
    folder = tmp_path / "saved"
    save(small_bert, folder, pooling=MODES)
    set_fields(folder, "sentence_bert_config.json", max_seq_length=limit)
    made = SentenceTransformer(str(folder), device="cpu")

    with Encoder.from_pretrained(folder, dtype="fp32", threads=1) as encoder:
        for name in PROMPTS:
            actual = encoder.embed(TEXTS, prompt_name=name, truncate=True)
            assert_close(
                actual, made.encode(TEXTS, prompt_name=name), roundings=roundings_of(folder)
            )


@pytest.mark.parametrize(
    "pooling, side, more",
    [
        (MODES, "right", ()),
        (MODES, "left", ()),
        ("mean", "left", (Normalize(),)),
        ("max", "left", (Normalize(),)),
    ],
    ids=["all", "padded left", "mean normalized", "max normalized"],
)
def test_a_decoder_without_a_token_at_the_end_of_texts(
    make_checkpoint, tmp_path, pooling, side, more
):
    """No token is left of a cut text: zeros, the first token, or -inf."""
    folder, base = tmp_path / "saved", make_checkpoint("Qwen3Model")
    set_fields(base, "tokenizer_config.json", **BYTE_TOKENIZER)
    save(base, folder, pooling=pooling, more=more, padding_side=side)

    for limit in (5, 300):
        set_fields(folder, "sentence_bert_config.json", max_seq_length=limit)
        made = SentenceTransformer(str(folder), device="cpu")
        # where no token is left, the first one of a padded text is padding
        size = 1 if limit == 5 else 32
        with Encoder.from_pretrained(folder, dtype="fp32", threads=1) as encoder:
            for name in PROMPTS:
                expected = made.encode(TEXTS, prompt_name=name, batch_size=size)
                actual = encoder.embed(TEXTS, prompt_name=name, truncate=True)
                assert_close(actual, expected, roundings=roundings_of(folder))


@pytest.mark.parametrize(
    "ending", [END_OF_TEXT, f"{END_OF_TEXT} ", f"{END_OF_TEXT}{END_OF_TEXT}"], ids=repr
)
def test_a_special_token_at_the_end_of_a_prompt_is_pooled(make_checkpoint, tmp_path, ending):
    """It is taken for one that the tokenizer adds to every text."""
    folder, base = tmp_path / "saved", make_checkpoint("Qwen3Model")
    set_fields(base, "tokenizer_config.json", **BYTE_TOKENIZER)
    save(base, folder, pooling="mean")
    set_fields(folder, "config_sentence_transformers.json", prompts={"query": f"cat{ending}"})
    made = SentenceTransformer(str(folder), device="cpu")

    with Encoder.from_pretrained(folder, dtype="fp32", threads=1) as encoder:
        actual = encoder.embed(TEXTS, prompt_name="query")

    expected = made.encode(TEXTS, prompt_name="query")
    assert_close(actual, expected, roundings=roundings_of(folder))


def test_an_instructor_model_is_served(make_checkpoint, tmp_path):
    """It is the encoder of a T5 with a Dense module behind the mean."""
    folder, base = tmp_path / "saved", make_checkpoint("T5EncoderModel")
    set_fields(base, "tokenizer_config.json", **BYTE_TOKENIZER)
    dense = Dense(36, 12, bias=False, activation_function=torch.nn.Identity())
    made = save(base, folder, pooling="mean", more=[dense, Normalize()])
    set_fields(folder, "config_sentence_transformers.json", default_prompt_name="query")

    with Encoder.from_pretrained(folder, dtype="fp32", threads=1) as encoder:
        actual = encoder.embed(TEXTS)

    expected = made.encode(TEXTS, prompt_name="query")
    assert_close(actual, expected, roundings=roundings_of(folder))


def test_bf16_has_the_directions_of_fp32(saved):
    made = SentenceTransformer(str(saved), device="cpu")
    with Encoder.from_pretrained(saved, dtype="bf16", threads=1) as encoder:
        for name in ("query", "document", "none"):
            actual = encoder.embed(TEXTS, prompt_name=name)
            assert (actual * made.encode(TEXTS, prompt_name=name)).sum(axis=1).min() > 0.999
        made.set_pooling_include_prompt(include_prompt=True)
        pooled = made.encode(TEXTS, prompt_name="query")
        assert (encoder.embed(TEXTS, prompt_name="query") * pooled).sum(axis=1).min() < 0.99


@pytest.mark.parametrize("execution", ["packed", "padded"])
def test_texts_of_all_prompts_share_a_batch(saved, execution):
    made = SentenceTransformer(str(saved), device="cpu")
    config = EngineConfig(dtype="fp32", threads=1, execution=execution)
    runner = Runner(Checkpoint.open(saved), config)
    service = Service.load(EncoderParts, saved, config, Stats())
    wanted = [(text, name) for text in TEXTS for name in PROMPTS]
    prompts = [
        service.intake.texts([text], truncate=False, prefix=TextPrefix(name))[0]
        for text, name in wanted
    ]
    service.close()

    actual = runner.run(prompts, [RequestOptions(normalize=True)] * len(prompts))

    expected = [made.encode(text, prompt_name=name) for text, name in wanted]
    assert_close(actual, expected, roundings=roundings_of(saved))


def test_token_ids_and_pairs_have_no_prompt(saved):
    set_fields(saved, "config_sentence_transformers.json", default_prompt_name="query")
    made = SentenceTransformer(str(saved), device="cpu")
    ids = made.tokenizer([PROMPTS["query"] + text for text in TEXTS])["input_ids"]
    pair = ("the cat", "a river")

    with Encoder.from_pretrained(
        saved, dtype="fp32", threads=1, response_cache_bytes=1 << 20
    ) as encoder:
        # the second time, from the cache, which holds the same tokens with a prompt too
        for _ in range(2):
            texts, rows, pairs = encoder.embed(TEXTS), encoder.embed(ids), encoder.embed([pair])

    expected = made.encode(TEXTS)
    assert_close(texts, expected, roundings=roundings_of(saved))
    assert_close(pairs, made.encode([pair], prompt=""), roundings=roundings_of(saved))
    made.set_pooling_include_prompt(include_prompt=True)
    assert_close(rows, made.encode(TEXTS), roundings=roundings_of(saved))


def test_a_model_without_prompts_has_the_program_of_any_other(saved):
    assert not Checkpoint.open(saved).pools_prompt
    set_fields(saved, "config_sentence_transformers.json", prompts={"query": "", "document": None})

    assert Checkpoint.open(saved).pools_prompt
    runner = Runner(Checkpoint.open(saved), EngineConfig(dtype="fp32", threads=1))
    assert "unpooled_lengths" not in {value.name for value in runner.program.inputs}


@pytest.mark.parametrize("value", [None, 0, "false"], ids=repr)
def test_include_prompt_is_true_or_false(saved, value):
    set_fields(saved, POOLING, include_prompt=value)

    with refused(f"{POOLING} has include_prompt"):
        Checkpoint.open(saved)


def test_prompts_and_instructions_of_requests_give_the_vectors_of_sentence_transformers(
    small_bert, tmp_path
):
    folder = tmp_path / "saved"
    made = save(small_bert, folder, pooling="mean", prompts=INSTRUCTED)

    with Encoder.from_pretrained(folder, dtype="fp32", threads=1) as encoder:
        for options, prompt in (
            ({"prompt": "the cat: "}, "the cat: "),
            ({"prompt": ""}, ""),
            # the first prompt of the form
            ({"instruction": "find 42"}, "Instruct: find 42\nQuery:"),
            ({"instruction": "find 42", "prompt_name": "other"}, "Instruct: find 42\nQuery: "),
        ):
            expected = made.encode(TEXTS, prompt=prompt)
            actual = encoder.embed(TEXTS, **options)

            assert_close(actual, expected, roundings=roundings_of(folder))
        for options, message in (
            ({"instruction": "a", "prompt_name": "document"}, "has not the form"),
            ({"instruction": "a", "prompt": "b"}, "both instruction and prompt; send one"),
            ({"prompt": "a", "prompt_name": "web"}, "both prompt_name and prompt; send one"),
        ):
            with pytest.raises(RequestError, match=message):
                encoder.embed(TEXTS, **options)
        with pytest.raises(RequestError, match="the request has instruction and input_ids"):
            encoder.embed([[2, 5, 3]], instruction="a")
