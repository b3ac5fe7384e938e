"""Options of a generation request: how tokens are chosen and when to stop.

Uses the names, defaults and meanings of vLLM's sampling parameters, so its clients work unchanged. Beam search follows
Hugging Face's `generate`.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from varlen.errors import RequestError, shorten
from varlen.parameter import (
    FLAG,
    MAX_INT32,
    Parameter,
    check_number_of_tokens,
    parameter_field,
    parameters_of,
    read_json,
    real_field,
    refuse,
    token_field,
    unknown_parameter,
    whole_field,
    word_field,
)
from varlen.request.foreign_options import FOREIGN_OPTIONS, ForeignOption

LogitBias: TypeAlias = tuple[tuple[int, float], ...]

MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 128

_BIAS = "numbers from -100 to 100 by token id"
_WORDS = "a string, or a list of strings"
_NUMBER = Parameter(0.0, "", lowest=-100, highest=100, is_whole=False)
_TOKEN = re.compile(r"0|[1-9][0-9]{0,9}")

STRUCTURED_OUTPUTS = ("structured_outputs", "guided_decoding")

_MAX_CHARACTERS = 65_536
_KINDS = ("json", "regex", "choice", "json_object")

MAX_SAMPLES = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 256
MAX_BEAMS = 32
MAX_SUPPRESSED_TOKENS = 1024
# A search keeps as many tokens for each one of its prompt.
MAX_NGRAM = 128
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
# Options that have checks of their own.
_OWN_CHECKS = ("stop", "grammar", "logit_bias", "bad_words")


def logit_bias_field() -> LogitBias:
    """Return the field of `logit_bias`."""
    return parameter_field(
        (),
        "numbers by token id that are added to the logits of these tokens, before penalties. In a search the scores"
        " come from the changed logits",
        allowed_text=f"an object of {_BIAS}, at most {MAX_BIASED_TOKENS}",
    )


def bad_words_field() -> tuple[str, ...]:
    """Return the field of `bad_words`."""
    return parameter_field(
        (),
        "words that the answer does not contain, in the tokens that the tokenizer gives them. The last token of a word"
        " is forbidden after its other tokens, if these are tokens of the answer",
        allowed_text=f"a string, or up to {MAX_BAD_WORDS} of at most {MAX_BAD_WORD_CHARACTERS} characters",
    )


def read_logit_bias(value: object) -> object:
    """Return the pairs of an object, or of its JSON text, by token id.

    Another value is returned unchanged, and `check_logit_bias` refuses it.

    Raises:
        RequestError: a text is not JSON, there are too many tokens, or a name is no token id.
    """
    if isinstance(value, str):
        value = read_json("logit_bias", value)
    if not isinstance(value, Mapping):
        return value
    _check_number("logit_bias", len(value), "tokens", MAX_BIASED_TOKENS)
    pairs: dict[int, object] = {}
    for token, bias in value.items():
        if not (isinstance(token, str) and _TOKEN.fullmatch(token)) and type(token) is not int:
            raise RequestError(_wrong_token(token))
        if int(token) in pairs:
            raise RequestError(f"logit_bias has the token {token} twice; send it once")
        pairs[int(token)] = _NUMBER.from_json(bias)
    return tuple(sorted(pairs.items(), key=lambda pair: pair[0]))


def check_logit_bias(bias: object) -> None:
    """Raise RequestError unless these are allowed pairs of a token id and a number."""
    if not isinstance(bias, tuple) or not all(isinstance(e, tuple) and len(e) == 2 for e in bias):
        refuse("logit_bias", bias, f"an object of {_BIAS}")
    _check_number("logit_bias", len(bias), "tokens", MAX_BIASED_TOKENS)
    for token, number in bias:
        if type(token) is not int or not 0 <= token <= MAX_INT32:
            raise RequestError(_wrong_token(token))
        _NUMBER.check(f"logit_bias of token {token}", number)


def read_bad_words(value: object) -> object:
    """Return a tuple of words; one string needs no list.

    An empty string asks for nothing: clients of TensorRT-LLM's backend send it.
    """
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(value) if isinstance(value, list) else value


def check_bad_words(words: object) -> None:
    """Raise RequestError unless these are words that can be tokenized."""
    if not isinstance(words, tuple) or not all(isinstance(each, str) for each in words):
        refuse("bad_words", words, _WORDS)
    _check_number("bad_words", len(words), "words", MAX_BAD_WORDS)
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS:
            raise RequestError(
                f"bad_words has a word of {len(word)} characters; allowed: 1 to {MAX_BAD_WORD_CHARACTERS}"
            )
        if not word.strip():
            refuse("bad_words", word, "words that are not only white space")
        if any("\ud800" <= character <= "\udfff" for character in word):
            refuse("bad_words", word, "valid Unicode")


def _check_number(name: str, number: int, kind: str, most: int) -> None:
    if number > most:
        raise RequestError(f"{name} has {number} {kind}; allowed: up to {most}")


def _wrong_token(token: object) -> str:
    return f"logit_bias has the token {str(token)[:40]!r}; allowed: token ids from 0 to {MAX_INT32}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Checked options of one request. Each field describes itself.

    Raises:
        RequestError: a value is not allowed; the message names the parameter, the value and what is allowed.
    """

    max_tokens: int = whole_field(16, 1, MAX_INT32, "longest answer in tokens")
    min_tokens: int = whole_field(0, 0, MAX_INT32, "the answer does not end before")
    n: int = whole_field(1, 1, MAX_SAMPLES, "number of samples, or of the best answers of a search")
    temperature: float = real_field(
        1.0, 0, _HIGHEST_TEMPERATURE, "divides the logits; 0 takes the most likely token"
    )
    top_k: int = whole_field(
        0, -1, MAX_INT32, "number of most likely tokens to choose from; 0 and -1 are all"
    )
    top_p: float = real_field(
        1.0,
        math.nextafter(0, 1),
        1,
        "choose from the smallest set of most likely tokens with at least this probability",
        allowed_text="numbers above 0, up to 1",
    )
    min_p: float = real_field(
        0.0, 0, 1, "tokens with less than this share of the largest probability are not chosen"
    )
    repetition_penalty: float = real_field(
        1.0,
        0.01,
        100,
        "divides positive logits, and multiplies negative ones, of tokens in prompt or answer; in a search it"
        " multiplies log probabilities",
    )
    presence_penalty: float = real_field(
        0.0, -2, 2, "subtracted once from the logit of each token in the answer"
    )
    frequency_penalty: float = real_field(
        0.0, -2, 2, "subtracted for each time that a token is in the answer"
    )
    seed: int | None = whole_field(
        None,
        -(2**63),
        2**64 - 1,
        "start of the random numbers; null and -1 draw one for each sequence",
    )
    stop: tuple[str, ...] = parameter_field(
        (),
        "texts that end the answer",
        allowed_text=f"a string, or up to {MAX_STOP_STRINGS} of at most {MAX_STOP_CHARACTERS} characters",
    )
    stop_token_ids: tuple[int, ...] = token_field(
        (), MAX_STOP_TOKENS, "tokens that end the answer, beside the checkpoint's own"
    )
    ignore_eos: bool = word_field(
        False, FLAG, "whether the checkpoint's end tokens do not end the answer"
    )
    include_stop_str_in_output: bool = word_field(
        False, FLAG, "whether the answer keeps what ended it, a string or the text of a token"
    )
    skip_special_tokens: bool = word_field(True, FLAG, "whether the text leaves out special tokens")
    logit_bias: LogitBias = logit_bias_field()
    bad_words: tuple[str, ...] = bad_words_field()
    logprobs: int | None = whole_field(
        None,
        0,
        MAX_LOGPROBS,
        "number of most likely tokens reported with each token; null reports no probability",
    )
    # a JSON object with one of `json`, `regex` and `choice`, which `decoding.grammars` compiles
    grammar: str | None = parameter_field(
        None,
        "what the answer has to match",
        allowed_text="an object with one of `json`, `json_object`, `regex`, `choice`",
    )
    # `decoding.beam_search` has what follows
    num_beams: int = whole_field(1, 1, MAX_BEAMS, "beams of a search; 1 samples")
    length_penalty: float = real_field(
        1.0, -10, 10, "exponent of the length that divides the score of an answer"
    )
    length_penalty_type: LengthPenaltyType = word_field(
        "hf",
        ("hf", "gnmt"),
        "how that length is counted: the generated tokens, or (5 + tokens) / 6 of Wu et al. 2016",
    )
    early_stopping: EarlyStopping = word_field(
        False,
        (*FLAG, "never"),
        "when a search ends: with true, once there are `num_beams` answers; with false, once the best beam is no"
        " better than the worst of them at its present length; with never, at any length",
    )
    num_beam_groups: int = whole_field(1, 1, MAX_BEAMS, "groups of beams")
    diversity_penalty: float = real_field(0.0, 0, 100, "lowers tokens that earlier groups chose")
    diversity_type: DiversityType = word_field(
        "hamming",
        ("hamming", "sibling"),
        "what the penalty lowers: the log probability of a token, for each beam of earlier groups that chose it in"
        " this step, or the rank of a beam, for each better one with the same parent",
    )
    do_sample: bool = word_field(
        False,
        FLAG,
        "whether a search draws its candidates at random, as `temperature`, `top_k`, `top_p` and `min_p` say",
    )
    no_repeat_ngram_size: int = whole_field(
        0, 0, MAX_NGRAM, "sequences of this length occur once; 0 is no rule"
    )
    forced_bos_token_id: int | None = whole_field(
        None,
        0,
        MAX_INT32,
        "first token of an answer, after a prompt of one token; null is the checkpoint's",
    )
    forced_eos_token_id: int | None = whole_field(
        None, 0, MAX_INT32, "token at `max_tokens`; null is the checkpoint's"
    )
    suppress_tokens: tuple[int, ...] | None = token_field(
        None, MAX_SUPPRESSED_TOKENS, "tokens that never occur; null is the checkpoint's"
    )
    begin_suppress_tokens: tuple[int, ...] | None = token_field(
        None, MAX_SUPPRESSED_TOKENS, "tokens that do not come first; null is the checkpoint's"
    )

    def __post_init__(self) -> None:
        for name, parameter in OPTIONS.items():
            value = getattr(self, name)
            # most options of most requests are not given
            if value is not parameter.default and name not in _OWN_CHECKS:
                parameter.check(name, value)
        _check_stops(self.stop)
        check_logit_bias(self.logit_bias)
        check_bad_words(self.bad_words)
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
            if self.bad_words:
                raise RequestError(
                    "bad_words cannot be combined with structured_outputs; exclude the words in the schema or the"
                    " regular expression"
                )

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on how often the answer has each token."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1.0, 0.0, 0.0)

    @property
    def is_search(self) -> bool:
        """Whether an option asks for beam search, perhaps with one beam; else tokens are sampled."""
        return self.num_beams > 1 or any(
            getattr(self, name) != OPTIONS[name].default for name in _ONLY_SEARCH
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
        given_as: dict[str, str] = {}
        for given, value in parameters.items():
            if given not in PARAMETER_NAMES:
                raise RequestError(unknown_parameter(given, allowed=_SERVED))
            if value is None or given == "best_of":
                continue
            foreign = FOREIGN_OPTIONS.get(given, ForeignOption(option=given))
            if not foreign.option:
                foreign.check_nothing(given, value)
                continue
            field, read = _read(foreign, given, value)
            # a grammar is checked for one name: equal ones may be written differently
            if field in values and (field == "grammar" or values[field] != read):
                raise RequestError(f"the request has both {given_as[field]} and {given}; send one")
            values[field], given_as[field] = read, given
        options = cls(**{**_fitting_defaults(defaults, values), **values})
        if options.num_beams == 1:
            if values.get("do_sample") is False and options.temperature > 0:
                refuse("temperature", options.temperature, "0 with do_sample false")
            given_beams = tuple(name for name in _ONLY_BEAMS if name in values)
            _check_defaults(options, given_beams, "without num_beams above 1")
        best_of = parameters.get("best_of")
        if best_of is not None and OPTIONS["n"].from_json(best_of) != options.n:
            refuse("best_of", best_of, f"n, {options.n}: all answers are sent")
        return options


OPTIONS = parameters_of(GenerationOptions)


def names_of(field: str) -> tuple[str, ...]:
    """Return the names of an option in requests, ours first."""
    own = STRUCTURED_OUTPUTS if field == "grammar" else (field,)
    return (*own, *(name for name, each in FOREIGN_OPTIONS.items() if each.option == own[0]))


OPTION_NAMES = tuple(
    name for field in OPTIONS for name in names_of(field) if name not in FOREIGN_OPTIONS
)
PARAMETER_NAMES = frozenset({*OPTION_NAMES, *FOREIGN_OPTIONS, "best_of"})
_SERVED = sorted({*OPTION_NAMES} - {"guided_decoding"})


def _read(foreign: ForeignOption, given: str, value: object) -> tuple[str, object]:
    """Return the field of an option, and its value in the form that `GenerationOptions` checks."""
    name = foreign.option
    if foreign.kind:
        if foreign.kind == "choice" and isinstance(value, str):
            value = read_json(given, value)
        return "grammar", read_grammar(name, {foreign.kind: value})
    if name in STRUCTURED_OUTPUTS:
        return "grammar", read_grammar(name, value)
    if name != given:
        if name == "stop" and value == "":
            # TensorRT-LLM's clients leave their text empty
            value = []
        if name == "stop_token_ids" and not isinstance(value, list):
            value = [OPTIONS["max_tokens"].from_json(value)]
    return name, _value(name, value)


def _fitting_defaults(
    defaults: Mapping[str, object], values: Mapping[str, object]
) -> dict[str, object]:
    fitting = dict(defaults)
    for name, limit in (("min_tokens", "max_tokens"), ("n", "num_beams")):
        default, most = defaults.get(name), values.get(limit)
        # a number that is not allowed is refused under its own name
        if isinstance(default, int) and isinstance(most, int) and most >= 1:
            fitting[name] = min(default, most)
    if values.get("do_sample") is True and not fitting.get("temperature", 1):
        # a random choice has vLLM's default
        del fitting["temperature"]
    elif _asks_for_search(values):
        # options that it has not
        for name in _ONLY_SAMPLING:
            if fitting.get(name):
                del fitting[name]
    if values.get("do_sample") is False and "temperature" not in values:
        # Hugging Face's word for the most likely token
        fitting["temperature"] = 0.0
    return fitting


def _asks_for_search(values: Mapping[str, object]) -> bool:
    names = ("num_beams", *_ONLY_SEARCH)
    return not values.get("do_sample") and any(
        values.get(name, OPTIONS[name].default) != OPTIONS[name].default for name in names
    )


def _value(name: str, value: object) -> object:
    if name == "stop" and isinstance(value, str):
        # one string needs no list
        return (value,)
    if name == "logit_bias":
        return read_logit_bias(value)
    if name == "bad_words":
        return read_bad_words(value)
    if name == "logprobs" and isinstance(value, bool):
        # OpenAI's flag of chats
        return 1 if value else None
    value = OPTIONS[name].from_json(value)
    return value if isinstance(value, tuple) else _vllm_number(name, value)


def _vllm_number(name: str, value: object) -> object:
    """Return the number that vLLM takes this one for."""
    if not OPTIONS[name].allows(value):
        return value
    if (name, value) == ("top_k", -1):
        return 0
    if (name, value) == ("seed", -1):
        return None
    if name == "temperature" and isinstance(value, (int, float)) and value < _LOWEST_TEMPERATURE:
        return 0.0 if value < _GREEDY_TEMPERATURE else _LOWEST_TEMPERATURE
    return value


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
    check_number_of_tokens("stop_token_ids", options.stop_token_ids, MAX_SEARCH_STOP_TOKENS)
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
        value, default = getattr(options, name), OPTIONS[name].default
        if value != default:
            refuse(name, value, f"{json.dumps(default)} {condition}")


def read_grammar(name: str, value: object) -> str:
    """Return the parameter as a JSON object with one of `json`, `regex`, `choice`.

    Raises:
        RequestError: it is none of these; the message says what is allowed.
    """
    if isinstance(value, str):
        value = read_json(name, value)
    if not isinstance(value, dict):
        refuse(name, value, f"an object with one of {', '.join(_KINDS)}")
    # clients send all fields of their object: null and false ask for nothing, and the library is ours to choose
    given = {
        key: each
        for key, each in value.items()
        if each is not None and each is not False and key != "backend"
    }
    if len(given) != 1 or not given.keys() <= set(_KINDS):
        raise RequestError(
            f"{name} has {shorten(', '.join(map(str, given))) or 'no field'}; allowed: one of"
            f" {', '.join(_KINDS)}"
        )
    [(kind, content)] = given.items()
    if kind == "json_object":
        kind, content = "json", {"type": "object"}
    if kind == "json":
        content = read_json(f"{name}.json", content) if isinstance(content, str) else content
        if not isinstance(content, dict):
            refuse(f"{name}.json", content, "a JSON schema, as an object or a string")
    elif kind == "choice":
        texts = content if isinstance(content, list) else []
        if not texts or not all(isinstance(each, str) for each in texts):
            refuse(f"{name}.choice", content, "a list of strings, at least one")
    elif not isinstance(content, str):
        refuse(f"{name}.{kind}", content, "a string")
    try:
        return json.dumps({kind: content}, separators=(",", ":"))
    except RecursionError:
        raise RequestError(f"{name} is nested too deeply") from None


def check_grammar(grammar: str) -> None:
    """Raise RequestError if a grammar is too long."""
    if len(grammar) > _MAX_CHARACTERS:
        raise RequestError(
            f"structured_outputs has {len(grammar)} characters; allowed: up to {_MAX_CHARACTERS}"
        )
