"""Several processes that hold one model: ranks and stages."""
