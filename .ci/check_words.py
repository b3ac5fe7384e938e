"""Check the words of comments, docstrings, messages and docs: `.ci/check_words.py [PATH ...]`.

The first line of a docstring has at most 15 words, its entries of `Args:` and `Attributes:` begin with a noun, and
no text holds a phrase of `PHRASES`: each of them has a plain word that readers of other serving systems know. No
sentence begins with "Of …": its subject comes first.
Docstrings and comments hold no phrase of `PROSE_PHRASES` either.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

PATHS = (
    "kernels backend client tools tests typings docs examples model_repository .ci .ci/run .github"
    " Makefile README.md CONTRIBUTING.md SECURITY.md mkdocs.yml pyproject.toml constraints.txt"
)
SUFFIXES = {".py", ".pyi", ".md", ".pbtxt", ".yml"}
MAX_WORDS = 15

# What to write instead of each.
PHRASES = {
    "of which": "whose, or two sentences",
    "so many": "that number of",
    "as far as": "up to, until",
    "what stands there": "the name of the thing",
    "nobody": "no client, no thread, nothing",
    "for want of": "without",
    "carv(e|es|ed|ing)": "allocate",
    "hand(s|ed|ing)? out": "return, deliver",
    "tak(e|en|ing) in": "enqueue, accept",
    "count(s|ed|ing)? out": "subtract, mark as scheduled",
    "t(ake|akes|ook|aken|aking) down": "stop, remove",
    "mend(s|ed|ing)?": "repair, fix",
    "set(s|ting)? aside": "reserve, skip",
    "share_out": "split_batch",
    "what (is|are|was) left( of)?": "the rest of, the remaining",
}
# A sentence that begins with it has its subject at the end.
OPENERS = re.compile(r"(?<![\w-])Of\s+[a-z][^\s,.:;]*")

# Only in docstrings and comments: messages keep their words.
PROSE_PHRASES = {"(those|that) of": "name the thing again"}
# An entry of a docstring that begins with one of these leaves its noun out.
NO_NOUNS = set(
    "of in on at by for from to with without before after as under over until up into"
    " how what which where when why".split()
)


def problems(path: Path) -> list[tuple[int, str]]:
    """Return line and message of each problem in a file."""
    source = path.read_text()
    if path.suffix not in (".py", ".pyi"):
        # the target of a link names a file
        return list(_phrases(1, re.sub(r"\]\([^)]*\)", "]", source)))
    tree = ast.parse(source)
    found = list(_docstring_problems(tree))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found += _phrases(token.start[0], token.string, PHRASES | PROSE_PHRASES)
    for node in ast.walk(tree):
        # text with a space is prose, other text a name
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            found += _phrases(node.lineno, node.value)
    return sorted(found)


def _phrases(
    line: int, text: str, phrases: Mapping[str, str] = PHRASES
) -> Iterator[tuple[int, str]]:
    for phrase, instead in phrases.items():
        words = phrase.replace(" ", r"\s+")
        for match in re.finditer(rf"(?<![\w/-])({words})\b", text, re.IGNORECASE):
            yield _problem(line, text, match, instead)
    # the whole docstring is also a text with spaces
    for match in OPENERS.finditer(text) if phrases is not PROSE_PHRASES else ():
        yield _problem(line, text, match, "subject first")


def _problem(line: int, text: str, match: re.Match[str], instead: str) -> tuple[int, str]:
    at = line + text[: match.start()].count("\n")
    return at, f'"{" ".join(match[0].split())}" -> {instead}'


def _docstring_problems(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                line = node.body[0].lineno
                yield from _long_first_line(line, text)
                yield from _entries_without_noun(line, text)
                yield from _phrases(line, text, PROSE_PHRASES)


def _long_first_line(line: int, text: str) -> Iterator[tuple[int, str]]:
    # `[tokens, hidden]` is one word
    words = len(re.findall(r"`[^`]*`|\w\S*", text.partition("\n")[0]))
    if words > MAX_WORDS:
        yield line, f"the docstring's first line has {words} words -> at most {MAX_WORDS}"


def _entries_without_noun(line: int, text: str) -> Iterator[tuple[int, str]]:
    is_entries = False
    for number, each in enumerate(text.splitlines(), line):
        if each and not each.startswith(" "):
            is_entries = each in {"Args:", "Attributes:"}
        entry = re.match(r" {4}(\S[^:]*): (\w+)", each)
        if is_entries and entry and entry[2].lower() in NO_NOUNS:
            yield number, f'"{entry[1]}: {entry[2]}" -> name the noun'


def main(paths: list[str]) -> int:
    """Print every problem in the files of these paths; return 1 if there is one."""
    found = [
        f"{file}:{line}: {text}"
        for path in paths
        for file in ([Path(path)] if Path(path).is_file() else sorted(Path(path).rglob("*.*")))
        if file.suffix in SUFFIXES or str(file) == path
        # this file and its test quote the phrases
        if "check_words" not in file.name
        for line, text in problems(file)
    ]
    print("\n".join([*found, f"check_words: {len(found)} problems"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PATHS.split()))
