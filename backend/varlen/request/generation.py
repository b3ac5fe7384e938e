"""Options of a generation request: how tokens are chosen and when to stop.

Names, defaults and meanings are those of vLLM's sampling parameters, so its clients fit. Those of beam search are from
Hugging Face's `generate`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from varlen.errors import RequestError, shorten
from varlen.request.parameter_checks import MAX_INT32, NumberRange, parse, real, refuse, whole
from varlen.request.structured import STRUCTURED_OUTPUTS, check_grammar, read_grammar

MAX_SAMPLES = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 256
MAX_BEAMS = 32
MAX_SUPPRESSED_TOKENS = 1024
# Each end token adds a candidate to every step of a search.
MAX_SEARCH_STOP_TOKENS = 64

EarlyStopping: TypeAlias = bool | Literal["never"]
LengthPenaltyType: TypeAlias = Literal["hf", "gnmt"]
DiversityType: TypeAlias = Literal["hamming", "sibling"]

# vLLM takes a temperature below the first for 0, and raises one below the second to it.
_GREEDY_TEMPERATURE = 1e-5
_LOWEST_TEMPERATURE = 1e-2
# vLLM has no limit. With this one all logits that are finite weigh the same.
_HIGHEST_TEMPERATURE = 100_000

_RANGES: Mapping[str, NumberRange] = MappingProxyType(
    {
        "max_tokens": whole(1, MAX_INT32),
        "min_tokens": whole(0, MAX_INT32),
        "n": whole(1, MAX_SAMPLES),
        "temperature": real(0, _HIGHEST_TEMPERATURE),
        "top_k": whole(-1, MAX_INT32),
        "top_p": NumberRange(float, math.nextafter(0, 1), 1, "numbers above 0, up to 1"),
        "min_p": real(0, 1),
        "repetition_penalty": real(0.01, 100),
        "presence_penalty": real(-2, 2),
        "frequency_penalty": real(-2, 2),
        "seed": whole(-(2**63), 2**64 - 1),
        "logprobs": whole(0, MAX_LOGPROBS),
        "num_beams": whole(1, MAX_BEAMS),
        "length_penalty": real(-10, 10),
        "num_beam_groups": whole(1, MAX_BEAMS),
        "diversity_penalty": real(0, 100),
        "no_repeat_ngram_size": whole(0, MAX_INT32),
        "forced_bos_token_id": whole(0, MAX_INT32),
        "forced_eos_token_id": whole(0, MAX_INT32),
    }
)
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "do_sample")
_OPTIONAL = ("seed", "logprobs", "forced_bos_token_id", "forced_eos_token_id")
_WORDS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "early_stopping": (True, False, "never"),
        "length_penalty_type": ("hf", "gnmt"),
        "diversity_type": ("hamming", "sibling"),
    }
)
_TOKEN_LISTS: Mapping[str, int] = MappingProxyType(
    {
        "stop_token_ids": MAX_STOP_TOKENS,
        "suppress_tokens": MAX_SUPPRESSED_TOKENS,
        "begin_suppress_tokens": MAX_SUPPRESSED_TOKENS,
    }
)

# Options that need beams, those that ask for a search, with one beam or more, and those that a search has not.
_ONLY_BEAMS = (
    "length_penalty",
    "length_penalty_type",
    "early_stopping",
    "num_beam_groups",
    "diversity_penalty",
    "diversity_type",
)
_ONLY_SEARCH = (
    "no_repeat_ngram_size",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
)
_NO_SEARCH = (
    "include_stop_str_in_output",
    "stop",
    "logprobs",
    "presence_penalty",
    "frequency_penalty",
)
_ONLY_SAMPLING = ("temperature", "top_k", "top_p", "min_p")

# Parameters of vLLM's clients that are not served, each with the only value that asks for nothing.
_NEUTRAL: Mapping[str, object] = MappingProxyType(
    {
        "best_of": 1,
        "detokenize": True,
        "spaces_between_special_tokens": True,
        "use_beam_search": False,
    }
)
_HINTS: Mapping[str, str] = MappingProxyType(
    {"use_beam_search": "; num_beams above 1 is beam search"}
)
# Hugging Face's names of options.
_ALIASES: Mapping[str, str] = MappingProxyType({"num_return_sequences": "n"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Checked options of one request.

    Attributes:
        max_tokens, min_tokens: largest and smallest number of generated tokens.
        n: number of samples of each prompt, or of its best answers with beam search; `num_return_sequences` too.
        temperature: divides the logits; 0 chooses the most likely token.
        top_k: number of most likely tokens that may be chosen; 0 is all.
        top_p: the smallest set of most likely tokens with at least this probability may be chosen.
        min_p: tokens with less than this share of the largest probability are not chosen.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that prompt or answer hold.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens that the answer holds, once or for
            each time.
        seed: of the random numbers; None draws one for each sequence.
        stop: strings that end the answer.
        stop_token_ids: tokens that end the answer, beside the checkpoint's own.
        ignore_eos: whether the checkpoint's own end tokens do not end the answer.
        include_stop_str_in_output: whether the answer keeps the string, or the text of the token, that ended it.
        skip_special_tokens: whether the text leaves out special tokens.
        logprobs: number of most likely tokens reported with each token; None reports no probability.
        grammar: what the answer has to match, a JSON object with one of `json`, `regex` and `choice`, which
            `decoding.structured` compiles; None is any text.
        num_beams: number of beams of each prompt; 1 is no beam search. `decoding.beam_search` has it and what follows.
            There `repetition_penalty` multiplies log probabilities.
        length_penalty: exponent of the length by which the score of an answer is divided.
        length_penalty_type: the length is that of the generated tokens, or Wu et al. 2016's (5 + tokens) / 6.
        early_stopping: true ends the search once there are `num_beams` answers; false once the best beam is no better
            than the worst of them at its present length, "never" at any length.
        num_beam_groups, diversity_penalty, diversity_type: "hamming" subtracts the penalty from the log probability of
            a token for each beam of earlier groups that chose it in this step, "sibling" from the rank of a beam for
            each better one with the same parent.
        do_sample: whether candidates are drawn at random, as `temperature`, `top_k`, `top_p` and `min_p` say.
        no_repeat_ngram_size: length in tokens of sequences that do not repeat; 0 is none.
        forced_bos_token_id: the first token of an answer, after a prompt of one token; None is the checkpoint's.
        forced_eos_token_id: the token at `max_tokens`; None is the checkpoint's.
        suppress_tokens, begin_suppress_tokens: tokens that are not generated, or not first; None is the checkpoint's.

    Raises:
        RequestError: a value is not allowed; the message names the parameter, the value and what is allowed.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    grammar: str | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    length_penalty_type: LengthPenaltyType = "hf"
    early_stopping: EarlyStopping = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    diversity_type: DiversityType = "hamming"
    do_sample: bool = False
    no_repeat_ngram_size: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    suppress_tokens: tuple[int, ...] | None = None
    begin_suppress_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            if not allowed.allows(value) and not (value is None and name in _OPTIONAL):
                refuse(name, value, allowed.allowed)
        for name in _FLAGS:
            _check_word(name, getattr(self, name), (True, False))
        for name, words in _WORDS.items():
            _check_word(name, getattr(self, name), words)
        _check_stops(self.stop)
        for name, longest in _TOKEN_LISTS.items():
            _check_tokens(name, getattr(self, name), longest)
        if self.min_tokens > self.max_tokens:
            refuse("min_tokens", self.min_tokens, f"up to max_tokens, {self.max_tokens}")
        if self.is_search:
            check_search(self)
        if self.n > 1 and self.temperature == 0 and self.num_beams == 1:
            refuse("n", self.n, "1 with temperature 0, as all samples would be equal")
        if self.grammar is not None:
            check_grammar(self.grammar)
            if self.ignore_eos:
                refuse("ignore_eos", True, "false with structured_outputs, which end themselves")

    @property
    def is_search(self) -> bool:
        """Whether an option asks for beam search, perhaps with one beam; else tokens are sampled."""
        return self.num_beams > 1 or any(
            getattr(self, name) != _DEFAULTS[name] for name in _ONLY_SEARCH
        )

    @classmethod
    def from_parameters(
        cls, parameters: Mapping[str, object], defaults: Mapping[str, object] = MappingProxyType({})
    ) -> "GenerationOptions":
        """Return the options of a JSON object of vLLM's sampling parameters.

        `defaults` are options by name, where a model has its own.

        A null stands for the default. As with NVIDIA's vLLM backend, numbers and flags may come as strings, and
        structured outputs as a string that holds the object.

        Raises:
            RequestError: a name is unknown or a value is not allowed; the message names both, and what is allowed.
        """
        values: dict[str, Any] = {}
        for given, value in parameters.items():
            name = _ALIASES.get(given, given)
            if name not in _NAMES:
                raise RequestError(_unknown(name))
            if value is None:
                continue
            if name in values and values[name] != _value(name, value):
                raise RequestError(f"the request has both {name} and {given}; send one")
            if name in STRUCTURED_OUTPUTS:
                if "grammar" in values:
                    raise RequestError(
                        f"the request has both {' and '.join(STRUCTURED_OUTPUTS)}; send one"
                    )
                values["grammar"] = read_grammar(name, value)
            elif name in _NEUTRAL:
                wanted = _NEUTRAL[name]
                if parse(value, type(wanted)) != wanted:
                    refuse(name, value, json.dumps(wanted) + _HINTS.get(name, ""))
            else:
                values[name] = _value(name, value)
        options = cls(**{**_fitting_defaults(defaults, values), **values})
        if options.num_beams == 1:
            given_beams = tuple(name for name in _ONLY_BEAMS if name in values)
            _check_defaults(options, given_beams, "without num_beams above 1")
        return options


_NAMES = frozenset(
    {
        *(field.name for field in fields(GenerationOptions) if field.name != "grammar"),
        *_NEUTRAL,
        *STRUCTURED_OUTPUTS,
    }
)
_DEFAULTS = MappingProxyType({field.name: field.default for field in fields(GenerationOptions)})


def _fitting_defaults(
    defaults: Mapping[str, object], values: Mapping[str, object]
) -> dict[str, object]:
    """Return the defaults of a model that go with what a request asks for."""
    fitting = dict(defaults)
    for name, limit in (("min_tokens", "max_tokens"), ("n", "num_beams")):
        default, most = defaults.get(name), values.get(limit)
        # a number that is not allowed is refused under its own name
        if isinstance(default, int) and isinstance(most, int) and most >= 1:
            fitting[name] = min(default, most)
    if values.get("do_sample") is True:
        # a random choice has vLLM's default
        fitting.pop("temperature", None)
    return fitting


def _value(name: str, value: object) -> object:
    """Return the value of an option, in the form that `GenerationOptions` checks."""
    if name in _FLAGS or name == "early_stopping":
        return parse(value, bool)
    if name == "logprobs" and isinstance(value, bool):
        # OpenAI's flag of chats
        return 1 if value else None
    if name in _RANGES:
        return _number(name, parse(value, _RANGES[name].kind))
    if isinstance(value, list):
        return tuple(value)
    # `stop` may be one string
    return (value,) if isinstance(value, str) and name == "stop" else value


def _number(name: str, value: object) -> object:
    """Return the number that vLLM takes this one for."""
    if not _RANGES[name].allows(value):
        return value
    if (name, value) == ("top_k", -1):
        return 0
    if (name, value) == ("seed", -1):
        return None
    if name == "temperature" and isinstance(value, (int, float)) and value < _LOWEST_TEMPERATURE:
        return 0.0 if value < _GREEDY_TEMPERATURE else _LOWEST_TEMPERATURE
    return value


def _check_word(name: str, value: object, words: tuple[object, ...]) -> None:
    # 1 equals true, but is no flag
    if value not in words or isinstance(value, (int, float)) is not isinstance(value, bool):
        refuse(name, value, " or ".join(map(json.dumps, words)))


def _check_stops(strings: tuple[str, ...]) -> None:
    if not isinstance(strings, tuple) or not all(isinstance(each, str) for each in strings):
        refuse("stop", strings, "a string, or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(strings)} strings; allowed: up to {MAX_STOP_STRINGS}")
    for each in strings:
        if not 1 <= len(each) <= MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop has a string of {len(each)} characters; allowed: 1 to {MAX_STOP_CHARACTERS}"
            )


def _check_tokens(name: str, token_ids: tuple[int, ...] | None, longest: int) -> None:
    if token_ids is None and name != "stop_token_ids":
        return
    ids = whole(0, MAX_INT32)
    if not isinstance(token_ids, tuple) or not all(ids.allows(each) for each in token_ids):
        refuse(name, token_ids, f"a list of {ids.allowed}")
    if len(token_ids) > longest:
        raise RequestError(f"{name} has {len(token_ids)} tokens; allowed: up to {longest}")


def check_search(options: GenerationOptions) -> None:
    """Check that a beam search can have these options; with one beam, it is greedy.

    Raises:
        RequestError: an option is only of sampling, or has another value than the others allow.
    """
    beams, groups = options.num_beams, options.num_beam_groups
    _check_defaults(options, _NO_SEARCH, "in a beam search")
    if options.grammar is not None:
        raise RequestError("structured_outputs cannot be combined with a beam search")
    if beams == 1:
        if options.do_sample:
            refuse("do_sample", True, "false in a beam search with one beam")
        if options.temperature != 0:
            refuse("temperature", options.temperature, "0 in a beam search with one beam")
    _check_tokens("stop_token_ids", options.stop_token_ids, MAX_SEARCH_STOP_TOKENS)
    if options.n > beams:
        refuse("n", options.n, f"up to num_beams, {beams}")
    if options.do_sample:
        _check_defaults(options, ("num_beam_groups", "diversity_penalty"), "with do_sample")
        if options.temperature == 0:
            refuse("temperature", 0, "above 0 with do_sample")
    else:
        # temperature 0 asks for no random choice, and there is none
        names = _ONLY_SAMPLING[options.temperature == 0 :]
        _check_defaults(options, names, "in a beam search, unless do_sample is true")
    if beams % groups:
        refuse("num_beam_groups", groups, f"divisors of num_beams, {beams}")
    if options.diversity_type == "sibling" and groups > 1:
        refuse("num_beam_groups", groups, '1 with diversity_type "sibling"')
    is_diverse = groups > 1 or options.diversity_type == "sibling"
    if is_diverse != (options.diversity_penalty > 0):
        allowed = "above 0 with" if is_diverse else "0 without"
        refuse(
            "diversity_penalty",
            options.diversity_penalty,
            f'{allowed} num_beam_groups above 1 or diversity_type "sibling"',
        )


def _check_defaults(options: GenerationOptions, names: tuple[str, ...], condition: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value != _DEFAULTS[name]:
            refuse(name, value, f"{json.dumps(_DEFAULTS[name])} {condition}")


def _unknown(name: str) -> str:
    served = sorted({*_NAMES, *_ALIASES} - {*_NEUTRAL, "guided_decoding"})
    close = get_close_matches(name, served, n=1)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    return f'unknown parameter "{shorten(name)}".{hint} Allowed: {", ".join(served)}'
