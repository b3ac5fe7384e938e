"""The routes of the tokenizer: bodies of TEI and vLLM."""

import pytest

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.tokens import MAX_BYTES_OF_TEXT


def test_tokens_in_the_form_of_tei(post, calls):
    found = post("/tokenize", inputs="aé", model="embedder")

    assert found == [
        [
            {"id": 1, "text": "<s>", "special": True, "start": None, "stop": None},
            {"id": 97, "text": "a", "special": False, "start": 0, "stop": 1},
            {"id": 233, "text": "é", "special": False, "start": 1, "stop": 2},
        ]
    ]
    assert calls.received == [("embedder", "tokenize", ["aé"], {})]


def test_a_batch_of_tei_has_a_list_for_each_text(post, calls):
    body = {"inputs": ["b", "cd"], "add_special_tokens": False, "prompt_name": "query"}
    calls.prompt = "q "

    found = post("/tokenize", **body, model="embedder")

    # places count from the beginning of the prompt, as in TEI
    assert [[each["text"] for each in row] for row in found] == [
        ["<s>", "q", " ", "b"],
        ["<s>", "q", " ", "c", "d"],
    ]
    assert found[1][-1] == {"id": 100, "text": "d", "special": False, "start": 3, "stop": 4}
    given = {"add_special_tokens": False, "prompt_name": "query"}
    assert calls.received == [("embedder", "tokenize", ["b", "cd"], given)]


def test_tokens_in_the_form_of_vllm(post, calls):
    plain = post("/tokenize", prompt="ab", model="writer")
    texts = post("/tokenize", prompt="a", return_token_strs=True, model="writer")

    assert plain == {"count": 3, "max_model_len": 99, "tokens": [1, 97, 98], "token_strs": None}
    assert texts["token_strs"] == ["<s>", "▁a"]
    assert calls.received[0] == ("writer", "tokenize", ["ab"], {})


def test_an_empty_prompt_is_a_text(post):
    assert post("/tokenize", prompt="", model="writer")["count"] == 1


def test_chats_in_the_form_of_vllm(post, calls):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    only = {"add_generation_prompt": True, "continue_final_message": False}
    only["chat_template_kwargs"] = {"enable_thinking": False}
    only["chat_template"] = "rag"

    found = post("/tokenize", messages=messages, add_special_tokens=True, model="writer", **only)

    assert found["tokens"] == [1, 104, 105]
    chat = [{"role": "user", "content": "hi"}]
    options = {
        "add_special_tokens": True,
        "chat_template_kwargs": {
            "chat_template": "rag",
            "enable_thinking": False,
            "ignore_unread": True,
        },
    }
    assert calls.received == [("writer", "tokenize", [chat], options)]


def test_texts_of_tokens(post, calls):
    assert post("/detokenize", tokens=[104, 105], model="writer") == {"prompt": "hi"}
    assert post("/decode", ids=[104], model="embedder") == ["h"]
    body = {"ids": [[104], [105, 33]], "skip_special_tokens": False}
    assert post("/decode", **body, model="embedder") == ["h", "i!"]

    asked = [(inputs, options["skip_special_tokens"]) for _, _, inputs, options in calls.received]
    assert asked == [([[104, 105]], False), ([[104]], True), ([[104], [105, 33]], False)]


@pytest.mark.parametrize(
    "path, body, message",
    [
        ("/tokenize", {}, "the body has no text; send one of inputs, prompt, messages"),
        (
            "/tokenize",
            {"inputs": "a", "prompt": ""},
            "the body has inputs and prompt; send one of inputs, prompt, messages",
        ),
        (
            "/tokenize",
            {"inputs": "a", "prompt": "b"},
            "the body has inputs and prompt; send one of inputs, prompt, messages",
        ),
        ("/tokenize", {"inputs": []}, "inputs has 0 rows; allowed: 1 to 2048"),
        (
            "/tokenize",
            {"inputs": "a", "return_token_strs": True},
            "return_token_strs is not for inputs; leave it out",
        ),
        (
            "/tokenize",
            {"prompt": "a", "prompt_name": "query"},
            "prompt_name is not for prompt; leave it out",
        ),
        (
            "/tokenize",
            {"prompt": "a", "add_generation_prompt": True},
            "add_generation_prompt is not for prompt; leave it out",
        ),
        ("/tokenize", {"inputs": ["a"] * 2049}, "inputs has 2049 rows; allowed: 1 to 2048"),
        ("/tokenize", {"inputs": [1]}, "inputs is [1]: "),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False},
            "add_generation_prompt is False: ",
        ),
        ("/tokenize", {"messages": [], "prompt": "a"}, "messages is []: "),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template is not for prompt"),
        (
            "/tokenize",
            {"inputs": ["é" * (MAX_BYTES_OF_TEXT // 2 + 1), "a"]},
            f"the longest text has {MAX_BYTES_OF_TEXT + 2} bytes, and all have {MAX_BYTES_OF_TEXT + 3}",
        ),
        (
            "/tokenize",
            {"inputs": ["a" * MAX_BYTES_OF_TEXT] * 9},
            f"the longest text has {MAX_BYTES_OF_TEXT} bytes, and all have {9 * MAX_BYTES_OF_TEXT}",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a" * MAX_BYTES_OF_TEXT}] * 2},
            f"the longest text has {2 * MAX_BYTES_OF_TEXT} bytes",
        ),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0 is 'a': "),
        ("/decode", {"ids": [[1.5]]}, "ids is [[1.5]]: "),
        ("/decode", {"ids": [[1]] * 2049}, "ids has 2049 rows; allowed: 1 to 2048"),
        ("/decode", {"ids": ["a"] * 2049}, "ids has 2049 rows; allowed: 1 to 2048"),
    ],
)
def test_refuses_other_bodies(refusal, calls, path, body, message):
    status, error = refusal(path, **body, model="embedder")

    assert (status, calls.received) == (400, [])
    assert error["message"].startswith(message)


def test_an_error_of_the_server_is_passed_on(refusal, calls):
    calls.failure = InvalidRequest("row 0: text has 70000 bytes; this model takes at most 65536")

    status, error = refusal("/tokenize", inputs="a", model="embedder")

    assert (status, error["message"]) == (400, str(calls.failure))
