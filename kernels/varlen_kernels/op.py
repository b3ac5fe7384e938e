"""What the table of ops consists of, see `op_table`.

Nothing here imports torch, Triton or numba: a row describes machine code by the names and kinds of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from operator import attrgetter, itemgetter
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch

# Arguments of an op by name. In a program they are symbolic: they have a shape and a dtype.
Arguments: TypeAlias = Mapping[str, Any]
# Whether compiled functions are faster than the specification, given the operands and the attributes.
Runs: TypeAlias = Callable[[Sequence[Any], Arguments], bool]
# Shape and dtype of each result.
Results: TypeAlias = "Sequence[tuple[Sequence[Any], torch.dtype]]"
# Rows and columns of a tensor: axes after the first count as one.
Extent: TypeAlias = tuple[int, int]

# Names of the dtypes of tensors, by letter; "d" is the dtype of a model, for which a function has a name of its own.
DTYPES: Mapping[str, str] = {
    "f": "float32",
    "e": "float64",
    "?": "bool",
    "b": "int8",
    "u": "uint8",
    "i": "int32",
    "l": "int64",
}
SUFFIXES: Mapping[str | None, str] = {"float32": "", "bfloat16": "_bf16"}
# Dtypes whose every number is one of fp32.
_NARROW = ("float16", "bfloat16")


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
    "of_ranks": Kind("d", "by", by="ranks"),
    "of_width": Kind("d", "by", by="width"),
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


# Work, given the extents of the tensors of a function, and its constants.
WorkOf: TypeAlias = Callable[[Sequence[Extent], Sequence[float]], Work]
# Multiplications that take as long as one number of a norm, an activation or a copy.
_OF_NUMBER = 32


def work_of_rows(tensor: int, factor: int = _OF_NUMBER) -> WorkOf:
    """Return the work of a function whose units are the rows of a tensor.

    Args:
        tensor: its number; -1 is the last one.
        factor: multiplications that take as long as one number of it.
    """

    def work(extents: Sequence[Extent], _: Sequence[float]) -> Work:
        rows, columns = extents[tensor]
        return Work(rows, factor * rows * columns)

    return work


class Function:
    """A compiled function: its arguments and its work.

    Its body is the function of this name in `cpu.bodies`, which gets its first unit, the one after its last, and
    arguments by their names; it returns 0, or 1 if it had too little memory. In memory each tensor is three numbers,
    its address, its rows and its columns, all 0 where it is left out; after them are the constants, a real number as
    the bits of a double.

    Attributes:
        tensors, constants: names of the arguments in memory.
        written: numbers of the tensors that it writes.
        pack: returns its arguments as they lie in memory, given the numbers of its tensors, then its constants.
        work: returns its work, given the extents of its tensors, and its constants.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        work: WorkOf,
        body: str = "",
    ) -> None:
        """Declare a function.

        Args:
            arguments: name:kind of each argument that it reads, name=kind of each tensor that it writes.
        """
        self.name, self.work, self.body = name, work, body or name
        pairs = [each.replace("=", ":").split(":") for each in arguments.split()]
        self.kinds = {key: KINDS[kind] for key, kind in pairs}
        own = [key for key, kind in self.kinds.items() if not kind.of]
        self.tensors = [key for key in own if self.kinds[key].letter]
        self.constants = [key for key in own if not self.kinds[key].letter]
        formats = ["d" if self.kinds[key].form == "real" else "q" for key in self.constants]
        self.pack = Struct("qqq" * len(self.tensors) + "".join(formats)).pack
        letters = [self.kinds[key].letter for key in self.tensors]
        self.written = [i for i, key in enumerate(self.tensors) if f"{key}=" in arguments]
        self._dtypes = [DTYPES.get(letter) for letter in letters]
        self._of_model = [i for i, letter in enumerate(letters) if letter == "d"]
        self._read_fp32 = [i for i, x in enumerate(letters) if x == "f" and i not in self.written]

    @property
    def entries(self) -> tuple[str, ...]:
        suffixes = SUFFIXES.values() if self._of_model else ("",)
        return tuple(self.name + suffix for suffix in suffixes)

    def entry_for(self, dtypes: Sequence[torch.dtype | None]) -> str | None:
        """Return the name of the code for these dtypes; None if there is none."""
        names = _names(dtypes)
        for given, dtype in zip(names, self._dtypes, strict=True):
            if None not in (given, dtype) and given != dtype:
                return None
        suffixes = {SUFFIXES.get(dtype) for i in self._of_model if (dtype := names[i])}
        suffix = suffixes.pop() if suffixes else ""
        return None if suffixes or suffix is None else self.name + suffix

    def widened(self, dtypes: Sequence[torch.dtype | None]) -> list[int]:
        """Return the numbers of the tensors of 16 bits that it reads as fp32."""
        names = _names(dtypes)
        return [i for i in self._read_fp32 if names[i] in _NARROW]

    def of(self, *, where: Callable[[Arguments], bool] | None = None, **given: Any) -> Call:
        return Call(self, given, where)


def _names(dtypes: Sequence[torch.dtype | None]) -> list[str | None]:
    """Return the name of each dtype, which torch prints behind its own."""
    return [None if each is None else str(each).rpartition(".")[2] for each in dtypes]


class Bound(NamedTuple):
    """A function with what it gets for one call of an op."""

    function: Function
    tensors: Sequence[Any]
    constants: Sequence[float]


class Call:
    """How an op, or a part of it, runs a compiled function.

    Attributes:
        where: whether it runs, given all arguments; None for always.
        defaults: values of the keys that `bind` reads and that no call changes.
    """

    def __init__(
        self, function: Function, given: Arguments, where: Callable[[Arguments], bool] | None
    ) -> None:
        """Declare a call.

        Args:
            given: the source of each argument: the name of an argument or a result of the op, or of a field of one; a
                number; or a function of all arguments. By default the argument of the same name, or nothing.
        """
        assert set(given) <= set(function.kinds), f"{function.name} takes no {given}"
        self.function, self.where = function, where
        self.defaults: dict[str, Any] = {}
        self._fields: list[tuple[str, str, Callable[[Any], Any]]] = []
        self._found: list[tuple[str, Callable[[Arguments], Any]]] = []
        keys = [self._key_of(name, given.get(name, name)) for name in function.tensors]
        self._num_tensors = len(keys)
        keys += [self._key_of(name, given.get(name, name)) for name in function.constants]
        self._values = itemgetter(*keys)

    def _key_of(self, name: str, source: Any) -> str:
        """Return the key under which `bind` finds an argument of the function."""
        if callable(source):
            key = f"{self.function.name}.{name}"
            self._found.append((key, source))
        elif not isinstance(source, str):
            key = f"={source!r}"
            self.defaults[key] = source
        else:
            key = source
            operand, _, field = source.partition(".")
            if field:
                self._fields.append((key, operand, attrgetter(field)))
            else:
                self.defaults[key] = None
        return key

    def bind(self, arguments: dict[str, Any]) -> Bound:
        """Return the function with its arguments.

        Args:
            arguments: the arguments of the op, by name; more are added.
        """
        for key, operand, field in self._fields:
            arguments[key] = field(arguments[operand])
        for key, find in self._found:
            arguments[key] = find(arguments)
        values = self._values(arguments)
        return Bound(self.function, values[: self._num_tensors], values[self._num_tensors :])


class Op:
    """An op.

    Attributes:
        specification: the function of `reference` whose signature and meaning all forms have.
        operands, attributes: names of its positional arguments and of its keyword arguments, without `out`.
        forms: "cpu" and "fused" where these devices have a form of their own; others run the specification.
        calls: the compiled functions that run it on a CPU, one after another.
        in_place: number of the operand that may be `out`, for each result.
        scratch: the number of results, the last ones, that only its functions read.
        runs: whether the functions are faster than the specification; None if they always are.
        check: raises an exception for wrong arguments; without it the functions need no check.
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
        scratch: int = 0,
        runs: Runs | None = None,
        check: Callable[..., object] | None = None,
    ) -> None:
        """Declare an op.

        Args:
            result: shape and dtype of each result, given all arguments; None if it has none, or says so itself.
        """
        self.specification, self.name = specification, name or specification.__name__
        self.forms, self.calls, self.in_place = frozenset(forms.split()), calls, tuple(in_place)
        self.results, self.runs, self.check = tuple(results.split()), runs, check
        self.scratch = scratch
        self.result = result
        given = signature(specification).parameters.values()
        parameters = [p for p in given if p.name != "out" or p.kind != Parameter.KEYWORD_ONLY]
        self.operands = tuple(p.name for p in parameters if p.kind != Parameter.KEYWORD_ONLY)
        self.attributes = tuple(p.name for p in parameters if p.kind == Parameter.KEYWORD_ONLY)
        self._required = {p.name for p in parameters if p.default is Parameter.empty}
        self._defaults = dict.fromkeys(self.results)
        for call in calls:
            self._defaults |= call.defaults
        self._defaults |= {p.name: p.default for p in parameters} | dict.fromkeys(self._required)
        self._checked = itemgetter(*signature(check).parameters) if check else None
        # what named arguments were given when they were right
        self._right: set[tuple[object, ...]] = set()

    def named(self, operands: Sequence[Any], attributes: Arguments) -> dict[str, Any]:
        """Return all arguments by name, and what else its calls read.

        Raises:
            TypeError: there are too many operands, or an argument is missing or has another name.
        """
        names = (len(operands), *attributes)
        if names not in self._right:
            self._check_names(operands, attributes)
            self._right.add(names)
        arguments = self._defaults.copy()
        arguments.update(zip(self.operands, operands, strict=False))
        arguments.update(attributes)
        return arguments

    def _check_names(self, operands: Sequence[Any], attributes: Arguments) -> None:
        given = {*self.operands[: len(operands)], *attributes}
        if len(operands) > len(self.operands):
            raise TypeError(
                f"{self.name} has {len(operands)} operands; allowed: {', '.join(self.operands)}"
            )
        if missing := self._required - given:
            raise TypeError(f"{self.name} lacks {', '.join(sorted(missing))}")
        if unknown := given.difference(self.operands, self.attributes):
            allowed = ", ".join(self.attributes)
            raise TypeError(f"{self.name} has {', '.join(sorted(unknown))}; allowed: {allowed}")

    def bound(self, arguments: dict[str, Any]) -> list[Bound]:
        """Return the compiled functions with their arguments; none if it has none."""
        return [
            call.bind(arguments)
            for call in self.calls
            if call.where is None or call.where(arguments)
        ]

    def check_arguments(self, arguments: dict[str, Any], out: Any) -> None:
        """Raise the exception of the specification for wrong arguments."""
        if self.check is not None and self._checked is not None:
            if out is not None:
                arguments["out"] = out
            self.check(*self._checked(arguments))
