"""Rules of real tokenizers pass; rules that may take any time do not."""

import random
import time

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from varlen.errors import CheckpointError
from varlen.models.checkpoint.tokenizer_rules import check_rules

# Patterns of tokenizers as they are published.
REAL = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "Llama 3 and Qwen": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
        r"|\s+(?!\S)|\s"
    ),
    "o200k and tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "DeepSeek": (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "Kimi": r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?|\p{N}{1,3}",
    "CLIP": r"<\|startoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "Bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",  # noqa: RUF001
    "Falcon": r"[0-9][0-9][0-9]",
    "XLM-R and Marian": r" {2,}",
    "digits from the right": r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "digits in threes": r"\d{1,3}(?=(?:\d{3})*\b)",
    "lines": r"(?:\r?\n)+|\s+",
    "letters and marks": r"(?:\p{L}\p{M}*)+",
    "quotation marks": r"``|''",
    "behind a letter": r"(?<=\p{L})\.",
    "a bracket in a class": r"[]a]+|[^]]x",
    "nothing": "",
}
# Each takes any time for some text of 100 characters, or is not known.
REFUSED = [
    r"(a+)+b",
    r"(a|a)*b",
    r"(a|aa)+$",
    r"(?:a*)*b",
    r"(x+x+)+y",
    r"a*a*b",
    r"\s*\s*x",
    r".*.*=",
    r"[ab]*ab[ab]*c",
    r"(.*)*=",
    r"(\w+\s?)+$",
    r"^(([a-z])+.)+[A-Z]([a-z])+$",
    r"(?:a?){40}a{40}",
    r"(?:a{1,3}){9}b",
    r"a{1,100000}a{1,100000}b",
    r"a{20}a*b",
    r"(?:a|b|ab)*(?!c)",
    r"(?=.*a.*b)c",
    r"aa*(b{2,}|.{0,30})++c",
    r"a{1,3}+b",
    r"(a+){2,}b",
    # not known
    r"(a)\1",
    r"(?<n>a)\k<n>",
    r"(?~a)",
    r"(?(1)a|b)",
    r"\X",
    r"(?{x})",
    r"(*FAIL)",
    r"(a",
    r"a)",
    r"[a",
    "a" * 10_001,
    "(" * 30 + ")" * 30,
]
SECONDS = 1.0


def with_pattern(pattern, part="pre_tokenizer"):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {part: {"type": "Sequence", "pretokenizers": [split]}, "model": {"type": "BPE"}}


@pytest.mark.parametrize("pattern", REAL.values(), ids=REAL)
def test_the_patterns_of_real_tokenizers_pass(pattern):
    Regex(pattern)
    check_rules(with_pattern(pattern))


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "decoder"])
@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: pattern[:30])
def test_a_pattern_that_may_take_any_time_is_refused_by_its_text(pattern, part):
    with pytest.raises(CheckpointError, match="the pattern .* of tokenizer.json"):
        check_rules(with_pattern(pattern, part))


def test_a_text_in_place_of_a_pattern_is_no_pattern():
    split = {"type": "Split", "pattern": {"String": "(a+)+b"}, "behavior": "Isolated"}
    check_rules({"pre_tokenizer": split})


def random_pattern(draw, depth=0):
    """Return a pattern of few characters, so that its parts match the same texts."""

    def part():
        kind = draw.random()
        if kind < 0.2 and depth < 4:
            group = draw.choice(["(?:", "(", "(?=", "(?!", "(?>"])
            made = f"{group}{random_pattern(draw, depth + 1)})"
        else:
            made = draw.choice(["a", "b", "[ab]", "[^b]", ".", "ab"])
        return made + draw.choice(["", "", "*", "+", "?", "*?", "{2}", "{1,3}", "{2,}", "++"])

    parts = ["".join(part() for _ in range(draw.randint(1, 4))) for _ in range(draw.randint(1, 2))]
    return "|".join(parts)


def test_what_passes_is_quick_for_short_texts():
    draw = random.Random(0)
    texts = [(unit * 300)[:300] + end for unit in ("a", "b", "ab", "aab") for end in ("", "!", "c")]
    slowest, passed = 0.0, 0
    for _ in range(3000):
        pattern = random_pattern(draw) + draw.choice(["", "!", "c", "$", "(?!b)"])
        try:
            check_rules(with_pattern(pattern))
            rule = pre_tokenizers.Split(Regex(pattern), "isolated")
        except Exception:  # refused, or no pattern of Oniguruma
            continue
        passed += 1
        began = time.thread_time()
        for text in texts:
            # the library panics, which is no Exception, once a pattern takes 10 million steps
            rule.pre_tokenize_str(text)
        slowest = max(slowest, time.thread_time() - began)

    assert passed > 300
    # a tenth of it for all texts; a pattern that is refused takes minutes
    assert slowest < SECONDS


@pytest.mark.parametrize(
    "rules, message",
    [
        (
            {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 101}},
            "make a text 101 times as long; allowed: 100 times",
        ),
        (
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [
                        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 20}
                    ]
                    * 3,
                }
            },
            "make a text 8000 times as long",
        ),
        (
            {"model": {"type": "WordPiece", "max_input_chars_per_word": 1001}},
            "has max_input_chars_per_word 1001; allowed: at most 1000",
        ),
        (
            {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a" * 257, -1.0]]}},
            "has a piece of 257 characters; allowed: at most 256",
        ),
        (
            {"model": {"type": "BPE", "end_of_word_suffix": "w" * 101}},
            "has end_of_word_suffix",
        ),
    ],
)
def test_other_rules_that_multiply_work_are_refused(rules, message):
    with pytest.raises(CheckpointError, match=message):
        check_rules(rules)


def test_the_longest_word_that_is_allowed_is_quick():
    vocabulary = {"[UNK]": 0, "a": 1, "##a": 2}
    model = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=1000)
    began = time.thread_time()

    assert len(Tokenizer(model).encode("a" * 1000).ids) == 1000
    assert time.thread_time() - began < SECONDS
