"""Generation parameters: every value is checked, and an error names it and what is allowed."""

import json
import math
from pathlib import Path

import pytest

from tests.backend.refusals import refused_request as refused
from varlen.request.foreign_options import FOREIGN_OPTIONS
from varlen.request.generation import OPTION_NAMES, GenerationOptions

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
DOCS = Path(__file__).parents[3] / "docs"


def options_of(**parameters):
    return GenerationOptions.from_parameters(parameters)


def test_no_parameters_are_the_defaults():
    assert options_of() == GenerationOptions()


def test_null_is_the_default():
    assert (
        options_of(temperature=None, stop=None, seed=None, structured_outputs=None) == options_of()
    )


def test_every_parameter_of_the_contract_is_read():
    values = {
        "max_tokens": 7,
        "min_tokens": 2,
        "n": 3,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "seed": 11,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 4,
    }

    options = options_of(**values, stop=["a", "b"], stop_token_ids=[1, 2])

    assert {name: getattr(options, name) for name in values} == values
    assert options.stop == ("a", "b")
    assert options.stop_token_ids == (1, 2)


def test_numbers_and_flags_may_be_strings():
    # as NVIDIA's example client of vLLM sends them
    options = options_of(temperature="0.1", top_p="0.95", max_tokens="100", ignore_eos="True")

    assert options == GenerationOptions(
        temperature=0.1, top_p=0.95, max_tokens=100, ignore_eos=True
    )


def test_a_whole_number_may_have_a_decimal_point():
    assert options_of(max_tokens=16.0) == options_of(max_tokens=16)


def test_one_stop_string_needs_no_list():
    assert options_of(stop="end").stop == ("end",)


@pytest.mark.parametrize("value", [0, -1])
def test_top_k_can_be_turned_off(value):
    assert options_of(top_k=value).top_k == 0


def test_seed_minus_one_is_no_seed():
    assert options_of(seed=-1).seed is None


def test_seeds_of_64_bits_signed_or_not_are_accepted():
    assert options_of(seed=2**64 - 1).seed == 2**64 - 1
    assert options_of(seed=-(2**63)).seed == -(2**63)


@pytest.mark.parametrize("sent, used", [(1e-9, 0.0), (0.001, 0.01), (0.01, 0.01), (0, 0)])
def test_a_tiny_temperature_is_raised_or_greedy(sent, used):
    assert options_of(temperature=sent).temperature == used


@pytest.mark.parametrize("sent, used", [(False, None), (True, 1)])
def test_logprobs_may_be_the_flag_of_a_chat(sent, used):
    assert options_of(logprobs=sent).logprobs == used


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("temperature", -0.1, "temperature is -0.1; allowed: numbers from 0 to 100000"),
        ("temperature", 2e5, "temperature is 200000.0; allowed: numbers from 0 to 100000"),
        ("temperature", math.nan, "temperature is NaN; allowed: numbers from 0 to 100000"),
        ("temperature", math.inf, "temperature is Infinity; allowed"),
        ("temperature", "1e999", "temperature is Infinity; allowed"),
        ("temperature", "nan", 'temperature is "nan"; allowed'),
        ("temperature", "hot", 'temperature is "hot"; allowed'),
        ("temperature", True, "temperature is true; allowed: numbers from 0 to 100000"),
        ("temperature", [1], "temperature is [1]; allowed"),
        ("top_p", 0, "top_p is 0; allowed: numbers above 0, up to 1"),
        ("top_p", 1.5, "top_p is 1.5; allowed: numbers above 0, up to 1"),
        ("top_k", -2, "top_k is -2; allowed: whole numbers from -1 to 2147483647"),
        ("top_k", 1.5, "top_k is 1.5; allowed: whole numbers"),
        ("min_p", 2, "min_p is 2; allowed: numbers from 0 to 1"),
        ("repetition_penalty", 0, "repetition_penalty is 0; allowed: numbers from 0.01 to 100"),
        ("presence_penalty", 3, "presence_penalty is 3; allowed: numbers from -2 to 2"),
        ("frequency_penalty", -3, "frequency_penalty is -3; allowed: numbers from -2 to 2"),
        ("max_tokens", 0, "max_tokens is 0; allowed: whole numbers from 1 to 2147483647"),
        ("max_tokens", True, "max_tokens is true; allowed: whole numbers"),
        ("max_tokens", "9" * 30, "max_tokens is "),
        ("min_tokens", -1, "min_tokens is -1; allowed: whole numbers from 0"),
        ("min_tokens", 17, "min_tokens is 17; allowed: up to max_tokens, 16"),
        ("n", 0, "n is 0; allowed: whole numbers from 1 to 64"),
        ("n", 65, "n is 65; allowed: whole numbers from 1 to 64"),
        ("seed", 2**64, "seed is 18446744073709551616; allowed: whole numbers from"),
        ("logprobs", 21, "logprobs is 21; allowed: whole numbers from 0 to 20"),
        ("ignore_eos", 1, "ignore_eos is 1; allowed: true, false"),
        ("ignore_eos", "yes", 'ignore_eos is "yes"; allowed: true, false'),
        ("stop", 5, "stop is 5; allowed: a string, or a list of strings"),
        ("stop", ["a", 5], 'stop is ["a", 5]; allowed: a string, or a list of strings'),
        ("stop", [""], "stop has a string of 0 characters; allowed: 1 to 256"),
        ("stop", "x" * 257, "stop has a string of 257 characters; allowed: 1 to 256"),
        ("stop", ["x"] * 17, "stop has 17 strings; allowed: up to 16"),
        ("stop_token_ids", 5, "stop_token_ids is 5; allowed: a list of whole numbers from 0"),
        ("stop_token_ids", [True], "stop_token_ids is [true]; allowed: a list"),
        ("stop_token_ids", [-1], "stop_token_ids is [-1]; allowed: a list"),
        ("stop_token_ids", [1] * 257, "stop_token_ids has 257 tokens; allowed: up to 256"),
        ("best_of", 2, "best_of is 2; allowed: n, 1: all answers are sent"),
        (
            "use_beam_search",
            True,
            "use_beam_search is true; allowed: false; num_beams above 1 is beam search",
        ),
        ("num_beams", 0, "num_beams is 0; allowed: whole numbers from 1 to 32"),
        ("num_beams", 33, "num_beams is 33; allowed: whole numbers from 1 to 32"),
        ("length_penalty", math.nan, "length_penalty is NaN; allowed: numbers from -10 to 10"),
        ("early_stopping", 1, "early_stopping is 1; allowed: true, false, never"),
        ("early_stopping", "always", 'early_stopping is "always"; allowed: true, false, never'),
        ("length_penalty_type", "mean", 'length_penalty_type is "mean"; allowed: hf, gnmt'),
        ("diversity_type", [], "diversity_type is []; allowed: hamming, sibling"),
        (
            "no_repeat_ngram_size",
            129,
            "no_repeat_ngram_size is 129; allowed: whole numbers from 0 to 128",
        ),
        ("suppress_tokens", 5, "suppress_tokens is 5; allowed: a list of whole numbers from 0"),
        ("suppress_tokens", [1] * 1025, "suppress_tokens has 1025 tokens; allowed: up to 1024"),
        ("forced_bos_token_id", -1, "forced_bos_token_id is -1; allowed: whole numbers from 0"),
    ],
    ids=str,
)
def test_refuses_a_value_by_name(name, value, message):
    with refused(message):
        options_of(**{name: value})


def test_a_long_value_is_shortened_in_the_error():
    with refused("... (10002 characters)"):
        options_of(temperature="x" * 10_000)


def test_parameters_that_ask_for_nothing_are_accepted():
    assert options_of(best_of=1, detokenize=True, use_beam_search=False) == options_of()


@pytest.mark.parametrize("sent", [{"5": 1, "3": "-2.5"}, '{"5": 1, "3": -2.5}', {5: 1, 3: -2.5}])
def test_a_logit_bias_is_kept_by_token_id(sent):
    assert options_of(logit_bias=sent).logit_bias == ((3, -2.5), (5, 1))
    assert options_of(logit_bias={}) == options_of(logit_bias=None) == options_of()
    with refused("logit_bias has the token 3 twice; send it once"):
        options_of(logit_bias={"3": 1, 3: 1})


def test_one_bad_word_needs_no_list_and_an_empty_one_asks_for_nothing():
    assert options_of(bad_words="a b").bad_words == ("a b",)
    assert options_of(bad_words=["a", " b"]).bad_words == ("a", " b")
    assert options_of(bad_words="") == options_of(bad_words=[]) == options_of()


@pytest.mark.parametrize(
    "foreign, ours",
    [
        (
            {
                "stop_words": "",
                "bad_words": "",
                "pad_id": 2,
                "end_id": 2,
                "return_log_probs": False,
            },
            {"stop_token_ids": [2]},
        ),
        (
            {"stop_words": "a", "random_seed": "7", "runtime_top_k": 5, "runtime_top_p": 0.5},
            {"stop": "a", "seed": 7, "top_k": 5, "top_p": 0.5},
        ),
        (
            {"beam_width": 4, "len_penalty": 0.5, "beam_search_diversity_rate": 0.0},
            {"num_beams": 4, "length_penalty": 0.5},
        ),
        ({"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
        ({"guided_json": json.dumps(SCHEMA)}, {"structured_outputs": {"json": SCHEMA}}),
        ({"guided_regex": "a|b"}, {"structured_outputs": {"regex": "a|b"}}),
        ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"guided_choice": '["a", "b"]'}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"best_of": 3, "n": 3, "use_beam_search": False}, {"n": 3}),
        (
            {"max_new_tokens": 9, "min_new_tokens": 2, "num_return_sequences": 3},
            {"max_tokens": 9, "min_tokens": 2, "n": 3},
        ),
        (
            {
                "stop_sequences": ["a"],
                "eos_token_id": [4, 5],
                "typical_p": 1.0,
                "watermark": "False",
            },
            {"stop": ["a"], "stop_token_ids": [4, 5]},
        ),
        (
            {"stop": "a", "stop_sequences": ["a"], "truncate": False, "details": False},
            {"stop": "a"},
        ),
    ],
    ids=str,
)
def test_options_of_other_servers_become_ours(foreign, ours):
    assert options_of(**foreign) == options_of(**ours)


@pytest.mark.parametrize("name", FOREIGN_OPTIONS)
def test_each_option_of_another_server_is_ours_or_has_a_remedy(name):
    foreign = FOREIGN_OPTIONS[name]

    if foreign.option:
        assert {foreign.option} <= {*OPTION_NAMES}
        with refused("; allowed:"):
            options_of(**{name: [None]})
    else:
        with refused(foreign.remedy):
            options_of(**{name: "unlikely"})
    assert options_of(**{name: None}) == options_of()
    assert f"`{name}`" in (DOCS / "start/migration.md").read_text()


def test_biases_and_bad_words_go_with_a_search():
    options = options_of(num_beams=2, logit_bias={"3": 1}, bad_words="a")

    assert (options.logit_bias, options.bad_words) == (((3, 1),), ("a",))


def test_an_unknown_name_gets_a_hint():
    with refused('unknown parameter "temprature". Did you mean "temperature"? Allowed: '):
        options_of(temprature=1)
    with refused('unknown parameter "xyz". Allowed: '):
        options_of(xyz=1)


def test_a_grammar_has_to_come_as_structured_output():
    with refused("grammar is not served; send structured_outputs"):
        options_of(grammar="start: x")


def test_several_greedy_samples_are_refused():
    with refused("n is 2; allowed: 1 with temperature 0, as all samples would be equal"):
        options_of(n=2, temperature=0)


def test_in_process_options_are_checked_too():
    with refused("top_p is 7; allowed"):
        GenerationOptions(top_p=7)
    with refused('stop is "end"; allowed: a string, or a list of strings'):
        GenerationOptions(stop="end")
    with refused("stop is a set; allowed"):
        GenerationOptions(stop={"end"})
    with refused("logit_bias is {}; allowed: an object of numbers"):
        GenerationOptions(logit_bias={})
    with refused("bad_words is a set; allowed"):
        GenerationOptions(bad_words={"end"})


def test_options_of_beam_search_are_read():
    values = {
        "num_beams": 6,
        "length_penalty": -0.5,
        "length_penalty_type": "gnmt",
        "early_stopping": "never",
        "num_beam_groups": 3,
        "diversity_penalty": 0.5,
        "no_repeat_ngram_size": 3,
        "forced_bos_token_id": 4,
        "forced_eos_token_id": 2,
    }

    options = options_of(**values, suppress_tokens=[7, 8], begin_suppress_tokens=[])

    assert {name: getattr(options, name) for name in values} == values
    assert (options.suppress_tokens, options.begin_suppress_tokens) == ((7, 8), ())


@pytest.mark.parametrize("sent, used", [("True", True), (False, False), ("never", "never")])
def test_early_stopping_is_a_flag_or_a_word(sent, used):
    assert options_of(num_beams=2, early_stopping=sent).early_stopping == used


def test_the_number_of_answers_has_two_names():
    assert options_of(num_beams=4, num_return_sequences=3).n == 3
    assert options_of(num_return_sequences="3").n == 3
    assert options_of(n=2, num_return_sequences=2).n == 2
    with refused("the request has both n and num_return_sequences; send one"):
        options_of(n=2, num_return_sequences=3)


def test_beam_search_is_deterministic_with_temperature_0_too():
    assert options_of(num_beams=4, n=4, temperature=0).n == 4


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"n": 5}, "n is 5; allowed: up to num_beams, 4"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids has 65 tokens; allowed: up to 64"),
        ({"stop": "end"}, 'stop is ["end"]; allowed: [] in a beam search'),
        ({"logprobs": 0}, "logprobs is 0; allowed: null in a beam search"),
        ({"presence_penalty": 1}, "presence_penalty is 1; allowed: 0.0 in a beam search"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs cannot be combined with"),
        ({"temperature": 0.5}, "temperature is 0.5; allowed: 1.0 in a beam search, unless"),
        ({"top_p": 0.5, "temperature": 0}, "top_p is 0.5; allowed: 1.0 in a beam search"),
        ({"do_sample": True, "temperature": 0}, "temperature is 0; allowed: above 0 with"),
        (
            {"do_sample": True, "num_beam_groups": 2, "diversity_penalty": 1},
            "num_beam_groups is 2; allowed: 1 with do_sample",
        ),
        ({"num_beam_groups": 3}, "num_beam_groups is 3; allowed: divisors of num_beams, 4"),
        ({"num_beam_groups": 2}, "diversity_penalty is 0.0; allowed: above 0 with num_beam_groups"),
        ({"diversity_penalty": 2}, "diversity_penalty is 2; allowed: 0 without num_beam_groups"),
        ({"diversity_type": "sibling"}, "diversity_penalty is 0.0; allowed: above 0 with"),
        (
            {"diversity_type": "sibling", "diversity_penalty": 1, "num_beam_groups": 2},
            'num_beam_groups is 2; allowed: 1 with diversity_type "sibling"',
        ),
    ],
    ids=str,
)
def test_options_that_contradict_beam_search_are_refused(parameters, message):
    with refused(message):
        options_of(num_beams=4, **parameters)


@pytest.mark.parametrize(
    "name, value, default",
    [
        ("length_penalty", 0.5, "1.0"),
        ("length_penalty_type", "gnmt", '"hf"'),
        ("early_stopping", True, "false"),
        ("num_beam_groups", 2, "1"),
        ("diversity_penalty", 1, "0.0"),
    ],
)
def test_options_of_beam_search_need_beams(name, value, default):
    with refused(f"{name} is {json.dumps(value)}; allowed: {default} without num_beams above 1"):
        options_of(**{name: value})


@pytest.mark.parametrize(
    "option",
    [{"no_repeat_ngram_size": 2}, {"forced_bos_token_id": 2}, {"suppress_tokens": [2]}],
    ids=str,
)
def test_an_option_of_searches_makes_one_with_one_beam(option):
    assert options_of(**option, temperature=0).is_search
    with refused("temperature is 1.0; allowed: 0 in a beam search with one beam"):
        options_of(**option)
    with refused("do_sample is true; allowed: false in a beam search with one beam"):
        options_of(**option, do_sample=True)


def test_defaults_of_a_model_hold_where_the_request_says_nothing():
    defaults = {"num_beams": 4, "length_penalty": 0.5, "n": 2}

    assert GenerationOptions.from_parameters({}, defaults).length_penalty == 0.5
    assert GenerationOptions.from_parameters({"num_beams": None}, defaults).num_beams == 4
    # what needs beams is without effect, unless the request itself asks for it
    greedy = GenerationOptions.from_parameters({"num_beams": 1, "temperature": 0}, defaults)
    assert not greedy.is_search
    assert greedy.n == 1


def test_do_sample_false_is_greedy_unless_a_temperature_contradicts_it():
    assert options_of(do_sample=False).temperature == 0
    assert options_of(do_sample=False, temperature=0).temperature == 0
    assert options_of(do_sample=True).temperature == 1
    assert options_of(do_sample=False, num_beams=2).num_beams == 2
    with refused("temperature is 0.7; allowed: 0 with do_sample false"):
        options_of(do_sample=False, temperature=0.7)


def test_defaults_of_a_model_contradict_no_request():
    defaults = {"num_beams": 4, "n": 4, "min_tokens": 56, "max_tokens": 142, "temperature": 0.0}

    short = GenerationOptions.from_parameters({"max_tokens": 20, "num_beams": 2}, defaults)
    assert (short.min_tokens, short.n) == (20, 2)
    assert GenerationOptions.from_parameters({"do_sample": True}, defaults).temperature == 1
    assert GenerationOptions.from_parameters({"do_sample": "false"}, defaults).temperature == 0
    with refused("min_tokens is 30; allowed: up to max_tokens, 20"):
        GenerationOptions.from_parameters({"max_tokens": 20, "min_tokens": 30}, defaults)
    with refused("num_beams is 0; allowed: "):
        GenerationOptions.from_parameters({"num_beams": 0}, defaults)


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
@pytest.mark.parametrize(
    "sent, kept",
    [
        ({"json": SCHEMA}, {"json": SCHEMA}),
        ({"json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"json_object": True}, {"json": {"type": "object"}}),
        ({"regex": "a|b"}, {"regex": "a|b"}),
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ],
    ids=str,
)
def test_structured_outputs_become_one_grammar(name, sent, kept):
    for value in (sent, json.dumps(sent)):
        assert json.loads(options_of(**{name: value}).grammar) == kept


def test_the_fields_that_a_client_leaves_empty_do_not_count():
    sent = {"json": None, "regex": "a", "backend": "auto", "disable_fallback": False}

    assert options_of(guided_decoding=sent).grammar == '{"regex":"a"}'


def test_a_schema_keeps_the_order_of_its_properties():
    assert options_of(structured_outputs={"json": SCHEMA}).grammar.index('"b"') < options_of(
        structured_outputs={"json": SCHEMA}
    ).grammar.index('"a"')


@pytest.mark.parametrize(
    "value, message",
    [
        (5, "structured_outputs is 5; allowed: an object with one of json, regex, choice"),
        ("{", 'structured_outputs is "{"; allowed: JSON'),
        ({}, "structured_outputs has no field; allowed: one of json, regex, choice"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs has regex, choice; allowed: one of"),
        ({"grammar": "start: x"}, "structured_outputs has grammar; allowed: one of json, regex"),
        ({"regexp": "a"}, "structured_outputs has regexp; allowed: one of"),
        ({"regex": "a", "whitespace_pattern": " "}, "has regex, whitespace_pattern; allowed"),
        ({"regex": 5}, "structured_outputs.regex is 5; allowed: a string"),
        ({"choice": "a"}, 'structured_outputs.choice is "a"; allowed: a list of strings'),
        ({"choice": [1]}, "structured_outputs.choice is [1]; allowed: a list of strings"),
        (
            {"choice": []},
            "structured_outputs.choice is []; allowed: a list of strings, at least one",
        ),
        ({"json": "{"}, 'structured_outputs.json is "{"; allowed: JSON'),
        ({"json": [1]}, "structured_outputs.json is [1]; allowed: a JSON schema"),
        ({"json": "[1]"}, "structured_outputs.json is [1]; allowed: a JSON schema"),
        ({"regex": "a" * 70_000}, "structured_outputs has 70012 characters; allowed: up to 65536"),
        ({"json": "[" * 5000}, "structured_outputs.json is "),
        ({"json": "[" * 100_000}, "structured_outputs.json has 100000 commas and opening brackets"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refuses_a_structured_output_by_name(value, message):
    with refused(message):
        options_of(structured_outputs=value)


def test_refuses_two_structured_outputs():
    with refused("the request has both structured_outputs and guided_decoding; send one"):
        options_of(structured_outputs={"regex": "a"}, guided_decoding={"regex": "a"})


def test_a_structured_output_has_to_be_able_to_end():
    with refused("ignore_eos is true; allowed: false with structured_outputs"):
        options_of(structured_outputs={"regex": "a"}, ignore_eos=True)
