"""The command line: its output, its files and its errors."""

import json
from importlib.metadata import version

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.client.conftest import free_port
from varlen_client import Client
from varlen_client.cli import main as cli

from .conftest import run


@pytest.fixture
def write_lines(tmp_path):
    """Return a function that writes a file and returns its path."""

    def write(content):
        path = tmp_path / "lines.txt"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def test_the_program_says_its_version_and_what_options_mean(varlen):
    assert varlen("--version").stdout == f"varlen {version('varlen-client')}\n"
    # in the markup of help texts, words in brackets would vanish
    assert ".npy of fp32, a row per text" in varlen("embed", "--help").stdout


def test_embed_prints_one_line_per_text(varlen):
    result = varlen("embed", "first [bold]", "second")

    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    assert first.startswith("first [bold]  3 values  [")
    assert second.startswith("second  3 values  [")


def test_embed_as_json_prints_every_value(varlen, vectors_of):
    result = varlen("embed", "--json", "näïve", "b")

    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [item["text"] for item in objects] == ["näïve", "b"]
    embeddings = np.array([item["embedding"] for item in objects], dtype=np.float32)
    np.testing.assert_array_equal(embeddings, vectors_of(["näïve", "b"]))


def test_embed_prints_a_line_for_each_span(varlen, server, write_lines):
    result = varlen("embed", "one two", "--spans", "[[0, 3], [4, 7]]")

    assert result.exit_code == 0, result.output
    assert [line.split("  ")[0] for line in result.stdout.splitlines()] == ["one", "two"]
    wrong = varlen("embed", "one two", "--spans", "[[0, 3]")
    assert wrong.exit_code == 2
    assert "write JSON such as [[0, 40], [41, 90]]" in " ".join(wrong.stderr.split())
    file = write_lines("one\n\ntwo\n")
    whole = varlen("embed", "--file", file, "--whole-file", "--windows", "--window-overlap", "3")
    assert whole.exit_code == 0, whole.output
    assert server.model.requests[-1].texts == ["one\n\ntwo"]
    assert server.model.requests[-1].parameters == {"windows": True, "window_overlap": 3}


@pytest.mark.parametrize("command", ["embed", "similarity"])
def test_sends_the_options_of_a_request(varlen, server, command):
    options = "--deadline-ms 60000 --priority 4 --truncate --truncation-side left".split()
    options += ["--truncate-prompt-tokens", "7", "--adapter", "legal"]
    varlen(command, "a", "b", *options)

    (received,) = server.model.requests
    assert received.parameters["truncate"] is True
    assert received.parameters["truncation_side"] == "left"
    assert received.parameters["truncate_prompt_tokens"] == 7
    # the rest of it when the request is sent
    assert 0 < received.parameters["deadline_ms"] <= 60_000
    assert received.parameters["request_priority"] == 4
    assert received.parameters["adapter"] == "legal"


def test_embeds_a_file_in_order(varlen, write_lines, tmp_path, vectors_of):
    texts = [f"line {n}" for n in range(100)]
    output = tmp_path / "vectors.npy"

    result = varlen("embed", "--file", write_lines("\r\n".join(texts) + "\n"), "--output", output)

    assert result.exit_code == 0
    assert "wrote 100 vectors of 3 values" in result.stderr
    np.testing.assert_array_equal(np.load(output), vectors_of(texts))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines.txt", "vectors.npy"]


def test_does_not_overwrite_without_force(varlen, server, write_lines, tmp_path):
    output = tmp_path / "vectors.npy"
    output.write_bytes(b"precious")
    arguments = ("embed", "--file", write_lines("a\n"), "--output", output)

    result = varlen(*arguments)
    assert result.exit_code == 2
    assert "exists (overwrite it with --force)" in result.stderr
    assert output.read_bytes() == b"precious"
    assert server.model.requests == []

    assert varlen(*arguments, "--force").exit_code == 0
    assert np.load(output).shape == (1, 3)


def test_a_failure_leaves_no_output(varlen, server, write_lines, tmp_path, fault):
    server.model.refuse = lambda received: (
        fault("invalid", "row 0: bad") if "c" in received.texts else None
    )
    output = tmp_path / "vectors.npy"

    result = varlen(
        "embed", "--file", write_lines("a\nb\nc\n"), "--output", output, "--rows-per-request", 1
    )

    assert result.exit_code == 1
    assert result.stderr == "error: row 2: bad\n"
    assert [path.name for path in tmp_path.iterdir()] == ["lines.txt"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\n\nb\n", "line 2: empty"),
        ("a\n \t\n", "line 2: empty"),
        (b"a\nb\n\xff\n", "line 3: not valid UTF-8"),
        ("", "has no text"),
    ],
)
def test_an_invalid_line_is_reported_by_number(varlen, server, write_lines, content, message):
    result = varlen("embed", "--file", write_lines(content))

    assert result.exit_code == 2
    assert message in result.stderr
    assert server.model.requests == []


def test_skips_empty_lines_with_the_option(varlen, write_lines):
    result = varlen("embed", "--json", "--skip-empty", "--file", write_lines("a\n\nb\n"))

    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embed"], "either texts or --file"),
        (["embed", "a", "--file", "b"], "either texts or --file"),
        (["embed", "--file", "/nonexistent"], "cannot read /nonexistent"),
        (["embed", "a", "--output", "/nonexistent/v.npy"], "/nonexistent is not a folder"),
        (["embed", "a", "--url", "localhost:8001"], "must start with grpc://"),
        (["similarity", "a"], "at least two texts"),
        (["translate"], "either texts or --file"),
        (["translate", "a", "--beams", "0"], "--beams"),
        (["translate", "a", "--output", "/nonexistent/o"], "/nonexistent is not a folder"),
        (["generate"], "Missing argument"),
        (["generate", "a", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "a", "--json-schema", "/nonexistent"], "cannot read /nonexistent"),
        (["generate", "a", "--json-schema", __file__], "is not JSON"),
        (["embed", "a", "--nope"], "No such option"),
    ],
)
def test_wrong_arguments_exit_with_2_and_a_reason(varlen, arguments, message):
    result = varlen(*arguments)

    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_no_connection_is_a_one_line_error_with_exit_code_1(unused_url):
    result = run("status", "--url", unused_url)

    assert result.exit_code == 1
    assert result.stderr.startswith("error: no connection to")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("given", ["option", "variable"])
def test_takes_the_urls_of_several_replicas(varlen, server, monkeypatch, given):
    urls = [server.url.replace("127.0.0.1", host) for host in ("127.0.0.1", "localhost")]
    arguments = [each for url in urls for each in ("--url", url)] if given == "option" else []
    monkeypatch.setenv("VARLEN_URL", " ".join(urls) if given == "variable" else "grpc://other")
    clients = []
    monkeypatch.setattr(
        "varlen_client.cli.requests.Client",
        lambda url, *args, **options: clients.append(url) or Client(url, *args, **options),
    )

    assert varlen("embed", "a", *arguments).exit_code == 0
    assert list(map(list, clients)) == [urls]


def test_a_command_does_without_a_replica_that_is_gone(varlen, server):
    gone = f"{server.url.partition(':')[0]}://127.0.0.1:{free_port()}"

    assert varlen("embed", "a", "--url", gone, "--url", server.url).exit_code == 0


def test_lists_the_models_when_one_must_be_chosen(varlen, server):
    server.model.models = [("fake", "READY"), ("other", "READY")]

    result = varlen("embed", "a")
    assert result.exit_code == 1
    assert "choose one: fake, other" in result.stderr

    assert varlen("embed", "a", "--model", "fake").exit_code == 0


def test_similarity_prints_a_table_of_cosines(varlen, vectors_of):
    texts = ["a", "a longer text", "[red]third"]
    result = varlen("similarity", *texts)

    vectors = vectors_of(texts)
    cosine = vectors[0] @ vectors[1] / np.linalg.norm(vectors[0]) / np.linalg.norm(vectors[1])
    assert result.exit_code == 0
    assert f"{cosine:.3f}" in result.stdout
    assert result.stdout.count("1.000") >= 3
    assert "[red]third" in result.stdout


@pytest.fixture
def generating(varlen, server):
    """Return the function that runs the command, against a model that generates."""
    server.model.task = "generate"
    return varlen


@pytest.mark.parametrize("options", [[], ["--stream"]], ids=str)
def test_generate_prints_the_text(generating, options):
    result = generating("generate", "hello", "--max-tokens", 3, *options)

    assert (result.exit_code, result.stdout) == (0, "0.0 0.1 0.2 \n")


def test_generate_as_json_prints_an_object_per_answer_or_part(generating):
    answer = generating("generate", "hello", "--max-tokens", 2, "--json")
    parts = generating("generate", "hello", "--max-tokens", 2, "--json", "--stream")

    assert [json.loads(line) for line in answer.stdout.splitlines()] == [
        {"text": "0.0 0.1 ", "token_ids": [0, 1], "finish_reason": "length"}
    ]
    assert [json.loads(line) for line in parts.stdout.splitlines()] == [
        {"text": "0.0 ", "token_ids": [0], "finish_reason": None},
        {"text": "0.1 ", "token_ids": [1], "finish_reason": "length"},
    ]


def test_generate_sends_the_parameters_that_are_given(generating, server, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')

    generating("generate", "hello", "--max-tokens", 2)
    generating(
        *("generate", "hello", "--max-tokens", 2, "--temperature", 0, "--top-p", 0.5, "--top-k", 4),
        *("--min-p", 0.1, "--seed", 7, "--stop", "a", "--stop", "b", "--json-schema", schema),
        *("--priority", 2, "--bad-word", "x y", "--bad-word", "z", "--logit-bias", '{"5": -1}'),
        *("--chat", "--chat-template-kwargs", '{"enable_thinking": false}'),
    )

    few, many = (received.sampling for received in server.model.requests)
    assert few == {"max_tokens": 2, "n": 1}
    assert many == {
        "max_tokens": 2,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["a", "b"],
        "bad_words": ["x y", "z"],
        "logit_bias": '{"5": -1}',
        "chat_template_kwargs": '{"enable_thinking": false}',
        "structured_outputs": {"json": {"type": "object"}},
        "request_priority": 2,
        "n": 1,
    }


def test_template_variables_need_a_chat(generating):
    result = CliRunner().invoke(cli.app, ["generate", "a", "--chat-template-kwargs", "{}"])

    assert result.exit_code == 2
    assert "--chat-template-kwargs needs --chat" in result.output


def test_generate_sends_a_chat_or_what_stdin_holds(generating, server):
    generating("generate", "hello", "--chat")
    result = CliRunner().invoke(cli.app, ["generate", "-"], input="über\nlines")

    assert result.exit_code == 0
    # before each, the tokenizer counts the prompt
    _, chat, _, stdin = (received.tensors for received in server.model.requests)
    assert json.loads(chat["messages"][0]) == [{"role": "user", "content": "hello"}]
    text = stdin["text_input"][0]
    assert (text.decode() if isinstance(text, bytes) else text) == "über\nlines"


@pytest.mark.parametrize("options", [[], ["--stream"], ["--chat"]], ids=str)
@pytest.mark.parametrize(
    "longest, expected", [(10_000, 256), (261, 256), (260, 255), (5, 1), (3, 1)]
)
def test_generate_asks_for_256_tokens_or_what_the_model_has_left(
    generating, server, longest, expected, options
):
    found = {"token_ids": [1] * 5, "tokens": [""] * 5, "special": [False] * 5}
    found |= {"offsets": [[0, 0]] * 5, "prompt": "", "max_tokens": longest}
    server.model.tokenizer_answer = json.dumps(found).encode()

    generating("generate", "hello", *options)

    _, asked = (received.sampling for received in server.model.requests)
    assert asked["max_tokens"] == expected


def test_an_error_in_the_middle_of_a_stream_keeps_the_text_and_exits_with_1(
    generating, server, fault
):
    server.model.fail_after = (2, fault("internal", "broken"))

    result = generating("generate", "hello", "--stream")

    assert (result.exit_code, result.stdout) == (1, "0.0 0.1 ")
    assert result.stderr == "error: broken\n"


@pytest.fixture
def translating(varlen, server):
    """Return the function that runs the command, against a model that translates."""
    server.model.task = "translate"
    return varlen


def test_translate_prints_a_line_per_text(translating, server):
    result = translating("translate", "un", "deux", "--beams", 4, "--max-tokens", 2)

    assert (result.exit_code, result.stdout) == (0, "UN 0\nDEUX 0\n")
    assert all(
        received.sampling == {"num_beams": 4, "max_tokens": 2, "n": 1}
        for received in server.model.requests
    )


def test_translate_prints_score_and_text_of_the_n_best(translating):
    result = translating("translate", "un", "deux", "--beams", 2, "--n-best", 2)

    assert result.stdout == "-0.5000\tUN 0\n-1.0000\tUN 1\n-0.5000\tDEUX 0\n-1.0000\tDEUX 1\n"


def test_translates_a_file_in_order_and_keeps_empty_lines(translating, write_lines, tmp_path):
    lines = [f"line {n}" if n % 5 else "" for n in range(1, 100)]
    output = tmp_path / "out.txt"

    result = translating(
        "translate", "--file", write_lines("\n".join(lines) + "\n"), "--output", output
    )

    assert result.exit_code == 0
    assert result.stdout == ""
    assert "wrote 80 translations to" in result.stderr
    written = [f"{line.upper()} 0" if line else "" for line in lines]
    assert output.read_text() == "".join(f"{line}\n" for line in written)


def test_translate_reads_stdin_and_prints(translating):
    result = CliRunner().invoke(
        cli.app, ["translate", "--file", "-", "--output", "-"], input="über\n\nzwei"
    )

    assert (result.exit_code, result.stdout) == (0, "ÜBER 0\n\nZWEI 0\n")


def test_a_line_that_cannot_be_translated_is_named_and_nothing_is_written(
    translating, server, write_lines, tmp_path, fault
):
    server.model.refuse = lambda received: (
        fault("invalid", "row 0: text has 900 tokens") if received.prompt == "BAD" else None
    )
    lines = write_lines("a\n\nbad\nb\n")

    result = translating("translate", "--file", lines, "--output", tmp_path / "out.txt")

    assert result.exit_code == 1
    assert result.stderr == f"error: {lines}, line 3: text has 900 tokens\n"
    assert [path.name for path in tmp_path.iterdir()] == ["lines.txt"]
