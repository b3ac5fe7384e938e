"""Requests for generated answers that are refused, each with its whole message.

Unit tests read them, and tests of a server send them: the same mistake has the same message everywhere.
"""

from typing import Any

from tests.refusals import Arrays, Refusal, row

MESSAGES = '[{"role": "user", "content": "a"}]'
_PROMPT = {"text_input": row("a")}
_CHAT = {"messages": row(MESSAGES)}


def generation_refusals() -> list[Refusal]:
    """Return what a model with a chat template refuses, whose vocabulary is small."""
    return [
        *_template_variables(),
        *_biases(),
        *_bad_words(),
        *_foreign_names(),
    ]


def _refusals(inputs: Arrays, name: str, messages: dict[str, Any]) -> list[Refusal]:
    """Return a refusal of one parameter for each message, which stands with its value."""
    return [
        Refusal(f"{name} is {value!r:.20}", message, inputs, {name: value})
        for message, value in messages.items()
    ]


def json_refusals() -> list[Refusal]:
    """Return options whose JSON is too large or too deep."""
    name = "sampling_parameters"
    large = {
        "40 MB of numbers": (b"[" + b"0," * 20_000_000 + b"0]", "has 40000003 bytes"),
        "a byte too many": (b"{}" + b" " * 131_071, "has 131073 bytes"),
    }
    deep = {"an option 101 deep": b'{"stop":' + b"[" * 100 + b"]" * 100 + b"}"}
    return [
        *(
            Refusal(f"{name}: {what}", f"{name} {found}; allowed: up to 131072", _with(text))
            for what, (text, found) in large.items()
        ),
        *(
            Refusal(
                f"{name}: {what}",
                f"{name} is nested more than 100 deep; send a flatter object or list",
                _with(text),
            )
            for what, text in deep.items()
        ),
    ]


def _with(sampling: bytes) -> Arrays:
    return {**_PROMPT, "sampling_parameters": row(sampling)}


def _biases() -> list[Refusal]:
    name = "logit_bias"
    wanted = "an object of numbers from -100 to 100 by token id"
    ids = "token ids from 0 to 2147483647"
    return _refusals(
        _PROMPT,
        name,
        {
            f"{name} is 5; allowed: {wanted}": 5,
            f'{name} is "{{"; allowed: JSON': "{",
            f"{name} is [1]; allowed: {wanted}": "[1]",
            f"{name} has the token 'a'; allowed: {ids}": {"a": 1},
            f"{name} has the token '-1'; allowed: {ids}": {"-1": 1},
            f"{name} has the token '05'; allowed: {ids}": {"05": 1},
            f"{name} has the token '9999999999'; allowed: {ids}": {"9999999999": 1},
            f"{name} of token 5 is 101; allowed: numbers from -100 to 100": {"5": 101},
            f"{name} of token 6 is true; allowed: numbers from -100 to 100": {"6": True},
            f"{name} of token 7 is null; allowed: numbers from -100 to 100": '{"7": null}',
            f"{name} has 1025 tokens; allowed: up to 1024": dict.fromkeys(map(str, range(1025)), 1),
        },
    )


def _foreign_names() -> list[Refusal]:
    """Return names of other servers whose values are not served."""
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"return_log_probs": True},
            "return_log_probs is true; allowed: false; send return_cumulative_logprob or return_logprobs",
        ),
        ({"typical_p": 0.5}, "typical_p is 0.5; allowed: 1; typical sampling is not served"),
        ({"best_of": 3}, "best_of is 3; allowed: n, 1: all answers are sent"),
        (
            {"embedding_bias_words": "a"},
            "embedding_bias_words is not served; send logit_bias, by token id",
        ),
        (
            {"guided_grammar": "a"},
            "guided_grammar is not served; send structured_outputs with json, regex or choice",
        ),
        (
            {"max_tokens": 3, "max_new_tokens": 4},
            "the request has both max_tokens and max_new_tokens; send one",
        ),
        (
            {"guided_json": "{}", "guided_regex": "a"},
            "the request has both guided_json and guided_regex; send one",
        ),
        ({"max_new_tokens": 0}, "max_tokens is 0; allowed: whole numbers from 1 to 2147483647"),
    ]
    return [Refusal(", ".join(given), message, _PROMPT, given) for given, message in wrong]


def _bad_words() -> list[Refusal]:
    name = "bad_words"
    both = (
        f"{name} cannot be combined with structured_outputs; exclude the words in the schema or the regular"
        " expression"
    )
    return [
        *_refusals(
            _PROMPT,
            name,
            {
                f"{name} is 5; allowed: a string, or a list of strings": 5,
                f'{name} is ["a", 5]; allowed: a string, or a list of strings': ["a", 5],
                f"{name} has a word of 0 characters; allowed: 1 to 128": ["a", ""],
                f"{name} has a word of 129 characters; allowed: 1 to 128": "x" * 129,
                f'{name} is " \\t"; allowed: words that are not only white space': " \t",
                f'{name} is "\\ud800"; allowed: valid Unicode': "\ud800",
                f"{name} has 129 words; allowed: up to 128": ["x"] * 129,
            },
        ),
        Refusal(
            f"{name} and a grammar",
            both,
            _PROMPT,
            {name: "x", "structured_outputs": '{"regex": "a"}'},
        ),
    ]


def _template_variables() -> list[Refusal]:
    name = "chat_template_kwargs"
    deep: object = 1
    for _ in range(17):
        deep = {"a": deep}
    object_wanted = "allowed: a JSON object, or a text that holds one"
    return [
        Refusal(
            f"{name} without messages",
            f"the request has {name} without messages; send messages",
            _PROMPT,
            {name: "{}"},
        ),
        *_refusals(
            _CHAT,
            name,
            {
                f"{name} is [1]; {object_wanted}": "[1]",
                f"{name} is true; {object_wanted}": True,
                f'{name} is "{{"; allowed: JSON': "{",
                f"{name} has 70000 characters; allowed: up to 65536": " " * 70_000,
                f"{name} has 65543 characters; allowed: up to 65536": {"a": "b" * 65_534},
                f"{name} is nested more than 16 deep; send a flatter object": deep,
            },
        ),
    ]
