"""Environments of engines that need packages in other versions than varlen."""

from __future__ import annotations

from pathlib import Path

from varlen_bench.peers.engines import EngineName

_ROOT = Path(__file__).parents[3]
# The benchmark's make target makes each from the requirements of this name, beside this file.
_ENVIRONMENTS: dict[EngineName, str] = {
    "openvino-genai": "openvino",
    "vllm": "vllm",
    "llamacpp": "llamacpp",
    "zentorch": "zentorch",
}


def interpreter(engine: EngineName) -> Path | None:
    """Return the Python of an engine's environment; None if it runs in this one.

    Raises:
        RuntimeError: the environment does not exist.
    """
    name = _ENVIRONMENTS.get(engine)
    if name is None:
        return None
    python = _ROOT / ".venv" / f"peers-{name}" / "bin/python"
    if not python.exists():
        raise RuntimeError(f"its environment is missing: make .venv/peers-{name}/stamp")
    return python
