"""What the table of ops consists of, see `op_table`.

Nothing here imports Triton or numba: a row describes machine code by the names and kinds of its arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

# Arguments of an op by name. In a program they are symbolic: they have a shape and a dtype.
Arguments: TypeAlias = Mapping[str, Any]
# Shape and dtype of each result.
Results: TypeAlias = Sequence[tuple[Sequence[Any], torch.dtype]]
# Rows and columns of a tensor: axes after the first count as one.
Extent: TypeAlias = tuple[int, int]

# Dtypes of tensors, by letter; "d" is the dtype of a model, for which a function has a name of its own.
DTYPES: Mapping[str, torch.dtype] = {
    "f": torch.float32,
    "e": torch.float64,
    "?": torch.bool,
    "b": torch.int8,
    "u": torch.uint8,
    "i": torch.int32,
    "l": torch.int64,
}
SUFFIXES: Mapping[torch.dtype, str] = {torch.float32: "", torch.bfloat16: "_bf16"}


class Kind(NamedTuple):
    """How a compiled function reads an argument.

    Attributes:
        letter: dtype of the tensor, "." for any; empty for a constant.
        form: "matrix" `[rows, columns]`; "row" `[1, numbers]`, `[0, 0]` for none; "vector"; "address"; "by" the number
            `by`: `[all / number, number]`; "heads": `[number, columns]`; "boxes" by the columns of the matrix `by`:
            `[rows, its columns, rest]`. For a constant: "whole", "real" or "flag".
        by: name of another argument.
        of: name of the argument whose memory this is; it has none of its own.
    """

    letter: str
    form: str
    by: str = ""
    of: str = ""


KINDS: Mapping[str, Kind] = {
    "matrix": Kind("d", "matrix"),
    "row": Kind("d", "row"),
    "cache": Kind("d", "by", by="head_dim"),
    "memory": Kind(".", "address"),
    "bias": Kind("f", "heads", by="num_heads"),
    "fp32": Kind("f", "matrix"),
    "fp32_row": Kind("f", "row"),
    "fp32_vector": Kind("f", "vector"),
    "fp64_vector": Kind("e", "vector"),
    "flags": Kind("?", "vector"),
    "int8": Kind("b", "matrix"),
    "uint8": Kind("u", "matrix"),
    "ids": Kind("i", "vector"),
    "int32": Kind("i", "matrix"),
    "of_beams": Kind("i", "boxes", by="parents"),
    "int64_vector": Kind("l", "vector"),
    "ranks": Kind("l", "address"),
    "whole": Kind("", "whole"),
    "real": Kind("", "real"),
    "flag": Kind("", "flag"),
    "address_of_x": Kind("d", "address", of="x"),
    "address_of_out": Kind("d", "address", of="out"),
    "bits_of_logits": Kind("I", "matrix", of="logits"),
}


class Work(NamedTuple):
    """The work of a function.

    Attributes:
        units: number of units that threads may share.
        multiplications: the multiplications of all units, or as many as take the same time.
    """

    units: int
    multiplications: int


class Function:
    """A compiled function: its arguments and its work.

    Its body is the function of this name in `cpu.bodies`, which gets its first unit, the one after its last, and
    arguments by their names; it returns 0, or 1 if it had too little memory. In memory each tensor is three numbers,
    its address, its rows and its columns, all 0 where it is left out; after them are the constants, a real number as
    the bits of a double.

    Attributes:
        name: name of its code; code for bf16 has a suffix.
        kinds: the kind of each argument.
        tensors, constants: names of the arguments in memory.
        written: numbers of the tensors that it writes.
        body: name of its body.
        work: returns its work, given the extents of its tensors, and its constants.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        work: Callable[[Sequence[Extent], Sequence[float]], Work],
        body: str = "",
    ) -> None:
        """Declare a function.

        Args:
            name, work, body: see the attributes; the body has this name by default.
            arguments: name:kind of each argument that it reads, name=kind of each tensor that it writes.
        """
        self.name, self.work, self.body = name, work, body or name
        pairs = [each.replace("=", ":").split(":") for each in arguments.split()]
        self.kinds = {key: KINDS[kind] for key, kind in pairs}
        own = [key for key, kind in self.kinds.items() if not kind.of]
        self.tensors = [key for key in own if self.kinds[key].letter]
        self.constants = [key for key in own if not self.kinds[key].letter]
        letters = [self.kinds[key].letter for key in self.tensors]
        self.written = [i for i, key in enumerate(self.tensors) if f"{key}=" in arguments]
        self._dtypes = [DTYPES.get(letter) for letter in letters]
        self._of_model = [i for i, letter in enumerate(letters) if letter == "d"]
        self._read_fp32 = [i for i, x in enumerate(letters) if x == "f" and i not in self.written]

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of its code."""
        suffixes = SUFFIXES.values() if self._of_model else ("",)
        return tuple(self.name + suffix for suffix in suffixes)

    def entry_for(self, tensors: Sequence[Any]) -> str | None:
        """Return the name of the code for such tensors; None if there is none."""
        for tensor, dtype in zip(tensors, self._dtypes, strict=True):
            if dtype is not None and tensor is not None and tensor.dtype != dtype:
                return None
        of_model = None
        for i in self._of_model:
            if tensors[i] is not None:
                dtype = tensors[i].dtype
                if of_model is not None and dtype != of_model:
                    return None
                of_model = dtype
        suffix = "" if of_model is None else SUFFIXES.get(of_model)
        return None if suffix is None else self.name + suffix

    def as_read(self, tensors: list[Any]) -> list[Any]:
        """Return tensors as it reads them: numbers of another precision become fp32."""
        for i in self._read_fp32:
            x = tensors[i]
            if isinstance(x, Tensor) and x.dtype != torch.float32 and x.is_floating_point():
                tensors[i] = x.float()
        return tensors

    def of(self, *, where: Callable[[Arguments], bool] | None = None, **given: Any) -> "Call":
        """Return a call, see there."""
        return Call(self, given, where)


class Bound(NamedTuple):
    """A function with what it gets for one call of an op."""

    function: Function
    tensors: Sequence[Any]
    constants: Sequence[float]

    @property
    def entry(self) -> str | None:
        """The name of its code for these tensors; None if there is none."""
        return self.function.entry_for(self.tensors)


class Call:
    """How an op, or a part of it, runs a compiled function."""

    def __init__(
        self, function: Function, given: Arguments, where: Callable[[Arguments], bool] | None
    ) -> None:
        """Declare a call.

        Args:
            function: the compiled function.
            given: the source of each argument: the name of an argument or a result of the op, or of a field of one; a
                number; or a function of all arguments. By default the argument of the same name, or nothing.
            where: whether it runs, given all arguments; None for always.
        """
        assert set(given) <= set(function.kinds), f"{function.name} takes no {given}"
        self.function, self._where = function, where
        self._tensors = [_source(given.get(key, key)) for key in function.tensors]
        self._constants = [
            (_source(given.get(key, key)), float if function.kinds[key].form == "real" else int)
            for key in function.constants
        ]

    def bind(self, arguments: Arguments) -> Bound | None:
        """Return the function with its arguments; None if it does not run."""
        if self._where is not None and not self._where(arguments):
            return None
        get = arguments.get
        tensors = [get(x) if isinstance(x, str) else x(arguments) for x in self._tensors]
        constants = [
            kind(arguments[x] if isinstance(x, str) else x(arguments))
            for x, kind in self._constants
        ]
        return Bound(self.function, self.function.as_read(tensors), constants)


class Op:
    """An op.

    Attributes:
        name: its name.
        specification: the function of `reference` whose signature and meaning all forms have.
        operands, attributes: names of its positional arguments and of its keyword arguments, without `out`.
        forms: "cpu" and "fused" where these devices have a form of their own; others run the specification.
        calls: the compiled functions that run it on a CPU, one after another.
        in_place: number of the operand that may be `out`, for each result.
        results: names of its results.
        runs: whether the functions are faster than the specification for these arguments.
        check: raises an exception for wrong arguments, given by name; without it the functions need no check.
    """

    def __init__(
        self,
        specification: Callable[..., Any],
        result: Callable[[Any], Results] | None,
        forms: str = "",
        *calls: Call,
        name: str = "",
        in_place: Sequence[int] = (),
        results: str = "out",
        runs: Callable[[Any], bool] | None = None,
        check: Callable[..., object] | None = None,
    ) -> None:
        """Declare an op.

        Args:
            specification, forms, calls, name, in_place, results, runs, check: see the attributes.
            result: shape and dtype of each result, given all arguments; None if it has none, or says so itself.
        """
        self.specification, self.name = specification, name or specification.__name__
        self.forms, self.calls, self.in_place = frozenset(forms.split()), calls, tuple(in_place)
        self.results, self.runs, self.check = tuple(results.split()), runs, check
        self.result = result
        given = signature(specification).parameters.values()
        parameters = [p for p in given if p.name != "out" or p.kind != Parameter.KEYWORD_ONLY]
        self.operands = tuple(p.name for p in parameters if p.kind != Parameter.KEYWORD_ONLY)
        self.attributes = tuple(p.name for p in parameters if p.kind == Parameter.KEYWORD_ONLY)
        self._required = {p.name for p in parameters if p.default is Parameter.empty}
        self._defaults = {p.name: p.default for p in parameters} | dict.fromkeys(self._required)
        self._checked = tuple(signature(check).parameters) if check else ()

    def named(self, operands: Sequence[Any], attributes: Arguments) -> dict[str, Any]:
        """Return all arguments by name.

        Raises:
            TypeError: there are too many operands, or an argument is missing or has another name.
        """
        arguments = self._defaults.copy()
        arguments.update(zip(self.operands, operands, strict=False))
        arguments.update(attributes)
        given = len(operands) + len(attributes)
        if given != len(self._defaults) or len(arguments) != given:
            self._check_names(operands, attributes)
        return arguments

    def _check_names(self, operands: Sequence[Any], attributes: Arguments) -> None:
        given = {*self.operands[: len(operands)], *attributes}
        if len(operands) > len(self.operands):
            raise TypeError(
                f"{self.name} has {len(operands)} operands; allowed: {', '.join(self.operands)}"
            )
        if missing := self._required - given:
            raise TypeError(f"{self.name} lacks {', '.join(sorted(missing))}")
        if unknown := given - self._defaults.keys():
            allowed = ", ".join(self.attributes)
            raise TypeError(f"{self.name} has {', '.join(sorted(unknown))}; allowed: {allowed}")

    def bound(self, arguments: Arguments) -> list[Bound]:
        """Return the compiled functions with their arguments; none if it has none.

        Args:
            arguments: its arguments and its results, by name.
        """
        bound = [call.bind(arguments) for call in self.calls]
        return [each for each in bound if each is not None]

    def runs_compiled(self, arguments: Arguments) -> bool:
        """Return whether compiled functions are faster than the specification."""
        return self.runs is None or self.runs(arguments)

    def check_arguments(self, arguments: Arguments, out: Any) -> None:
        """Raise the exception of the specification for wrong arguments."""
        if self.check is not None:
            self.check(*[arguments.get(name, out) for name in self._checked])


def _source(given: Any) -> str | Callable[[Arguments], Any]:
    """Return the source of an argument: its name in the op, or what finds it."""
    if callable(given):
        found: Callable[[Arguments], Any] = given
        return found
    if not isinstance(given, str):
        return lambda _: given
    name, _, field = given.partition(".")
    return (lambda arguments: getattr(arguments[name], field, None)) if field else name
