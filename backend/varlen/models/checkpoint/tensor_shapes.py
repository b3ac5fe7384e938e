"""Names and shapes of the tensors that loading a model reads, collected module by module."""


class TensorShapes(dict[str, tuple[int, ...]]):
    """Shapes by tensor name, as torch saves modules."""

    def add_linear(self, name: str, fan_in: int, fan_out: int, *, bias: bool = True) -> None:
        """Add the tensors of a linear layer."""
        self[f"{name}.weight"] = (fan_out, fan_in)
        if bias:
            self[f"{name}.bias"] = (fan_out,)

    def add_norm(self, name: str, size: int, *, bias: bool = True) -> None:
        """Add the tensors of a layer norm; an RMS norm has no bias."""
        self[f"{name}.weight"] = (size,)
        if bias:
            self[f"{name}.bias"] = (size,)
