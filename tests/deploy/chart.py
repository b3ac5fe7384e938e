"""Objects of the chart, rendered by the tools of `make deploy-check`, for tests."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ci.scripts import PROJECT

CHART = PROJECT / "deploy/chart"
_PYTHON = PROJECT / ".deploy-venv/bin/python"


def render(values: Path) -> list[dict[str, Any]]:
    """Return the objects for a file of values; skip the test without the tools."""
    if not _PYTHON.exists():
        pytest.skip("there is no .deploy-venv: run make deploy-check")
    done = subprocess.run(
        [_PYTHON, PROJECT / ".ci/check_deploy.py", f"--render={values}"],
        check=True,
        stdout=subprocess.PIPE,
    )
    return list(yaml.safe_load_all(done.stdout))


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the only container of the Deployment."""
    (deployment,) = [each for each in objects if each["kind"] == "Deployment"]
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return found
