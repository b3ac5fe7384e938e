"""Files of a decoder's tokenizer, generation_config.json and chat templates."""

import json
import shutil

import pytest
from transformers import AutoTokenizer, GenerationConfig

from tests.checkpoints import END_OF_TEXT, set_fields, write_file
from varlen.intake.tokenization import Tokenizer
from varlen.models.checkpoint import generation_config
from varlen.models.checkpoint_folder import Checkpoint

from ..refusals import refused_checkpoint as refused

CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
TEXTS = ["the cat", " the cat", "thé  cat\n\n", "河 1234"]


@pytest.fixture(scope="module")
def small_decoder(make_checkpoint):
    """Return a shared checkpoint that tests must not change."""
    return make_checkpoint("Qwen3ForCausalLM")


@pytest.fixture
def decoder(small_decoder, tmp_path):
    """Return a copy that a test may change."""
    return shutil.copytree(small_decoder, tmp_path / "copy")


def template(*pieces):
    """Return a post-processor in which "$A" stands for the text."""
    parts = [
        {"Sequence": {"id": "A", "type_id": 0}}
        if piece == "$A"
        else {"SpecialToken": {"id": piece, "type_id": 0}}
        for piece in pieces
    ]
    token = {"id": END_OF_TEXT, "ids": [0], "tokens": [END_OF_TEXT]}
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": pair,
        "special_tokens": {END_OF_TEXT: token},
    }


def byte_level(*, space):
    return {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": True}


def our_ids(folder):
    prompts = Tokenizer(folder, 64).encode(TEXTS, truncate=False)
    return [prompt.token_ids.tolist() for prompt in prompts]


@pytest.mark.parametrize("post_processor", [None, template(END_OF_TEXT, "$A"), template("$A")])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "GPT2TokenizerFast"])
def test_gives_the_token_ids_of_transformers(decoder, name, post_processor):
    set_fields(decoder, CONFIG, tokenizer_class=name, bos_token=END_OF_TEXT)
    set_fields(decoder, "tokenizer.json", post_processor=post_processor)
    Checkpoint.open(decoder)

    assert our_ids(decoder) == AutoTokenizer.from_pretrained(decoder)(TEXTS)["input_ids"]


def test_transformers_puts_a_space_where_it_is_asked_to(decoder):
    """The reason to refuse a disagreement: only tokenizer.json gives other token ids."""
    set_fields(decoder, CONFIG, tokenizer_class="Qwen2Tokenizer", add_prefix_space=True)

    assert our_ids(decoder) != AutoTokenizer.from_pretrained(decoder)(TEXTS)["input_ids"]


BOS = {"bos_token": END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast"}
EOS = {"eos_token": {"content": END_OF_TEXT}, "tokenizer_class": "PreTrainedTokenizerFast"}
FIRST, LAST = template(END_OF_TEXT, "$A"), template("$A", END_OF_TEXT)


@pytest.mark.parametrize(
    "fields, tokenizer, message",
    [
        (
            {**BOS, "add_bos_token": True},
            {},
            f'has add_bos_token true, and tokenizer.json adds [] there, not "{END_OF_TEXT}"',
        ),
        (
            {**BOS, "add_bos_token": False},
            {"post_processor": FIRST},
            f'has add_bos_token false, and tokenizer.json adds ["{END_OF_TEXT}"] there',
        ),
        ({**BOS, "add_bos_token": True}, {"post_processor": LAST}, "has add_bos_token true"),
        ({**EOS, "add_eos_token": True}, {}, "has add_eos_token true, and tokenizer.json adds []"),
        ({**EOS, "add_eos_token": False}, {"post_processor": LAST}, "has add_eos_token false"),
        (
            {"add_prefix_space": True},
            {},
            "has add_prefix_space true, and tokenizer.json does not add a space",
        ),
        (
            {"tokenizer_class": "GPT2Tokenizer"},
            {"pre_tokenizer": byte_level(space=True)},
            "has add_prefix_space false (its default), and tokenizer.json adds a space",
        ),
        (
            {},
            {"pre_tokenizer": byte_level(space=True)},
            "has add_prefix_space false (its default)",
        ),
        (
            {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
            {"normalizer": {"type": "Prepend", "prepend": "▁"}},
            "has add_prefix_space false, and tokenizer.json adds a space",
        ),
        (
            {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
            {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}},
            "has add_prefix_space false, and tokenizer.json adds a space",
        ),
    ],
)
def test_refuses_files_that_disagree(decoder, fields, tokenizer, message):
    set_fields(decoder, CONFIG, **fields)
    set_fields(decoder, "tokenizer.json", **tokenizer)

    with refused(message):
        Checkpoint.open(decoder)


@pytest.mark.parametrize(
    "fields, tokenizer",
    [
        ({**BOS, "add_bos_token": True}, {"post_processor": FIRST}),
        ({**BOS, "add_bos_token": False}, {"post_processor": LAST}),
        ({**EOS, "add_eos_token": True}, {"post_processor": LAST}),
        ({"add_bos_token": True, "bos_token": None}, {}),
        (
            {**BOS, "add_bos_token": True},
            {"post_processor": {"type": "Sequence", "processors": [byte_level(space=True), FIRST]}},
        ),
        ({"add_prefix_space": True}, {"pre_tokenizer": byte_level(space=True)}),
        ({"tokenizer_class": "LlamaTokenizer"}, {"pre_tokenizer": byte_level(space=True)}),
        (
            {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
            {"pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "never"}},
        ),
    ],
)
def test_takes_files_that_agree(decoder, fields, tokenizer):
    set_fields(decoder, CONFIG, **fields)
    set_fields(decoder, "tokenizer.json", **tokenizer)

    assert Checkpoint.open(decoder).task == "generate"


def test_reads_a_chat_template_and_its_tokens(decoder):
    set_fields(decoder, CONFIG, chat_template="{{ messages }}", pad_token=None, **EOS)

    checkpoint = Checkpoint.open(decoder)

    assert checkpoint.chat_template == "{{ messages }}"
    assert checkpoint.special_tokens == {"eos_token": END_OF_TEXT}


def test_a_template_in_its_own_file_comes_first(decoder):
    set_fields(decoder, CONFIG, chat_template="old")
    write_file(decoder, "chat_template.jinja", "new ∀")
    assert Checkpoint.open(decoder).chat_template == "new ∀"
    (decoder / CONFIG).unlink()

    assert Checkpoint.open(decoder).chat_template == "new ∀"


def test_of_several_templates_the_default_counts(decoder):
    templates = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    set_fields(decoder, CONFIG, chat_template=templates)

    assert Checkpoint.open(decoder).chat_template == "b"
    assert Checkpoint.open(decoder).chat_templates == {"tools": "a", "default": "b"}


def test_templates_may_all_have_names(decoder):
    set_fields(decoder, CONFIG, chat_template=[{"name": "rag", "template": "a"}])

    assert Checkpoint.open(decoder).chat_templates == {"rag": "a"}
    assert Checkpoint.open(decoder).chat_template is None


def test_files_of_templates_replace_those_in_the_settings(decoder):
    (decoder / "additional_chat_templates").mkdir()
    (decoder / "additional_chat_templates" / "rag.jinja").write_text("b")
    set_fields(decoder, CONFIG, chat_template=[{"name": "default", "template": "old"}])
    assert Checkpoint.open(decoder).chat_templates == {"rag": "b"}
    (decoder / "chat_template.jinja").write_text("a")

    assert Checkpoint.open(decoder).chat_templates == {"default": "a", "rag": "b"}


def test_a_checkpoint_may_have_no_template(small_decoder):
    assert Checkpoint.open(small_decoder).chat_template is None


def test_refuses_a_template_that_is_not_text(decoder):
    set_fields(decoder, CONFIG, chat_template={"a": 1})
    with refused('tokenizer_config.json has chat_template {"a": 1}; allowed: a string'):
        Checkpoint.open(decoder)
    (decoder / "chat_template.jinja").write_bytes(b"\xff\xfe")

    with refused("chat_template.jinja is not text"):
        Checkpoint.open(decoder)


@pytest.mark.parametrize(
    "config, generation, expected",
    [
        ({"eos_token_id": 3}, {}, (3,)),
        ({"eos_token_id": 3}, {"eos_token_id": [5, 7]}, (5, 7)),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": None}, (3, 4)),
        ({"eos_token_id": None}, {}, ()),
    ],
)
def test_end_tokens_are_those_of_generation_config_first(decoder, config, generation, expected):
    set_fields(decoder, "config.json", **config)
    write_file(decoder, GENERATION, generation)

    assert Checkpoint.open(decoder).eos_token_ids == expected


def test_an_encoder_has_no_end_tokens(small_bert):
    assert Checkpoint.open(small_bert).eos_token_ids == ()


@pytest.mark.parametrize("value", ["</s>", -1, [3, None], True, 2.0])
def test_refuses_an_end_token_that_is_no_token_id(decoder, value):
    write_file(decoder, GENERATION, {"eos_token_id": value})

    with refused(f"generation_config.json has eos_token_id {value!r}; allowed: token ids"):
        Checkpoint.open(decoder)


def test_sampling_defaults_of_the_checkpoint_are_left_to_requests(decoder):
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    write_file(decoder, GENERATION, {**sampling, "max_new_tokens": 9, "pad_token_id": 0})

    Checkpoint.open(decoder).check_task("generate")


@pytest.mark.parametrize(
    "field, value",
    [
        ("suppress_tokens", [3]),
        ("begin_suppress_tokens", [3]),
        ("forced_bos_token_id", 3),
        ("forced_eos_token_id", 3),
        ("bad_words_ids", [[3]]),
        ("no_repeat_ngram_size", 2),
        ("sequence_bias", [[[3], -1.0]]),
        ("guidance_scale", 1.5),
        ("watermarking_config", {"bias": 2.5}),
        ("a_new_feature", 3),
    ],
)
def test_refuses_to_generate_where_the_checkpoint_changes_tokens(decoder, field, value):
    write_file(decoder, GENERATION, {field: value})
    checkpoint = Checkpoint.open(decoder)

    checkpoint.check_task("hidden")
    with refused(
        f"generation_config.json has {field if field != 'a_new_feature' else 'the field'}"
    ):
        checkpoint.check_task("generate")
    with refused("; leave it out of the file"):
        checkpoint.check_task("generate")


def test_knows_every_field_of_transformers_generation_config():
    known = (
        generation_config.REQUEST_FIELDS
        | generation_config.HARMLESS_FIELDS
        | generation_config.FIXED_FIELDS.keys()
    )
    parts = (generation_config.REQUEST_FIELDS, generation_config.HARMLESS_FIELDS)

    assert json.loads(GenerationConfig().to_json_string(use_diff=False)).keys() <= known
    assert len(known) == sum(map(len, parts)) + len(generation_config.FIXED_FIELDS)
