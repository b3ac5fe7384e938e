"""Names of the server's module `triton_python_backend_utils`, by release, and the fake restricted to them.

`server_api.json` lists them as declarations: `send(response=, flags=)` has two optional parameters, `argN` has no
name, and a declaration without parentheses is a constant or a class. `Restricted` is the fake with these names only:
any other name, method or parameter raises, so a call that a release lacks fails a test.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

# Declarations by name.
Members: TypeAlias = Mapping[str, "Declaration"]

_DECLARATION = re.compile(r"(static )?(\w+)(?:\((.*)\))?")


@dataclass(frozen=True, slots=True)
class Declaration:
    """A name of the module or of a class; without `parameters` it is not called."""

    name: str
    parameters: tuple[str, ...] | None = None
    is_static: bool = False

    @classmethod
    def parse(cls, text: str) -> "Declaration":
        match = _DECLARATION.fullmatch(text)
        assert match, text
        static, name, parameters = match.groups()
        if parameters is None:
            return cls(name)
        return cls(name, tuple(filter(None, parameters.split(", "))), bool(static))

    @property
    def signature(self) -> Signature:
        """The parameters as Python binds them, after `self`."""
        kinds = {True: Parameter.POSITIONAL_ONLY, False: Parameter.POSITIONAL_OR_KEYWORD}
        found = []
        for text in sorted(self.parameters or (), key=lambda text: text.endswith("=")):
            name = text.rstrip("=")
            default = None if text.endswith("=") else Parameter.empty
            found.append(Parameter(name, kinds[name.startswith("arg")], default=default))
        return Signature(found)


@dataclass(frozen=True, slots=True)
class ServerApi:
    """Names of the module, and members of each class by its name.

    A constructor has the name of its class.
    """

    module: Members
    classes: Mapping[str, Members]

    @classmethod
    def common(cls, apis: Sequence["ServerApi"]) -> "ServerApi":
        """Return the names and parameters that all have."""
        first, *others = apis
        classes = {
            name: _common([members, *(other.classes[name] for other in others)])
            for name, members in first.classes.items()
            if all(name in other.classes for other in others)
        }
        return cls(_common([api.module for api in apis]), classes)


def read_apis() -> dict[str, ServerApi]:
    """Return the API of each release that was read, oldest first."""
    entries = json.loads(Path(__file__).with_suffix(".json").read_text())
    found: dict[str, ServerApi] = {}
    for release, entry in entries.items():
        base = found[entry["like"]] if "like" in entry else ServerApi({}, {})
        changes = api_of(entry)
        found[release] = ServerApi(
            {**base.module, **changes.module}, {**base.classes, **changes.classes}
        )
    return found


def api_of(entry: Mapping[str, Any]) -> ServerApi:
    """Return the API that an entry of `server_api.json` lists."""
    classes = {name: _members(texts) for name, texts in entry["classes"].items()}
    return ServerApi(_members(entry.get("module", ())), classes)


class Restricted(ModuleType):
    """The fake as a module that has the names of an API only."""

    def __init__(self, fake: ModuleType, api: ServerApi) -> None:
        super().__init__(fake.__name__)
        self._fake = fake
        self._classes = {
            name: _class(name, members, getattr(fake, name, None), self)
            for name, members in api.classes.items()
        }
        for name, declaration in api.module.items():
            setattr(self, name, self._member(declaration))

    def view(self, value: Any) -> Any:
        """Return the backend's view of an object of the fake; other values unchanged."""
        if isinstance(value, list):
            return [self.view(each) for each in value]
        kind = self._classes.get(type(value).__name__)
        if kind is None or isinstance(value, _View):
            return value
        found = kind.__new__(kind)
        found._of_fake = value
        return found

    def _member(self, declaration: Declaration) -> Any:
        if declaration.name in self._classes:
            return self._classes[declaration.name]
        return _member(declaration, self._fake, self)


class _View:
    """An object of the fake as the backend sees it."""

    __slots__ = ("_of_fake",)


def of_fake(value: Any) -> Any:
    """Return the object of the fake behind a view; other values unchanged."""
    if isinstance(value, list | tuple):
        return [of_fake(each) for each in value]
    return value._of_fake if isinstance(value, _View) else value


def _class(name: str, members: Members, fake: Any, module: Restricted) -> type[_View]:
    namespace: dict[str, Any] = {"__slots__": (), "__init__": _constructor(name, members, fake)}
    for declaration in members.values():
        if declaration.name != name:
            namespace[declaration.name] = _member(declaration, fake, module)
    return type(name, (_View,), namespace)


def _constructor(name: str, members: Members, fake: Any) -> Callable[..., None]:
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        assert name in members, f"{name} has no constructor"
        members[name].signature.bind(*args, **kwargs)
        given = {key: of_fake(value) for key, value in kwargs.items()}
        self._of_fake = fake(*of_fake(args), **given)

    return construct


def _member(declaration: Declaration, fake: Any, module: Restricted) -> Any:
    """Return a constant, a function, or a method of a view."""
    name, is_method = declaration.name, isinstance(fake, type) and not declaration.is_static
    if declaration.parameters is None:
        return getattr(fake, name, None)

    def call(*args: Any, **kwargs: Any) -> Any:
        owner, rest = (args[0]._of_fake, args[1:]) if is_method else (fake, args)
        declaration.signature.bind(*rest, **kwargs)
        given = {key: of_fake(value) for key, value in kwargs.items()}
        return module.view(getattr(owner, name)(*of_fake(rest), **given))

    return staticmethod(call) if declaration.is_static else call


def _members(texts: Sequence[str]) -> Members:
    return {each.name: each for each in map(Declaration.parse, texts)}


def _common(members: Sequence[Members]) -> Members:
    first, *others = members
    found = {}
    for name, declaration in first.items():
        if any(name not in other for other in others):
            continue
        parameters = declaration.parameters
        if parameters is not None:
            shared = [set(other[name].parameters or ()) for other in others]
            parameters = tuple(each for each in parameters if all(each in some for some in shared))
        found[name] = Declaration(name, parameters, declaration.is_static)
    return found
