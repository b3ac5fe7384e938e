"""One system, or two compared, in a process of its own: the order is its argument, the figures its one line."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from varlen_bench.memory.cases import Case, Name

Task: TypeAlias = Literal["memory", "speed"]


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to do.

    Attributes:
        task: `memory` of a system, or `speed` with and without the arena.
        system: its name; of no use to `speed`.
        folder: of the checkpoint.
        case: in JSON.
        device: `cpu` or `cuda`.
        threads: cores that torch may use.
    """

    task: Task
    system: Name
    folder: str
    case: dict[str, Any]
    device: str
    threads: int


def carry_out(order: Order) -> dict[str, Any]:
    """Return the figures: `memory` and, of our system, `plan`; or `speed`."""
    import torch

    from varlen_bench.memory import memory, speed, systems

    torch.set_num_threads(order.threads)
    case, folder = Case.from_json(order.case), Path(order.folder)
    if order.task == "speed":
        return {"speed": asdict(speed.measure_speed(folder, order.device, case))}
    system = systems.load(order.system, folder, order.device, case.max_tokens)
    figures = {"memory": asdict(memory.measure_memory(system, case))}
    if system.arena is not None and system.program is not None:
        figures["plan"] = asdict(memory.plan_figures(system.program, system.device, case))
    return figures


if __name__ == "__main__":
    # Libraries print to stdout: keep it for the figures and send the rest to stderr.
    _figures = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps(carry_out(Order(**json.loads(sys.argv[1])))), file=_figures, flush=True)
