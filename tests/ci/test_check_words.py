"""Phrases with a plainer word are reported with their line; names and figures are not."""

from pathlib import Path

import pytest

from tests.ci.scripts import load_script

pytestmark = pytest.mark.full

check_words = load_script("check_words")

PHRASES = [
    *("of which", "so many", "as far as", "what stands there", "nobody", "for want of"),
    *("carve", "carving", "hand out", "handed out", "take in", "count out", "taken down", "mends"),
    *("set aside", "setting aside", "share_out", "what is left of", "what is left"),
]


def found(folder: Path, source: str, name: str = "code.py") -> list[tuple[int, str]]:
    path = folder / name
    path.write_text(source)
    problems: list[tuple[int, str]] = check_words.problems(path)
    return problems


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_is_found_in_every_kind_of_text(phrase, tmp_path):
    text = f"The {phrase} here."

    for source, line in [
        (f"x = 1\n# {text}\n", 2),
        (f'"""Title.\n\n{text}\n"""\n', 3),
        (f'raise ValueError(\n    "{text}"\n)\n', 2),
        (f'y = 1\nx = f"{text} {{y}}"\n', 2),
    ]:
        assert [at for at, _ in found(tmp_path, source)] == [line]
    assert [at for at, _ in found(tmp_path, f"# Title\n\n{text}\n", "page.md")] == [3]


def test_a_phrase_across_two_lines_is_found(tmp_path):
    source = "the batches, of\nwhich two run"

    assert found(tmp_path, source, "page.md") == [(1, '"of which" -> whose, or two sentences')]


def test_the_message_names_a_better_word(tmp_path):
    assert found(tmp_path, "# nobody waits\n") == [(1, '"nobody" -> no client, no thread, nothing')]


@pytest.mark.parametrize(
    "source",
    [
        "def carve(nobody): return nobody['carve']\n",
        "# see docs/decisions/0006-carve.md\n",
        "# recommend, amendment, the time it takes in seconds, planes, handout\n",
    ],
)
def test_names_and_other_words_pass(source, tmp_path):
    assert found(tmp_path, source) == []


def test_the_target_of_a_link_passes(tmp_path):
    assert found(tmp_path, "[workers](decisions/nobody.md)", "page.md") == []


@pytest.mark.parametrize(
    "text",
    [
        "# Of a cache line, in bytes.\n",
        '"""Title.\n\nOf engines whose vectors agree, ours is the fastest.\n"""\n',
        'raise ValueError("Of these, one")\n',
    ],
)
def test_a_sentence_begins_with_its_subject(text, tmp_path):
    (problem,) = found(tmp_path, text)

    assert problem[1].endswith("-> subject first")
    assert found(tmp_path, text.replace("Of ", "The bytes of ")) == []


def test_a_docstring_begins_with_at_most_fifteen_words(tmp_path):
    words = "Return " + "word " * 14
    source = 'def f():\n    """{}.\n\n    {}"""\n'

    assert found(tmp_path, source.format(words.strip(), "more " * 20)) == []
    assert found(tmp_path, source.format(f"{words}`[tokens, hidden]`", "")) == [
        (2, "the docstring's first line has 16 words -> at most 15")
    ]


@pytest.mark.parametrize("section", ["Args", "Attributes"])
@pytest.mark.parametrize("word", ["of", "Where", "how", "at"])
def test_an_entry_begins_with_a_noun(section, word, tmp_path):
    source = (
        'def f(task, dtype):\n    """Run.\n\n    {}:\n        task: {}\n        dtype, size: {} the'
        ' model\n            x: of a continuation.\n\n    Returns:\n        y: of another.\n    """\n'
    )

    assert found(tmp_path, source.format(section, "offset of it", "both of")) == []
    assert found(tmp_path, source.format(section, "task of", word)) == [
        (6, f'"dtype, size: {word}" -> name the noun')
    ]
    assert found(tmp_path, source.format("Raises", word, word)) == []


@pytest.mark.parametrize("phrase", ["those of", "That of"])
def test_docstrings_and_comments_name_the_thing_again(phrase, tmp_path):
    problem = f'"{phrase}" -> name the thing again'

    assert found(tmp_path, f"x = 1\n# {phrase} a model\n") == [(2, problem)]
    split = phrase.replace(" ", "\n")
    assert found(tmp_path, f'"""Title.\n\nLike {split} a model.\n"""\n') == [(3, problem)]
    assert found(tmp_path, f'raise ValueError("{phrase} a model")\n') == []
    assert found(tmp_path, f"# Title, {phrase} a model\n", "page.md") == []


def test_all_problems_of_all_paths_are_printed(tmp_path, capsys):
    (tmp_path / "data.csv").write_text("nobody\n")
    (tmp_path / "page.md").write_text("nobody\n\nnobody\n")

    assert check_words.main([str(tmp_path)]) == 1
    assert check_words.main([str(tmp_path / "data.csv")]) == 1
    (tmp_path / "page.md").write_text("no client\n")
    assert check_words.main([str(tmp_path)]) == 0

    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in printed] == [
        f"{tmp_path}/page.md:1",
        f"{tmp_path}/page.md:3",
        "check_words",
        f"{tmp_path}/data.csv:1",
        "check_words",
        "check_words",
    ]
