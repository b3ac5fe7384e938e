"""Names and ordinals of dates in English, German and French."""

from __future__ import annotations

from dataclasses import dataclass

_ENGLISH_ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth"
    " fifteenth sixteenth seventeenth eighteenth nineteenth twentieth twenty-first twenty-second twenty-third"
    " twenty-fourth twenty-fifth twenty-sixth twenty-seventh twenty-eighth twenty-ninth thirtieth thirty-first"
)
_GERMAN_ORDINALS = (
    "ersten zweiten dritten vierten fünften sechsten siebten achten neunten zehnten elften zwölften dreizehnten"
    " vierzehnten fünfzehnten sechzehnten siebzehnten achtzehnten neunzehnten zwanzigsten einundzwanzigsten"
    " zweiundzwanzigsten dreiundzwanzigsten vierundzwanzigsten fünfundzwanzigsten sechsundzwanzigsten"
    " siebenundzwanzigsten achtundzwanzigsten neunundzwanzigsten dreißigsten einunddreißigsten"
)
_FRENCH_NUMBERS = (
    "premier,deux,trois,quatre,cinq,six,sept,huit,neuf,dix,onze,douze,treize,quatorze,quinze,seize,dix-sept,"
    "dix-huit,dix-neuf,vingt,vingt et un,vingt-deux,vingt-trois,vingt-quatre,vingt-cinq,vingt-six,vingt-sept,"
    "vingt-huit,vingt-neuf,trente,trente et un"
)


@dataclass(frozen=True, slots=True)
class Language:
    """How a language writes the parts of a date.

    Attributes:
        months, short_months: names from January.
        ordinals: the days of a month in digits, from 1.
        words: the days of a month in words, from 1.
    """

    months: tuple[str, ...]
    short_months: tuple[str, ...]
    weekdays: tuple[str, ...]
    short_weekdays: tuple[str, ...]
    ordinals: tuple[str, ...]
    words: tuple[str, ...]


def _english_ordinal(day: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{'th' if day in {11, 12, 13} else suffix}"


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


ENGLISH = Language(
    _split("January February March April May June July August September October November December"),
    _split("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec"),
    _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    _split("Mon Tue Wed Thu Fri Sat Sun"),
    tuple(_english_ordinal(day) for day in range(1, 32)),
    _split(_ENGLISH_ORDINALS),
)
GERMAN = Language(
    _split("Januar Februar März April Mai Juni Juli August September Oktober November Dezember"),
    _split("Jan. Feb. März Apr. Mai Juni Juli Aug. Sept. Okt. Nov. Dez."),
    _split("Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag"),
    _split("Mo Di Mi Do Fr Sa So"),
    tuple(f"{day}." for day in range(1, 32)),
    _split(_GERMAN_ORDINALS),
)
FRENCH = Language(
    _split("janvier février mars avril mai juin juillet août septembre octobre novembre décembre"),
    _split("janv. févr. mars avr. mai juin juil. août sept. oct. nov. déc."),
    _split("lundi mardi mercredi jeudi vendredi samedi dimanche"),
    _split("lun. mar. mer. jeu. ven. sam. dim."),
    ("1er", *(str(day) for day in range(2, 32))),
    tuple(_FRENCH_NUMBERS.split(",")),
)
