"""Reading a strategy from text: a preset with its settings, answers joined by `|`, a codec added with `+`.

    sparknet                       a preset
    diloco(steps=100) + bf16       a preset with another encoding
    updates | every(10) | int8     answers; a question that is left out has its usual answer

The grammar is Python's own for expressions, so that quoting, nesting and numbers behave as people expect.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from syncline.errors import ConfigError, UnknownName, nearest
from syncline.strategies.presets import PRESETS
from syncline.strategies.strategy import ANSWERS, OUTERS, Strategy

__all__ = ["read_strategy"]


def read_strategy(text: str) -> Strategy:
    """The strategy that `text` describes; `ConfigError` says what is wrong with it and what would be right."""
    # Names with dashes ('iterative-reduce') are no Python names; inside a word a dash stands for an underscore.
    source = re.sub(r"(?<=[A-Za-z])-(?=[A-Za-z])", "_", text.strip())
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(
            f"Cannot read the strategy {text!r}. Write a preset such as 'sparknet' or 'diloco(steps=100)', add an "
            "encoding with '+ int8', or join answers with '|': 'updates | every(10)'."
        ) from None
    return _strategy(tree)


def _strategy(node: ast.expr) -> Strategy:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        base, (question, answer) = _strategy(node.left), _answer(node.right)
        if question != "how":
            raise ConfigError(
                f"After + comes an encoding ({_names('how')}), not an answer to the question '{question}'."
            )
        return dataclasses.replace(base, how=answer)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        answers = [_answer(part) for part in _joined(node)]
        questions = [question for question, _ in answers]
        for question in questions:
            if questions.count(question) > 1:
                raise ConfigError(f"The question '{question}' is answered twice. Choose one of: {_names(question)}.")
        return Strategy(**dict(answers))
    name, arguments = _term(node)
    if name in PRESETS:
        made: Strategy = _call(f"The preset {PRESETS[name].name}", PRESETS[name].make, arguments)
        return made
    if name in ANSWERS:
        question, answer = _answer(node)
        return Strategy(**{question: answer})
    known = [p.name for p in PRESETS.values()]
    raise UnknownName.among("strategy", name, [*known, *ANSWERS])


def _joined(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_joined(node.left), *_joined(node.right)]
    return [node]


def _answer(node: ast.expr) -> tuple[str, Any]:
    name, arguments = _term(node)
    if name not in ANSWERS:
        raise UnknownName.among("answer", name, ANSWERS)
    question, kind = ANSWERS[name]
    return question, _call(name, kind, arguments)


def _term(node: ast.expr) -> tuple[str, tuple[list[Any], dict[str, Any]]]:
    """A name, or a name with arguments in brackets."""
    if isinstance(node, ast.Name):
        return node.id.lower(), ([], {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        named = {}
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in named:
                raise ConfigError(f"Cannot read {ast.unparse(node)!r}: every setting is given once, by its name.")
            named[keyword.arg] = _value(keyword.value)
        return node.func.id.lower(), ([_value(a) for a in node.args], named)
    raise ConfigError(f"Cannot read {ast.unparse(node)!r}: a name is wanted here, such as int8 or every(10).")


def _value(node: ast.expr) -> Any:
    if isinstance(node, (ast.Name, ast.Call)) and not _is_literal(node):
        name, arguments = _term(node)
        if name not in OUTERS:
            raise UnknownName.among("outer optimiser", name, OUTERS)
        return _call(name, OUTERS[name], arguments)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ConfigError(f"Cannot read the value {ast.unparse(node)!r}: write a number, True or False.") from None


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def _call(what: str, make: Callable[..., Any], arguments: tuple[list[Any], Mapping[str, Any]]) -> Any:
    positional, named = arguments
    known = list(inspect.signature(make).parameters)
    for name in named:
        if name not in known:
            close = nearest(name, known)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            takes = f"It takes: {', '.join(known)}." if known else "It takes none."
            raise ConfigError(f"{what} has no setting {name!r}.{hint} {takes}")
    try:
        inspect.signature(make).bind(*positional, **named)
    except TypeError as error:
        raise ConfigError(f"{what} cannot be used so: {error}. It takes: {', '.join(known) or 'nothing'}.") from None
    return make(*positional, **named)


def _names(question: str) -> str:
    return ", ".join(name for name, (q, _) in ANSWERS.items() if q == question)
