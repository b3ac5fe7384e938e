"""Facts that several files of deploy/ share with each other and with the code agree."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.ci.scripts import PROJECT, load_script
from varlen.telemetry.metrics import METRICS
from varlen_tools.drain import drain
from varlen_tools.run_server import MANAGEMENT, restrictions

pytestmark = pytest.mark.full

DEPLOY = PROJECT / "deploy"
RULES = DEPLOY / "chart/files/rules.yaml"
ADAPTER = DEPLOY / "prometheus-adapter.yaml"
AUTOSCALING = DEPLOY / "chart/templates/autoscaling.yaml"
DEPLOYMENT = DEPLOY / "chart/templates/deployment.yaml"
INFERENCE_SERVICE = DEPLOY / "kserve/inferenceservice.yaml"
SERVING_RUNTIME = DEPLOY / "kserve/servingruntime.yaml"
SERVER_PAGE = PROJECT / "docs/operating/server.md"
WITH_QUERIES = [RULES, PROJECT / "tests/deploy/rules_test.yaml", ADAPTER, AUTOSCALING]
WITH_QUERIES += [INFERENCE_SERVICE, DEPLOY / "chart/files/dashboard.json"]
# What the command needs beyond its time-out, to start and to look once more.
SPARE_SECONDS = 10

write_dashboard = load_script("write_dashboard")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def recorded() -> set[str]:
    """Return the series that the recording rules make."""
    rules = [rule for group in load(RULES)["groups"] for rule in group["rules"]]
    return {rule["record"] for rule in rules if "record" in rule}


def adapted() -> set[str]:
    """Return the metrics that the adapter gives the autoscaler of Kubernetes."""
    return {rule["name"]["as"] for rule in load(ADAPTER)["rules"]["custom"]}


def options_of(command: list[str]) -> dict[str, float]:
    """Return the numbers of options by name."""
    pairs = [word.split("=") for word in command if re.match(r"--[a-z-]+=[\d.]+$", word)]
    return {name: float(value) for name, value in pairs}


@pytest.mark.parametrize("path", WITH_QUERIES, ids=lambda path: path.name)
def test_every_metric_exists(path):
    words = re.findall(r"(?<![\w:-])varlen[_:][a-z_:]+(?![\w-])", path.read_text())
    known = {metric.value for metric in METRICS} | recorded() | adapted()

    assert words
    assert {word.removesuffix("_bucket") for word in words} - known == set()


def test_the_autoscaler_asks_for_the_metrics_that_the_adapter_has():
    asked = re.findall(r'\(dict "name" "(\w+)"', AUTOSCALING.read_text())

    assert set(asked) == adapted()


def test_the_dashboard_is_the_one_that_is_written():
    committed = write_dashboard.PATH.read_text()

    assert committed == write_dashboard.text(), f"run `{write_dashboard.COMMAND}`"


def test_the_default_values_fit_their_schema():
    schema = json.loads((DEPLOY / "chart/values.schema.json").read_text())

    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(load(DEPLOY / "chart/values.yaml"), schema)


def test_the_grace_period_covers_the_drain_and_the_servers_end():
    (container,) = load(SERVING_RUNTIME)["spec"]["containers"]
    hook = options_of(container["lifecycle"]["preStop"]["exec"]["command"])
    server = options_of(container["args"])
    grace = load(INFERENCE_SERVICE)["spec"]["predictor"]["terminationGracePeriodSeconds"]
    assert grace == hook["--timeout"] + server["--exit-timeout-secs"] + SPARE_SECONDS

    formula = f"add .Values.drain.timeoutSeconds .Values.server.exitTimeoutSeconds {SPARE_SECONDS} "
    assert formula in (DEPLOY / "chart/templates/_helpers.tpl").read_text()


@pytest.mark.parametrize(
    "path",
    [DEPLOYMENT, SERVING_RUNTIME, DEPLOY / "Dockerfile", SERVER_PAGE],
    ids=lambda path: path.name,
)
def test_no_client_may_change_a_server_in_production(path):
    text = path.read_text()

    for name, rule in restrictions(MANAGEMENT).items():
        assert f"--{name}={rule}" in text


def test_the_hooks_run_the_command_with_options_that_it_has():
    (container,) = load(SERVING_RUNTIME)["spec"]["containers"]
    program, command, *options = container["lifecycle"]["preStop"]["exec"]["command"]
    known = {f"--{name.replace('_', '-')}" for name in inspect.signature(drain).parameters}
    in_chart = set(re.findall(r"- (--(?:seen|timeout)[a-z-]*)=", DEPLOYMENT.read_text()))

    assert (program, command) == ("varlen", "drain")
    assert set(options_of(options)) == in_chart
    assert in_chart <= known


def test_probes_send_the_request_of_the_proxies():
    haproxy = re.findall(r"body '(.*)'$", (DEPLOY / "haproxy.cfg").read_text(), re.MULTILINE)
    (container,) = load(SERVING_RUNTIME)["spec"]["containers"]

    assert haproxy
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        command = container[name]["exec"]["command"]
        body = json.loads(command[command.index("--data") + 1])
        assert all(json.loads(text) == body for text in haproxy)
