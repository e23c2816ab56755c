"""`Own`: a strategy that the user wrote, by where it is.

    my_strategy.py:Partial(tau=5)          a class or function in a file
    my_package.my_module:Partial           in a module that Python can import

Here: the type, its text form, and making the strategy. Not here: what such a strategy declares (`method.py`) and what
its exchange does (`exchange.py`).
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import keyword
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from syncline.config.owned_files import check_code
from syncline.config.spec import literal
from syncline.errors import ConfigError, UnknownName, check_options, did_you_mean
from syncline.strategies.method import Method

if TYPE_CHECKING:
    from syncline.strategies.exchange import Exchange, Replica

__all__ = ["Own", "literal", "only_our_files"]

_checks_owner: ContextVar[bool] = ContextVar("checks_owner", default=False)


@contextlib.contextmanager
def only_our_files() -> Iterator[None]:
    """Refuse to load code of other users here.

    For a strategy that was saved with a run: a relative path in it means a file in today's working directory, which may
    be one like /tmp.
    """
    token = _checks_owner.set(True)
    try:
        yield
    finally:
        _checks_owner.reset(token)


@dataclass(frozen=True)
class Own:
    """A strategy that the user wrote: `name` in the file or module `where`, called with these arguments.

    >>> str(Own("my_strategy.py", "Partial", settings={"tau": 5}))
    'my_strategy.py:Partial(tau=5)'
    """

    where: str
    name: str
    arguments: tuple[Any, ...] = field(default=(), hash=False)
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", tuple(self.arguments))
        object.__setattr__(self, "settings", dict(self.settings))
        if not _is_place(self.where):
            raise ConfigError(
                f"{self.where!r} is neither a file nor a module. Write where your strategy is as 'my_strategy.py:Name' "
                "or 'my_package.my_module:Name'; quotes, brackets, bars and ' + ' cannot be part of it."
            )
        if not _is_identifier(self.name):
            raise ConfigError(
                f"{self.name!r} is no name of a class or function. Write, for example, '{self.where}:Name'."
            )
        for name in self.settings:
            if not isinstance(name, str) or not _is_identifier(name):
                raise ConfigError(f"{name!r} is no name of a setting of {self.where}:{self.name}.")
        for value in (*self.arguments, *self.settings.values()):
            if not _survives_printing(value):
                raise ConfigError(
                    f"{self.where}:{self.name} is to get {value!r}, but only plain values reach a worker: numbers, "
                    "texts, True, False, None, and lists, tuples and dicts of these."
                )

    def __str__(self) -> str:
        parts = [*map(repr, self.arguments), *(f"{name}={value!r}" for name, value in self.settings.items())]
        return f"{self.where}:{self.name}" + (f"({', '.join(parts)})" if parts else "")

    answers: ClassVar[None] = None
    """It has none: its method declares what it does."""

    @property
    def levels(self) -> dict[str, Own]:
        return {"": self}

    def encoded(self, how: object) -> Own:
        """`ConfigError`: its exchange decides how it encodes."""
        raise ConfigError(f"{self} decides itself how it encodes what it sends, so {how} cannot be added to it.")

    @property
    def method(self) -> Method:
        """What it declares; its file is loaded for that."""
        made = self.make()
        return made if isinstance(made, Method) else _Undeclared(made, str(self))

    def make(self) -> Any:
        """The strategy itself: an object with a method `exchange(replica)`, best a `Method`."""
        where = f"{self.where}:{self.name}"
        module = _load(self.where)
        if not hasattr(module, self.name):
            public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise UnknownName.among(f"class or function in {self.where} named", self.name, public)
        maker = getattr(module, self.name)
        if not callable(maker):
            raise ConfigError(
                f"{where} is of type {type(maker).__name__}, but a class or function is wanted that makes a strategy."
            )
        _check_arguments(where, maker, self.arguments, self.settings)
        try:
            made = maker(*self.arguments, **self.settings)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self} could not be made: {type(error).__name__}: {error}. Its values may be out of range, or there "
                f"is a mistake in {self.where}."
            ) from error
        _check_exchange(where, made)
        return made


class _Undeclared(Method):
    """The method of a strategy that declares nothing but its exchange."""

    def __init__(self, made: Any, title: str) -> None:
        self._made, self.title = made, title

    def exchange(self, replica: Replica) -> Exchange:
        made: Exchange = self._made.exchange(replica)
        return made


def _is_identifier(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _is_file(where: str) -> bool:
    return where.endswith(".py") or "/" in where or "\\" in where


def _is_place(where: object) -> bool:
    if not isinstance(where, str) or where != where.strip():
        return False
    if _is_file(where):
        return where.isprintable() and not re.search(r"""[()\[\]{}'"|=,]|\s\+\s|\suntil\b""", where)
    return all(_is_identifier(part) for part in where.split("."))


def _survives_printing(value: Any) -> bool:
    try:
        return bool(literal(ast.parse(repr(value), mode="eval").body) == value)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False


def _load(where: str) -> ModuleType:
    """The module, or the file as a module; executed once."""
    if not _is_file(where):
        with _importing_from(Path.cwd()):
            try:
                if _checks_owner.get():
                    _check_package(where)
                return importlib.import_module(where)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{where}.".startswith(f"{error.name}."):
                    raise _not_imported(where, error) from error  # it is there, but something that it imports is not
                raise ConfigError(
                    f"There is no module {error.name!r}, so {where} cannot be imported. Give a file, such as "
                    f"'{where.rpartition('.')[2]}.py:Name', or start where Python finds the module (not {Path.cwd()})."
                ) from None
            except ConfigError:
                raise
            except Exception as error:
                raise _not_imported(where, error) from error
    path = Path(where).expanduser()
    if not path.is_file():
        there = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, there) or "Check the path; it is relative to that folder."
        raise ConfigError(f"There is no file '{where}' in {Path.cwd()}. {hint}")
    if _checks_owner.get():
        check_code(path)
    path = path.resolve()
    name = f"syncline_own_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"'{where}' is no Python file. Its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up by name
    with _importing_from(path.parent):
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise _not_imported(where, error) from error
    return module


def _check_package(where: str) -> None:
    """Check the module, or the package that it is in, without importing it."""
    spec = importlib.util.find_spec(where.partition(".")[0])
    if spec is not None:
        origins = [spec.origin] if spec.has_location and spec.origin else spec.submodule_search_locations or ()
        for origin in origins:
            check_code(Path(origin))


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """As when Python runs a script: what lies beside it can be imported."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def _not_imported(where: str, error: Exception) -> ConfigError:
    command = f"python {where}" if _is_file(where) else f"python -m {where}"
    return ConfigError(
        f"{where} could not be imported: {type(error).__name__}: {error}. Run '{command}' to see where it goes wrong."
    )


def _check_arguments(where: str, maker: Any, arguments: tuple[Any, ...], settings: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):
        return  # built-in callables have no signature; calling it will fail
    takes = f"It takes: {', '.join(signature.parameters) or 'nothing'}."
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if not takes_any:
        check_options(where, settings, signature.parameters, kind="setting")
    try:
        signature.bind(*arguments, **settings)
    except TypeError as error:
        raise ConfigError(f"{where} cannot be used so: {error}. {takes}") from None


def _check_exchange(where: str, made: Any) -> None:
    exchange = getattr(made, "exchange", None)
    explanation = (
        "Write a class with 'def exchange(self, replica)' that returns what this worker does at each moment of a step."
    )
    if not callable(exchange):
        raise ConfigError(
            f"{where} makes a {type(made).__name__}, which has no method 'exchange(replica)', and without it Syncline "
            f"does not know what its workers should do. {explanation}"
        )
    try:
        inspect.signature(exchange).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"The method exchange of {where} must take one argument, the worker's replica, but: {error}. {explanation}"
        ) from None
    except ValueError:
        pass  # built-in callables have no signature
