"""Dates in many written forms: the training text of the date model.

Dates in numbers are read by their separator: 3/14/1999 is month first, 14.3.1999 and 14-3-1999 are day first, and a
number of four digits in front is the year. A year of two digits is one of 1950 to 2049. Letters may be of either case.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from varlen_tools.train_demo.calendar_words import ENGLISH, FRENCH, GERMAN, Language

FIRST, LAST = date(1950, 1, 1), date(2049, 12, 31)
# One date in this many is held out.
_HELD_OUT_SHARE = 10


@dataclass(frozen=True, slots=True)
class Form:
    """A written form: a template over the fields of `Form.write`, in one language."""

    template: str
    language: Language

    def write(self, day: date) -> str:
        """Return the date in this form."""
        language = self.language
        return self.template.format(
            year=day.year,
            yy=day.year % 100,
            month=day.month,
            day=day.day,
            name=language.months[day.month - 1],
            short=language.short_months[day.month - 1],
            weekday=language.weekdays[day.weekday()],
            wday=language.short_weekdays[day.weekday()],
            ordinal=language.ordinals[day.day - 1],
            words=language.words[day.day - 1],
        )


_NUMERIC = (
    "{year}-{month:02}-{day:02}",
    "{year}/{month:02}/{day:02}",
    "{year}/{month}/{day}",
    "{year}.{month:02}.{day:02}",
    "{year}{month:02}{day:02}",
    "{month:02}/{day:02}/{year}",
    "{month}/{day}/{year}",
    "{month:02}/{day:02}/{yy:02}",
    "{month}/{day}/{yy:02}",
    "{day:02}.{month:02}.{year}",
    "{day}.{month}.{year}",
    "{day}. {month}. {year}",
    "{day:02}.{month:02}.{yy:02}",
    "{day}.{month}.{yy:02}",
    "{day:02}-{month:02}-{year}",
    "{day}-{month}-{year}",
)
_ENGLISH = (
    "{day} {name} {year}",
    "{day} {short} {year}",
    "{day:02} {short} {year}",
    "{day:02}-{short}-{year}",
    "{day}-{short}-{yy:02}",
    "{day} {short} '{yy:02}",
    "{year} {short} {day}",
    "{year}-{short}-{day:02}",
    "{name} {day}, {year}",
    "{name} {day} {year}",
    "{short} {day}, {year}",
    "{short} {day} '{yy:02}",
    "{ordinal} {name} {year}",
    "{ordinal} of {name} {year}",
    "the {ordinal} of {name}, {year}",
    "the {ordinal} of {name} '{yy:02}",
    "{name} {ordinal}, {year}",
    "{name} {ordinal} '{yy:02}",
    "{name} the {ordinal}, {year}",
    "{weekday}, {day} {short} {year}",
    "{weekday}, {name} {day}, {year}",
    "{weekday}, {name} {ordinal}, {year}",
    "{weekday} the {ordinal} of {name} {year}",
    "{wday}, {day:02} {short} {year}",
    "{wday} {short} {day} {year}",
    "{words} of {name} {year}",
    "the {words} of {name}, {year}",
    "{name} {words}, {year}",
    "{name} the {words}, {year}",
    "{weekday}, the {words} of {name} {year}",
)
_GERMAN = (
    "{ordinal} {name} {year}",
    "{ordinal} {short} {year}",
    "{ordinal} {name} '{yy:02}",
    "am {ordinal} {name} {year}",
    "den {ordinal} {name} {year}",
    "{weekday}, {ordinal} {name} {year}",
    "{weekday}, den {ordinal} {name} {year}",
    "{wday}, {ordinal} {short} {year}",
    "{wday}, {day:02}.{month:02}.{year}",
    "am {words} {name} {year}",
    "{weekday}, den {words} {name} {year}",
)
_FRENCH = (
    "{ordinal} {name} {year}",
    "{ordinal} {short} {year}",
    "le {ordinal} {name} {year}",
    "{weekday} {ordinal} {name} {year}",
    "le {weekday} {ordinal} {name} {year}",
    "{wday} {ordinal} {short} {year}",
    "le {words} {name} {year}",
    "{weekday} {words} {name} {year}",
)
FORMS: tuple[Form, ...] = (
    *(Form(template, ENGLISH) for template in (*_NUMERIC, *_ENGLISH)),
    *(Form(template, GERMAN) for template in _GERMAN),
    *(Form(template, FRENCH) for template in _FRENCH),
)
# How often training shows each form. Months in digits are learned last: a day can be taken for one.
FORM_WEIGHTS = tuple(2 if "{month" in form.template else 1 for form in FORMS)


@dataclass(frozen=True, slots=True)
class Example:
    """A date as it is written, and in ISO form."""

    source: str
    target: str


def is_held_out(day: date) -> bool:
    """Return whether the date, in every form, is kept from training."""
    return zlib.crc32(day.isoformat().encode()) % _HELD_OUT_SHARE == 0


def training_examples(
    count: int, numbers: random.Random, weights: Sequence[int] | None = None
) -> list[Example]:
    """Return dates that are not held out, in random forms, by the forms' weights."""
    days = _random_days(count, numbers, held_out=False)
    forms = numbers.choices(FORMS, weights, k=count)
    return [
        Example(form.write(day), day.isoformat()) for form, day in zip(forms, days, strict=True)
    ]


def held_out_examples(dates_per_form: int, numbers: random.Random) -> list[Example]:
    """Return dates that training never shows, `dates_per_form` in each form."""
    return [
        Example(form.write(day), day.isoformat())
        for form in FORMS
        for day in _random_days(dates_per_form, numbers, held_out=True)
    ]


def _random_days(count: int, numbers: random.Random, *, held_out: bool) -> list[date]:
    days: list[date] = []
    while len(days) < count:
        day = FIRST + timedelta(numbers.randrange((LAST - FIRST).days + 1))
        if is_held_out(day) == held_out:
            days.append(day)
    return days
