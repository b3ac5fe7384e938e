"""The date model: its forms, its training, and its checkpoint as transformers reads it."""

import json
import random
import re
from dataclasses import replace
from datetime import date, timedelta
from functools import cache

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.closeness import assert_close
from varlen_tools.train_demo import __main__ as command
from varlen_tools.train_demo.dates import (
    FIRST,
    FORMS,
    LAST,
    held_out_examples,
    is_held_out,
    training_examples,
)
from varlen_tools.train_demo.save import save_marian
from varlen_tools.train_demo.train_dates import (
    END,
    PAD,
    exact_matches,
    train_date_tokenizer,
    train_dates,
)
from varlen_tools.train_demo.transformer import Shape, Training

from .commands import run_module

pytestmark = pytest.mark.full

TINY = Training(
    Shape(vocabulary=300, positions=40, hidden=16, layers=1, heads=2), steps=25, samples=16
)

# The first letters of each month, in three languages.
MONTHS = (
    "jan", "feb fév", "mar mär", "apr avr", "may mai", "jun juin", "jul juil", "aug aoû", "sep",
    "oct okt", "nov", "dec dez déc",
)  # fmt: skip
WORDS = re.compile(r"[^\W\d_]+")


def parsed(text):
    """Return the date of a text whose day is in digits, by the documented rules."""
    numbers = re.findall(r"\d+", text)
    month = None
    # a weekday comes first: "mar." is one, and "mars" a month
    for word in WORDS.findall(text.lower()):
        starts = [any(word.startswith(name) for name in names.split()) for names in MONTHS]
        month = starts.index(True) + 1 if any(starts) else month
    if month:
        day, year = numbers if len(numbers[0]) <= 2 else numbers[::-1]
    elif len(numbers) == 1:
        year, month, day = numbers[0][:4], numbers[0][4:6], numbers[0][6:]
    elif len(numbers[0]) == 4:
        year, month, day = numbers
    elif "/" in text:
        month, day, year = numbers
    else:
        day, month, year = numbers
    century = 0 if len(year) == 4 else 1900 if int(year) >= 50 else 2000
    return date(century + int(year), int(month), int(day))


tokenizer_of = cache(train_date_tokenizer)


def trained(training=TINY):
    """Return a model, its tokenizer, and the loss after each step."""
    tokenizer = tokenizer_of(training.shape.vocabulary, 0)
    losses = []
    model = train_dates(training, tokenizer, lambda step, loss: losses.append(loss))
    return model, tokenizer, losses


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a trained model, and the model."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model, tokenizer, _ = trained()
    save_marian(folder, model, TINY.shape, tokenizer)
    return folder, model


def test_the_day_of_every_form_is_read_back():
    numbers = random.Random(0)
    days = [FIRST, LAST, *(FIRST + timedelta(numbers.randrange(36_000)) for _ in range(200))]
    in_digits = [form for form in FORMS if "{words}" not in form.template]

    assert len(in_digits) > 50
    for form in in_digits:
        for day in days:
            assert parsed(form.write(day)) == day, form.template


@pytest.mark.parametrize(
    "text, day",
    [
        ("the thirty-first of December, 1999", date(1999, 12, 31)),
        ("March the seventh, 2021", date(2021, 3, 7)),
        ("Sunday, the seventh of March 2021", date(2021, 3, 7)),
        ("am einunddreißigsten Dezember 1999", date(1999, 12, 31)),
        ("Mittwoch, den ersten Januar 2020", date(2020, 1, 1)),
        ("le vingt et un février 2000", date(2000, 2, 21)),
        ("mercredi premier janvier 2020", date(2020, 1, 1)),
        ("the 22nd of July '04", date(2004, 7, 22)),
        ("Do, 31. Dez. 2009", date(2009, 12, 31)),
        ("mar. 1er sept. 2009", date(2009, 9, 1)),
    ],
)
def test_a_date_is_written_as_people_write_it(text, day):
    assert text in {form.write(day) for form in FORMS}


def test_no_text_means_two_dates():
    # where day, month and the two digits of the year could be taken for each other
    small = range(1, 13)
    days = [date(2000 + year, month, day) for year in small for month in small for day in small]
    meaning = {}

    for day in days:
        for form in FORMS:
            text = form.write(day).lower()
            assert meaning.setdefault(text, day) == day, text


def test_every_form_is_tested_on_dates_that_training_never_shows():
    seen = training_examples(3_000, random.Random(0))
    held_out = held_out_examples(2, random.Random(0))

    assert not any(is_held_out(date.fromisoformat(example.target)) for example in seen)
    assert all(is_held_out(date.fromisoformat(example.target)) for example in held_out)
    assert len(held_out) == 2 * len(FORMS)
    assert seen == training_examples(3_000, random.Random(0))
    share = sum(is_held_out(FIRST + timedelta(n)) for n in range(3_652)) / 3_652
    assert 0.08 < share < 0.12


def test_the_tokenizer_ends_texts_and_splits_digits():
    tokenizer = tokenizer_of(300, 0)
    text = "le 21 février 1999"

    encoding = tokenizer.encode(text.upper())

    assert encoding.tokens[-1] == END
    assert [token for token in encoding.tokens if token.isdigit()] == list("211999")
    assert tokenizer.decode(encoding.ids) == text
    assert len(tokenizer.encode("2021-03-07").ids) == 11


def test_training_lowers_the_loss_and_repeats_for_a_seed():
    model, _, losses = trained()
    again, _, _ = trained()
    other, _, _ = trained(replace(TINY, seed=1, steps=1))

    assert len(losses) == TINY.steps
    assert losses[-1] < losses[0] - 0.3
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(model.shared.weight, other.shared.weight)


def test_transformers_loads_the_checkpoint_and_gives_the_same_logits(checkpoint):
    folder, model = checkpoint
    theirs, report = transformers.MarianMTModel.from_pretrained(folder, output_loading_info=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["the 3rd of March, 2021", "1.1.99"], padding=True, return_tensors="pt")
    start = torch.tensor([[tokenizer.pad_token_id, 7, 5], [tokenizer.pad_token_id, 9, 4]])
    mask = batch["attention_mask"].bool()[:, None, None]

    with torch.inference_mode():
        expected = theirs(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            decoder_input_ids=start,
        ).logits
        actual = model.decode(start, model.encode(batch["input_ids"], mask), mask)

    assert not any(report.values())
    assert_close(actual.numpy(), expected.numpy(), roundings=64)


def test_transformers_reads_the_same_configuration(checkpoint):
    folder, _ = checkpoint
    written = json.loads((folder / "config.json").read_text())
    read = transformers.AutoConfig.from_pretrained(folder).to_dict()
    generation = transformers.GenerationConfig.from_pretrained(folder)
    pad = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(PAD)

    assert {key: read.get(key) for key in written} == written
    assert (generation.num_beams, generation.bad_words_ids) == (4, [[pad]])
    assert (generation.decoder_start_token_id, generation.max_length) == (pad, 32)


def test_matches_are_counted_over_all_batches(monkeypatch):
    examples = held_out_examples(6, random.Random(0))
    answers = {example.source: example.target for example in examples[:-3]}
    monkeypatch.setattr(
        "varlen_tools.train_demo.train_dates.rewrite",
        lambda model, tokenizer, sources, tokens: [answers.get(text, "") for text in sources],
    )

    assert exact_matches(None, tokenizer_of(300, 0), examples) == len(examples) - 3


def test_the_command_writes_a_checkpoint_and_says_how_well_it_rewrites(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "DEFAULT_DATES", TINY)
    monkeypatch.setattr(command, "_DATES_PER_FORM", 1)

    result = run_module(command.main, "dates", "--output", tmp_path / "model/1", "--steps", "2")

    assert result.exit_code == 0, result.output
    assert f"of {len(FORMS)} held-out dates are rewritten exactly (greedy)" in result.output
    assert sorted(path.name for path in (tmp_path / "model/1").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
