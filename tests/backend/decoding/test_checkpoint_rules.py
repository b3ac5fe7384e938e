"""Options that requests get from generation_config.json, as vLLM applies them."""

import logging

import pytest

from tests.backend.refusals import refused_checkpoint as refused
from tests.checkpoints import save_checkpoint, set_fields
from varlen.decoding.checkpoint_rules import request_defaults
from varlen.in_process.generator import Generator
from varlen.models.checkpoint_folder import Checkpoint

# As of Qwen3; the last three are nothing that vLLM applies.
FIELDS = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": None,
    "repetition_penalty": 1.05,
    "do_sample": True,
    "num_beams": 1,
    "typical_p": 0.5,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_checkpoint(tmp_path_factory.mktemp("decoder"), "GPT2LMHeadModel")
    set_fields(folder, "generation_config.json", **FIELDS)
    return folder


@pytest.fixture
def changed(folder):
    """Return a function that changes fields of generation_config.json, until the test ends."""
    path = folder / "generation_config.json"
    before = path.read_text()

    def change(**fields):
        set_fields(folder, path.name, **fields)
        return request_defaults(Checkpoint.open(folder), 64, "auto")

    yield change
    path.write_text(before)


@pytest.fixture
def defaults(folder):
    return request_defaults(Checkpoint.open(folder), 64, "auto")


def sampling_of(options):
    return {name: getattr(options, name) for name in FIELDS if hasattr(options, name)}


def test_a_request_gets_the_options_of_the_checkpoint(defaults):
    found = defaults.read({})

    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 0.95)
    assert (found.min_p, found.repetition_penalty) == (0, 1.05)
    # of completions and of NVIDIA's backend of vLLM
    assert found.max_tokens == 16


def test_its_own_options_come_first(defaults):
    given = {"temperature": 1.5, "top_k": -1, "top_p": 1, "min_p": 0.1, "repetition_penalty": 1}

    found = defaults.read(given)

    assert (found.temperature, found.top_k, found.top_p) == (1.5, 0, 1)
    assert (found.min_p, found.repetition_penalty) == (0.1, 1)
    # null is an option that is not there
    assert defaults.read(dict.fromkeys(given)) == defaults.read({})


@pytest.mark.parametrize("given", [{"temperature": 0}, {"do_sample": False}], ids=str)
def test_a_greedy_request_stays_greedy(defaults, given):
    assert defaults.read(given).temperature == 0


def test_a_beam_search_gets_no_options_of_sampling(defaults):
    for given in ({"num_beams": 2}, {"num_beams": 2, "n": 2, "temperature": 0}):
        found = defaults.read(given)
        assert (found.top_k, found.top_p, found.repetition_penalty) == (0, 1, 1.05)
    drawn = defaults.read({"num_beams": 2, "do_sample": True})
    assert (drawn.temperature, drawn.top_k) == (0.6, 20)


def test_none_leaves_the_options_of_the_checkpoint_out(folder):
    plain = request_defaults(Checkpoint.open(folder), 64, "none").read({})

    assert (plain.temperature, plain.top_k, plain.repetition_penalty) == (1, 0, 1)


def test_max_new_tokens_limits_all_answers(changed):
    defaults = changed(max_new_tokens=12)

    assert defaults.read({}).max_tokens == 12
    assert defaults.read({"max_tokens": 5}).max_tokens == 5
    longer = defaults.read({"max_tokens": 100, "min_tokens": 50})
    assert (longer.max_tokens, longer.min_tokens) == (12, 12)


def test_a_file_without_options_changes_nothing(changed):
    defaults = changed(**dict.fromkeys(FIELDS))

    assert (defaults.options, defaults.max_new_tokens) == ({}, None)


@pytest.mark.parametrize(
    "field, message",
    [
        (
            {"top_p": 0},
            "top_p 0; allowed: numbers above 0, up to 1. The setting generation_config: none",
        ),
        ({"temperature": "warm"}, 'temperature "warm"; allowed: '),
        ({"max_new_tokens": -1}, "max_new_tokens -1; allowed: "),
    ],
    ids=str,
)
def test_a_value_that_no_request_may_have_is_refused_at_load(changed, field, message):
    with refused(f"generation_config.json has {message}"):
        changed(**field)


def test_a_model_applies_them_and_says_so(folder, caplog):
    with (
        caplog.at_level(logging.INFO, "varlen"),
        Generator.from_pretrained(folder, dtype="fp32", max_running_sequences=2) as generator,
    ):
        prompt, seeds = [5, 6, 7], {"seed": 3, "max_tokens": 12}
        [answer] = generator.generate([prompt], **seeds)
        given = {name: FIELDS[name] for name in ("temperature", "top_k", "top_p")}
        [same] = generator.generate([prompt], **seeds, **given, repetition_penalty=1.05)

    assert answer == same
    assert (
        "defaults of generation_config.json: temperature 0.6, top_k 20, top_p 0.95, repetition_penalty 1.05;"
        " generation_config: none leaves them out" in caplog.text
    )
    with Generator.from_pretrained(folder, dtype="fp32", generation_config="none") as generator:
        [plain] = generator.generate([prompt], **seeds)
        [explicit] = generator.generate([prompt], **seeds, temperature=1, top_k=0, top_p=1)
    assert plain == explicit != answer
