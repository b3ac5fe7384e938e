"""tokenizer.json and tokenizer_config.json, checked against each other.

varlen tokenizes with tokenizer.json. In transformers, some fields of tokenizer_config.json override it, so a
disagreement is refused. For tokenizers of generating models, releases differ in which fields do: tokens that are added
at the ends of a text, and a space before it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from varlen.errors import CheckpointError
from varlen.models.checkpoint.family import Family
from varlen.models.checkpoint.files import (
    TOKENIZER,
    Json,
    has_file,
    read_object,
    read_optional_object,
    read_text,
    show,
)
from varlen.models.checkpoint.tokenizer_rules import check_rules
from varlen.request.row_parameters import TruncationSide

_CONFIG = "tokenizer_config.json"
# Classes that put no space before a text where tokenizer_config.json does not say it.
_CLASSES_WITHOUT_SPACE = tuple(
    f"{name}Tokenizer{form}"
    for name in ("Bart", "GPT2", "Qwen2", "Roberta")
    for form in ("", "Fast")
)


def check_byte_pair_tokenizer(config: Json, tokenizer: Json, class_name: str) -> None:
    """Raise CheckpointError unless both files give the same token ids."""
    first, last = added_tokens(tokenizer)
    for key, token_key, added in (
        ("add_bos_token", "bos_token", first),
        ("add_eos_token", "eos_token", last),
    ):
        token = token_text(config.get(token_key))
        # transformers adds no token that the tokenizer does not have
        if config.get(key) and token is not None and added != [token]:
            _refuse(config, key, f"tokenizer.json adds {show(added)} there, not {show(token)}")
        if config.get(key) is False and token is not None and token in added:
            _refuse(config, key, f"tokenizer.json adds {show(added)} there")
    asked = config.get("add_prefix_space")
    if asked is None and class_name in _CLASSES_WITHOUT_SPACE:
        asked = False
    if asked is not None and bool(asked) != _adds_space(tokenizer):
        _refuse(
            config,
            "add_prefix_space",
            f"tokenizer.json {'does not add' if asked else 'adds'} a space",
        )


def token_text(token: Any) -> str | None:
    """Return the text of a token, which may be an object with its properties."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _refuse(config: Json, key: str, found: str) -> None:
    default = "" if key in config else " (its default)"
    raise CheckpointError(
        f"{_CONFIG} has {key} {show(config.get(key, False))}{default}, and {found}; make them agree"
    )


def added_tokens(tokenizer: Json) -> tuple[list[str], list[str]]:
    """Return the tokens that tokenizer.json puts before and after a text."""
    before: list[str] = []
    after: list[str] = []
    for part in _parts(tokenizer.get("post_processor"), "processors"):
        if part.get("type") != "TemplateProcessing":
            continue
        into = before
        for piece in part.get("single") or []:
            if "Sequence" in piece:
                into = after
            elif "SpecialToken" in piece:
                into.append(piece["SpecialToken"].get("id"))
    return before, after


def _adds_space(tokenizer: Json) -> bool:
    for part in _parts(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if part.get("type") == "ByteLevel" and part.get("add_prefix_space"):
            return True
        if part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return True
    normalizers = _parts(tokenizer.get("normalizer"), "normalizers")
    return any(part.get("type") == "Prepend" for part in normalizers)


def _parts(component: Any, key: str) -> Iterator[Json]:
    """Yield the component, or its parts if it is a sequence of them."""
    if not isinstance(component, dict):
        return
    if component.get("type") == "Sequence":
        for part in component.get(key) or []:
            yield from _parts(part, key)
    else:
        yield component


_CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
DEFAULT_TEMPLATE = "default"
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())
# The source language of classes that put its token around a text, where tokenizer_config.json does not name it.
_SOURCE_LANGUAGES = {
    **dict.fromkeys(("NllbTokenizer", "NllbTokenizerFast"), "eng_Latn"),
    **dict.fromkeys(("MBartTokenizer", "MBartTokenizerFast"), "en_XX"),
    **dict.fromkeys(("MBart50Tokenizer", "MBart50TokenizerFast"), "en_XX"),
    "M2M100Tokenizer": "en",
}
# Classes whose fields override tokenizer.json.
_WORD_PIECE_CLASSES = tuple(
    f"{name}Tokenizer{form}"
    for name in ("Bert", "DistilBert", "Electra", "MPNet")
    for form in ("", "Fast")
)
_BYTE_PAIR_CLASSES = ("RobertaTokenizer", "RobertaTokenizerFast")
_TYPES = "token_type_ids"
# Classes that give pairs token types where tokenizer_config.json has no model_input_names.
_TYPE_CLASSES = frozenset(
    f"{name}Tokenizer{form}"
    for name in (
        "Bert ConvBert DPRContextEncoder DPRQuestionEncoder Deberta DebertaV2 Electra FNet LayoutLM"
        " Lxmert MobileBert SqueezeBert"
    ).split()
    for form in ("", "Fast")
)


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """What the files of a tokenizer say beside how it tokenizes.

    Attributes:
        max_length: length at which the original library truncates; None if no file has it.
        chat_templates: Jinja sources that make a prompt of chat messages, by name; DEFAULT_TEMPLATE is without a name.
        gives_types: whether that class gives a pair token types.
    """

    max_length: int | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    class_name: str = ""
    gives_types: bool = False
    truncation_side: TruncationSide = "right"


def read_tokenizer_settings(
    folder: Path,
    family: Family[object],
    model_config: Json,
    *,
    lowercase: bool,
    reads_config: bool = True,
) -> TokenizerSettings:
    """Return the settings in a checkpoint folder.

    Args:
        model_config: content of config.json, whose `tokenizer_class` counts if tokenizer_config.json has none.
        reads_config: whether tokenizer_config.json counts. For StaticEmbedding it does not; there tokenizer.json has
            the limit.

    Raises:
        CheckpointError: a file is missing or damaged, or the two disagree on what changes token ids.
    """
    if not has_file(folder, TOKENIZER):
        raise CheckpointError(
            f"{folder} has no tokenizer.json; save the checkpoint with its fast tokenizer, or let"
            " `varlen fetch` make it of older files"
        )
    tokenizer = read_object(folder, TOKENIZER)
    check_rules(tokenizer)
    normalizer = tokenizer.get("normalizer")
    if lowercase and not _lowercases(normalizer):
        raise CheckpointError(
            "sentence_bert_config.json has do_lower_case true, and tokenizer.json does not lowercase;"
            " save tokenizer.json with a normalizer that does"
        )
    default_class = str(model_config.get("tokenizer_class") or family.tokenizer_class)
    if not reads_config or not has_file(folder, _CONFIG):
        return TokenizerSettings(
            max_length=None if reads_config else _stored_limit(tokenizer),
            chat_templates=_read_chat_templates(folder, {}),
            class_name=default_class,
            gives_types=default_class in _TYPE_CLASSES,
            truncation_side=_truncation_side({}, tokenizer),
        )
    config = read_optional_object(folder, _CONFIG)
    class_name = str(config.get("tokenizer_class") or default_class)
    if family.kind != "encoder" or class_name in _BYTE_PAIR_CLASSES:
        check_byte_pair_tokenizer(config, tokenizer, class_name)
        _check_source_language(config, tokenizer, class_name)
    elif class_name in _WORD_PIECE_CLASSES:
        _check_normalizer(config, normalizer, class_name)
    return TokenizerSettings(
        max_length=_read_max_length(config),
        chat_templates=_read_chat_templates(folder, config),
        special_tokens={
            name: text for name in _SPECIAL_TOKENS if (text := token_text(config.get(name)))
        },
        class_name=class_name,
        gives_types=_gives_types(config, class_name),
        truncation_side=_truncation_side(config, tokenizer),
    )


def check_padding_side(folder: Path) -> None:
    """Raise CheckpointError if tokenizer_config.json pads on the left.

    The pipeline of questions would read the context before its question.
    """
    if read_optional_object(folder, _CONFIG).get("padding_side") == "left":
        raise CheckpointError(
            f'{_CONFIG} has padding_side left, and the task "question_answer" reads a question before its context;'
            " allowed: right"
        )


def _truncation_side(config: Json, tokenizer: Json) -> TruncationSide:
    """Return the side that transformers cuts: tokenizer_config.json comes before tokenizer.json."""
    cut = tokenizer.get("truncation")
    stored = str(cut.get("direction", "")).lower() if isinstance(cut, dict) else ""
    side = config.get("truncation_side") or stored or "right"
    for allowed in get_args(TruncationSide):
        if side == allowed:
            return cast(TruncationSide, allowed)
    raise CheckpointError(
        f"{_CONFIG} has truncation_side {show(side)}; allowed: {', '.join(get_args(TruncationSide))}"
    )


def _stored_limit(tokenizer: Json) -> int | None:
    cut = tokenizer.get("truncation")
    limit = cut.get("max_length") if isinstance(cut, dict) else None
    # the library refuses other values when it reads the file
    return limit if isinstance(limit, int) else None


def _gives_types(config: Json, class_name: str) -> bool:
    if "model_input_names" not in config:
        return class_name in _TYPE_CLASSES
    names = config["model_input_names"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{_CONFIG} has model_input_names {show(names)}; allowed: a list of names"
        )
    return _TYPES in names


def _read_max_length(config: Json) -> int | None:
    limit = config.get("model_max_length")
    if limit is None:
        return None
    # transformers writes 1e30 for "no limit"
    if not isinstance(limit, int | float) or isinstance(limit, bool) or limit < 1:
        raise CheckpointError(
            f"{_CONFIG} has model_max_length {limit!r}; allowed: whole numbers from 1"
        )
    return int(limit)


def _read_chat_templates(folder: Path, config: Json) -> Mapping[str, str]:
    """Return the templates in files, else those in tokenizer_config.json, as transformers prefers them."""
    names = {DEFAULT_TEMPLATE: _CHAT_TEMPLATE} if has_file(folder, _CHAT_TEMPLATE) else {}
    for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        names[path.stem] = f"{MORE_TEMPLATES}/{path.name}"
    if names:
        return {name: read_text(folder, file) for name, file in names.items()}
    given = config.get("chat_template")
    if given is None:
        return {}
    if isinstance(given, str):
        return {DEFAULT_TEMPLATE: given}
    found = {}
    for each in given if isinstance(given, list) else [None]:
        name, template = (
            (each.get("name"), each.get("template")) if isinstance(each, dict) else (None, None)
        )
        if not isinstance(name, str) or not isinstance(template, str):
            raise CheckpointError(
                f"{_CONFIG} has chat_template {show(given)}; allowed: a string, or a list of objects with name and"
                " template"
            )
        found[name] = template
    return found


def _check_normalizer(config: Json, normalizer: object, class_name: str) -> None:
    if not isinstance(normalizer, dict) or normalizer.get("type") != "BertNormalizer":
        kind = normalizer.get("type") if isinstance(normalizer, dict) else normalizer
        raise CheckpointError(
            f"tokenizer.json has the normalizer {show(kind)}, and {_CONFIG} the class {class_name},"
            " which replaces it; set tokenizer_class to PreTrainedTokenizerFast to keep it"
        )
    lowercase = config.get("do_lower_case", True)
    strip_accents = config.get("strip_accents")
    wanted = {
        "do_lower_case": (lowercase, normalizer.get("lowercase")),
        # null strips accents if text is lowercased
        "strip_accents": (
            lowercase if strip_accents is None else strip_accents,
            normalizer.get("lowercase")
            if normalizer.get("strip_accents") is None
            else normalizer["strip_accents"],
        ),
        "tokenize_chinese_chars": (
            config.get("tokenize_chinese_chars", True),
            normalizer.get("handle_chinese_chars"),
        ),
    }
    for key, (theirs, ours) in wanted.items():
        if bool(theirs) != bool(ours):
            raise CheckpointError(
                f"{_CONFIG} has {key} {show(theirs)}{'' if key in config else ' (its default)'},"
                f" and the normalizer of tokenizer.json {show(ours)}; make them agree"
            )


def _check_source_language(config: Json, tokenizer: Json, class_name: str) -> None:
    """Raise CheckpointError unless tokenizer.json adds the token of the source language.

    transformers replaces what tokenizer.json adds.
    """
    language = config.get("src_lang") or _SOURCE_LANGUAGES.get(class_name)
    if class_name not in _SOURCE_LANGUAGES or language is None:
        return
    first, last = added_tokens(tokenizer)
    # the second form is for M2M-100
    if not {language, f"__{language}__"} & {*first, *last}:
        default = "" if config.get("src_lang") else " (its default)"
        raise CheckpointError(
            f"{_CONFIG} has src_lang {show(language)}{default}, and tokenizer.json adds {show(first)} before a text"
            f" and {show(last)} after it; save the tokenizer again with that src_lang"
        )


def _lowercases(normalizer: object) -> bool:
    if not isinstance(normalizer, dict):
        return False
    if normalizer.get("type") == "Sequence":
        return any(_lowercases(part) for part in normalizer.get("normalizers") or [])
    return normalizer.get("type") == "Lowercase" or bool(normalizer.get("lowercase"))
