"""The tables of families in docs/start/models.md: tasks and ranks from the registry.

Checkpoints and notes are written by hand, in the page. The first cell of a row has the `model_type` of its families, or
is one of `_FORMS`. A family without a row is an error.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from varlen.models import registry, static
from varlen.models.bert_relatives import RELATIVES
from varlen.models.checkpoint.extraction import CONFIG, SCHEMA_MODEL
from varlen.models.checkpoint.family import Family
from varlen.models.checkpoint.files import Json
from varlen.models.checkpoint.first_releases import to_native
from varlen.models.static import STATIC
from varlen.tasks import TASKS, Task

_COLUMNS = "| `model_type` | checkpoints | tasks | [ranks](../operating/scaling.md#ranks) | notes |"
_TABLE = re.compile(rf"({re.escape(_COLUMNS)}\n\|[-|]+\n)((?:\|.*\n)+)")
_CLASSES = re.compile(r"(\| architecture \| default task \| other tasks \|\n\|[-|]+\n)(?:\|.*\n)+")
# What stands for the tasks of BERT, which the table of `_CLASSES` has.
_AS_BERT = "[all of encoders](#tasks-of-encoders)"
# Rows that have more than a `model_type`, and what their config.json has.
_FORMS: Mapping[str, Sequence[Json]] = {
    "`bert` with the classes of JinaBERT": [
        {"model_type": "bert", "architectures": ["JinaBertModel"]}
    ],
    "`xlm-roberta` with code of Jina": [{"model_type": "jina_embeddings_v3"}],
    "`nomic_bert` with `moe_every_n_layers`": [
        {"model_type": "nomic_bert", "architectures": ["NomicBertMoeModel"]}
    ],
    "`t5`, `mt5` with the architecture `T5EncoderModel`, `MT5EncoderModel`": [
        {"model_type": "t5", "architectures": ["T5EncoderModel"]},
        {"model_type": "mt5", "architectures": ["MT5EncoderModel"]},
    ],
    "no config.json, or `model2vec`": [{"model_type": STATIC}],
    "`qwen2` with `auto_map` and `is_causal`": [{"model_type": "qwen2", "is_causal": False}],
    "`qwen3` with `use_bidirectional_attention`": [{"model_type": "qwen3", "is_causal": False}],
}


def models_page(page: Path) -> str:
    """Return the text of a page with new tasks and ranks in its tables."""
    seen: list[Family[object]] = []
    text = _TABLE.sub(lambda found: found[1] + _rows(found[2], seen), page.read_text())
    text, lists = _CLASSES.subn(lambda found: found[1] + "".join(_class_rows()), text)
    assert lists == 1, f"{page} has {lists} tables of classes"
    families = {**registry.FAMILIES, **registry.ENCODERS_BY_NAME, STATIC: static.FAMILY}
    absent = [name for name, family in families.items() if all(family is not each for each in seen)]
    assert not absent, f"{page} has no row of {absent}: add it to a table, with empty tasks"
    return text


def _rows(lines: str, seen: list[Family[object]]) -> str:
    """Return the rows of a table; adds their families to `seen`."""
    rows = []
    for line in lines.splitlines():
        name, checkpoints, _, _, notes = (cell.strip() for cell in line[1:-1].split("|"))
        if CONFIG in name or SCHEMA_MODEL in name:
            found = {("`extract`", "")}
        else:
            configs = _FORMS.get(name) or _plain(name)
            families = [registry.family_of(config) for config in configs]
            seen += families
            found = {
                (_tasks(family, config), "yes" if family.is_divisible else "")
                for family, config in zip(families, configs, strict=True)
            }
        assert len(found) == 1, f"the row {name} has families of several tasks: {found}"
        rows.append(_line((name, checkpoints, *found.pop(), notes)))
    return "".join(rows)


def _plain(name: str) -> list[Json]:
    """Return config.json of each `model_type` in a cell, as a load reads it."""
    types: list[Json] = [{"model_type": each} for each in re.findall("`(.*?)`", name)]
    parts = registry.TEXT_PARTS
    return [
        to_native(
            registry.text_part({**each, "text_config": {}}) if each["model_type"] in parts else each
        )
        for each in types
    ]


def _tasks(family: Family[object], config: Json) -> str:
    """Return the tasks of a family, as a cell has them."""
    # forms of their own have these two: see the page
    served = {*family.tasks} - {"token_embed", "extract"}
    if served == {*RELATIVES["bert"].family.tasks} - {"token_embed", "extract"}:
        return _AS_BERT
    if family.kind == "decoder" and not family.is_causal(config):
        served.discard("generate")
    return _named(served)


def _class_rows() -> list[str]:
    """Return a row for each class of BERT, with its tasks."""
    family = RELATIVES["bert"].family
    return [
        _line(
            (
                f"`{name.replace('Bert', '…')}`",
                f"`{task}`",
                _named(
                    {
                        "embed",
                        "hidden",
                        *(each for each in family.heads if family.heads[each] == name),
                    }
                    - {task}
                ),
            )
        )
        for name, task in family.architectures.items()
    ]


def _named(tasks: Collection[Task]) -> str:
    return ", ".join(f"`{task}`" for task in TASKS if task in tasks)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |")
