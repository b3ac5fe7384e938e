"""The old place of `paper.lengths`, for the memory benchmark."""

from varlen_tools.show_plan.paper import lengths

__all__ = ["lengths"]
