"""Write the pages that are made from code, or their tables: `python .ci/write_reference.py`.

The tables are made from `EngineConfig`, the metric catalogue, the commands, the tasks, the parameters of requests and
the families of models, so they always agree with the code.
"""

from collections.abc import Iterable
from pathlib import Path
from string import Template

from commands_page import commands_page
from layers_table import architecture_page
from models_tables import models_page
from wire_tables import wire_page

from varlen.config import SETTINGS
from varlen.in_process.encoder import EncoderSettings
from varlen.in_process.generator import GeneratorSettings
from varlen.in_process.model import ModelSettings
from varlen.parameter import Parameter
from varlen.tasks import ITERATIVE_TASKS, ONE_SHOT_TASKS
from varlen.telemetry.metrics import METRICS, Metric
from varlen.wire.rows import DEFAULT_MAX_ROWS

DOCS = Path(__file__).resolve().parents[1] / "docs" / "reference"
COMMAND = "python .ci/write_reference.py"

# The first setting of each section, in the order of the class.
_SECTIONS = {
    "task": "What runs",
    "policy": "Batching",
    "arena_bytes": "Limits",
    "max_running_sequences": "Generation",
    "response_cache_bytes": "Response cache",
    "warmup_seconds": "Cost measurement",
    "log_level": "Log",
}
# How the names of a section's metrics begin.
_METRIC_SECTIONS = {
    "Requests and queue": (
        "varlen_request",
        "varlen_refused",
        "varlen_queue",
        "varlen_open",
        "varlen_draining",
    ),
    "Batches": (
        "varlen_sequences",
        "varlen_tokens",
        "varlen_padding",
        "varlen_batch",
        "varlen_busy",
        "varlen_slots",
        "varlen_split",
        "varlen_worker",
        "varlen_scheduling",
    ),
    "Generation": (
        "varlen_time",
        "varlen_running",
        "varlen_waiting",
        "varlen_prefill",
        "varlen_decode",
        "varlen_draft",
        "varlen_preemptions",
        "varlen_order",
        "varlen_kv",
        "varlen_prefix",
        "varlen_grammar",
    ),
    "Memory": ("varlen_weight", "varlen_arena", "varlen_plan", "varlen_cuda"),
    "Response cache": ("varlen_response_cache",),
    "Adapters": ("varlen_adapter",),
}

_CONFIGURATION = Template("""\
# Configuration

<!-- Written by `$command` from backend/varlen/config.py. -->

The engine's settings are `parameters` of a model's `config.pbtxt`.
Each has a default, so a file with the one line `backend: "varlen"` is complete.
An unknown setting, or a value that is not allowed, is an error at load. The message names the allowed values.

## Set a value

In `config.pbtxt`, where every value is a string:

```
parameters { key: "max_batch_tokens" value: { string_value: "8192" } }
```

While a model is fetched; this also sets `max_batch_size`:

```sh
varlen fetch intfloat/e5-small-v2 --name e5 --set max_batch_tokens=8192 --set dtype=fp32
```

In process, without a server:

```python
Encoder.from_pretrained("model_repository/e5/1", max_batch_tokens=8192, dtype="fp32")
Generator.from_pretrained("model_repository/tiny_gpt2/1", max_running_sequences=16, dtype="fp32")
```

`Encoder.from_pretrained` takes $encoder.
It always uses the policy `token_budget` and measures no costs.

`Generator.from_pretrained` takes $generator.

Neither limits the queue or the length of texts.
$sections""")
_SERVER_FIELDS = [
    (
        "`max_batch_size`",
        f"Largest number of rows in one request, at least 1. The default is {DEFAULT_MAX_ROWS}."
        " A batch holds rows of many requests, so it may be larger."
        " The tasks `generate` and `translate` take one prompt per request: leave it out, or 0.",
    ),
    (
        "`model_transaction_policy`",
        "For the tasks `generate` and `translate`. `decoupled: true`, the default, streams answers, over gRPC streams,"
        " `/generate` and `/generate_stream`. `decoupled: false` sends one response, over plain gRPC and `/infer` too.",
    ),
    (
        "`input`, `output`",
        "If absent, they are completed from the task. If present, they are checked."
        " With `--disable-auto-complete-config` they and `max_batch_size` are needed; the error has the lines to add.",
    ),
    (
        "`instance_group`",
        "One instance per device; more are refused. `kind: KIND_GPU gpus: [ 1 ]` gives it the second GPU."
        " With another kind, `cuda` is the first GPU. A `rate_limiter` limits nothing.",
    ),
    (
        "`dynamic_batching`",
        "Has no use: varlen forms batches itself. The server still waits for `max_queue_delay_microseconds`.",
    ),
    (
        "`response_cache`",
        "varlen's own cache, of 64 MiB unless `response_cache_bytes` is set. Refused on a server with a cache"
        " (`--cache-config`), which ignores shapes and parameters.",
    ),
    ("`model_warmup`", "Its rows run once; those that the model refuses are skipped."),
    ("`sequence_batching`, `batch_input`, `batch_output`", "Refused."),
    (
        "`version_policy`, `optimization`, `metric_tags`, `label_filename`, ...",
        "Are the server's own, or have no effect.",
    ),
]

_METRICS = Template("""\
# Metrics

<!-- Written by `$command` from backend/varlen/telemetry/metrics.py. -->

The server's `/metrics` page (`curl 127.0.0.1:8002/metrics`) has these metrics of each model.
Every series has the labels `model`, `version` and `instance`.
A metric with a label of its own has one series for each of its values.
Values are updated twice a second.
The upper bounds of a histogram's buckets double: $seconds seconds, $counts for counts.
$sections""")


def configuration_page() -> str:
    """Return the text of docs/reference/configuration.md."""
    names = list(SETTINGS)
    starts = [names.index(first) for first in _SECTIONS]
    parts = []
    for title, begin, end in zip(_SECTIONS.values(), starts, [*starts[1:], None], strict=True):
        parts += [f"\n## {title}\n", *(_setting_text(name) for name in names[begin:end])]
    parts.append(_section("Fields of the server", "field, meaning", _SERVER_FIELDS))
    return _CONFIGURATION.substitute(
        command=COMMAND,
        encoder=_settings_in(EncoderSettings),
        generator=_settings_in(GeneratorSettings),
        sections="".join(parts),
    )


def metrics_page() -> str:
    """Return the text of docs/reference/metrics.md."""
    parts = []
    for title, prefixes in _METRIC_SECTIONS.items():
        rows = [_metric_row(metric) for metric in METRICS if metric.startswith(prefixes)]
        parts.append(_section(title, "metric, kind, label, unit, description", rows))
    return _METRICS.substitute(
        command=COMMAND, seconds=_range("seconds"), counts=_range(""), sections="".join(parts)
    )


def _settings_in(kind: type[ModelSettings]) -> str:
    """Return the names of the settings that a model in process takes."""
    return ", ".join(f"`{name}`" for name in SETTINGS if name in kind.__annotations__)


def _setting_text(name: str) -> str:
    """Return the part of the page on one setting, which links can point to."""
    setting = SETTINGS[name]
    default = "of the checkpoint" if setting.default is None else f"`{setting.default}`".lower()
    return (
        f"\n### `{name}`\n\nDefault: {default}. Allowed: {setting.allowed}.\n"
        f"\n{setting.description}{_tasks_note(setting)}\n\n*When to change it:* {setting.when}\n"
    )


def _tasks_note(setting: Parameter) -> str:
    """Return a sentence on the tasks that ignore a setting, if there are any."""
    iterative = " and ".join(f"`{task}`" for task in ITERATIVE_TASKS)
    notes = {
        ITERATIVE_TASKS: f" Only for {iterative}.",
        ("generate",): " Only for `generate`.",
        ONE_SHOT_TASKS: f" Ignored by {iterative}.",
    }
    return notes.get(setting.tasks, "")


def _metric_row(metric: Metric) -> tuple[str, ...]:
    values = ", ".join(metric.label_values)
    label = f"`{metric.label}`: {values or 'names of the model'}" if metric.label else ""
    return f"`{metric.value}`", metric.kind.lower(), label, metric.unit, f"{metric.description}."


def _range(unit: str) -> str:
    """Return the first and the last bucket of the histograms of a unit."""
    buckets = next(each.buckets for each in METRICS if each.buckets and each.unit == unit)
    return f"from {buckets[0]:g} to {buckets[-1]:g}"


def _section(title: str, header: str, rows: Iterable[tuple[str, ...]]) -> str:
    columns = header.split(", ")
    table = [columns, ["---"] * len(columns), *rows]
    lines = ("| " + " | ".join(row) + " |" for row in table)
    return "\n".join([f"\n## {title}\n", *lines, ""])


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {
        "configuration.md": configuration_page(),
        "metrics.md": metrics_page(),
        "commands.md": commands_page(COMMAND),
        "wire.md": wire_page(DOCS / "wire.md"),
        "../concepts/architecture.md": architecture_page(DOCS / "../concepts/architecture.md"),
        "../start/models.md": models_page(DOCS / "../start/models.md"),
    }


def main() -> None:
    """Write the pages."""
    for name, text in pages().items():
        (DOCS / name).write_text(text)


if __name__ == "__main__":
    main()
