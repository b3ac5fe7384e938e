# mypy: implicit-reexport
# ruff: noqa: F401, F403  # the ops
"""The ops of CPUs: compiled forms, and specifications of others."""

from varlen_kernels.reference.every_op import *

# isort: split
from varlen_kernels.cpu.calls.calls import compiled_form
from varlen_kernels.cpu.choices import beam_step
from varlen_kernels.cpu.products import (
    linear,
    linear_activate,
    linear_packed,
    linear_widened,
)
from varlen_kernels.op_table import OPS

# layouts of weights that only compiled code reads
linear_panels = compiled_form(OPS["linear_panels"])
linear_panels_activate = compiled_form(OPS["linear_panels_activate"])
linear_groups_panels = compiled_form(OPS["linear_groups_panels"])
linear_blocks = compiled_form(OPS["linear_blocks"])
linear_int8_panels = compiled_form(OPS["linear_int8_panels"])
linear_int8_panels_activate = compiled_form(OPS["linear_int8_panels_activate"])
linear_int4_panels = compiled_form(OPS["linear_int4_panels"])
linear_int4_panels_activate = compiled_form(OPS["linear_int4_panels_activate"])
globals().update(
    (name, compiled_form(op)) for name, op in OPS.items() if op.calls and "cpu" in op.forms
)
