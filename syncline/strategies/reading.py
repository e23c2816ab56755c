"""Reading a strategy from text: a preset with its settings, answers joined by `|`, a codec added with `+`.

    sparknet                                        a preset
    diloco(steps=100) + bf16                        a preset with another encoding
    updates | every(10) | int8                      answers; a question that is left out has its usual answer
    hierarchy(inside_host=hogwild, across_hosts=updates | every(5))
    allreduce until epoch 1, then sparknet(10)      one after the other
    my_strategy.py:Partial(tau=5)                   one's own, alone, in a phase or in a hierarchy

But for the last two lines the grammar is Python's own for expressions, so that quoting, nesting and numbers behave as
people expect.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

from syncline.config.spec import Spec
from syncline.errors import ConfigError, UnknownName, check_options
from syncline.strategies.answers import ANSWERS, OUTERS
from syncline.strategies.hierarchy import Hierarchy
from syncline.strategies.own import Own, literal
from syncline.strategies.presets import PRESETS
from syncline.strategies.strategy import Strategy
from syncline.strategies.switching import AnyStrategy, Phase, Single, Switching, Until
from syncline.strategies.whom import OPTIMIZERS

_STRING = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
_UNTIL = re.compile(r"\s+until\s+(?P<unit>[a-z]+)\s+(?P<number>[^\s,]+)\s*,?\s*then\s+", re.IGNORECASE)
_OWN = re.compile(r"(?P<where>[^()\[\]{}|=,]+?):(?P<name>\w+)\s*(?P<arguments>\(.*\))?", re.DOTALL)
_NESTED_OWN = re.compile(r"(?P<where>[^\s()\[\]{}|=,:'\"]+):(?P<name>[A-Za-z_]\w*)")
_OWN_PREFIX = "own_strategy_"
_UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def read_strategy(text: str) -> AnyStrategy:
    """The strategy that `text` describes; `ConfigError` says what is wrong with it and what would be right."""
    text = text.strip()
    # Quoted text is masked, at equal length, while the text is split.
    covered = re.sub(_STRING, lambda quoted: "'" + "." * (len(quoted[0]) - 2) + "'", text)
    if re.search(r"(^|\s)until(\s|$)|,\s*then(\s|$)", covered, re.IGNORECASE):
        return _switching(text, covered)
    if (own := _OWN.match(covered)) is not None:
        return _own(text, own)
    if re.fullmatch(r"\S+\.py", text):
        raise ConfigError(f"{text} is a file. Name the strategy that is in it, such as '{text}:Name'.")
    return _strategy(_parsed(text))


def _parsed(text: str) -> ast.expr:
    # Names with dashes ('iterative-reduce') are no Python names: inside a word a dash stands for an underscore. And
    # 'async' may not be a name in Python, so that it gets an underscore, too.
    text, original = _without_own(text), text
    source = re.sub(
        rf"{_STRING}|(?<=[A-Za-z])-(?=[A-Za-z])|(?<![\w-])async(?!\w)",
        lambda found: {"-": "_", "async": "async_"}.get(found[0], found[0]),
        text,
    )
    try:
        return ast.parse(source, mode="eval").body
    except _UNREADABLE:
        raise ConfigError(
            f"Cannot read the strategy {original!r}. Write a preset such as 'sparknet' or 'diloco(steps=100)', add an "
            "encoding with '+ int8', or join answers with '|': 'updates | every(10)'."
        ) from None


def _without_own(text: str) -> str:
    """A hierarchy's text in which each 'file.py:Name' is a Python name, made of its hex digits."""
    if not text.lower().startswith("hierarchy"):
        return text
    parts = re.split(f"({_STRING})", text)  # every second part is quoted
    parts[::2] = [_NESTED_OWN.sub(lambda found: _OWN_PREFIX + found[0].encode().hex(), part) for part in parts[::2]]
    return "".join(parts)


def _switching(text: str, covered: str) -> Switching:
    phases, done = [], 0
    for found in _UNTIL.finditer(covered):
        try:
            number = int(found["number"])
        except ValueError:
            raise ConfigError(
                f"Cannot read 'until {found['unit']} {found['number']}': the number must be a whole one, such as 1."
            ) from None
        until = Until(found["unit"].lower(), number)  # type: ignore[arg-type]  # the type checks it
        phases.append(Phase(_phase_strategy(text[done : found.start()]), until))
        done = found.end()
    rest = covered[done:]
    if not phases or re.search(r"(^|\s)until(\s|$)|,\s*then(\s|$)", rest, re.IGNORECASE):
        raise ConfigError(
            f"Cannot read {text[done:]!r}: a strategy that is followed by another is written 'allreduce until epoch 1, "
            "then sparknet', with 'until epoch' or 'until step', a number, and what comes then."
        )
    return Switching(tuple(phases), _phase_strategy(text[done:]))


def _phase_strategy(text: str) -> Single:
    return read_strategy(text)  # type: ignore[return-value]  # the text has no further switch in it


def _own(text: str, found: re.Match[str]) -> Own:
    where, name = text[: found.end("where")], found["name"]
    if found.end() < len(text):
        raise ConfigError(
            f"Cannot read {text[found.end() :].strip()!r} after {where}:{name}: a strategy of one's own says itself "
            f"what it exchanges and how. Write '{where}:{name}' or '{where}:{name}(setting=value)', and nothing else."
        )
    if found["arguments"] is None:
        return Own(where, name)
    try:
        call = ast.parse(f"f{text[found.start('arguments') :]}", mode="eval").body
        if not isinstance(call, ast.Call) or any(k.arg is None for k in call.keywords):
            raise ValueError
        arguments = tuple(literal(argument) for argument in call.args)
        settings = {str(k.arg): literal(k.value) for k in call.keywords}
    except _UNREADABLE:
        raise ConfigError(
            f"Cannot read the settings of {text!r}: write plain values, each with its name, such as "
            f"'{where}:{name}(tau=5)'."
        ) from None
    return Own(where, name, arguments, settings)


def _strategy(node: ast.expr) -> Single:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        base, (question, answer) = _strategy(node.left), _answer(node.right)
        if question != "how":
            raise ConfigError(
                f"After + comes an encoding ({_names('how')}), not an answer to the question '{question}'."
            )
        return base.encoded(answer)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        answers = [_answer(part) for part in _joined(node)]
        questions = [question for question, _ in answers]
        for question in questions:
            if questions.count(question) > 1:
                raise ConfigError(f"The question '{question}' is answered twice. Choose one of: {_names(question)}.")
        return Strategy(**dict(answers))
    name = _name(node)
    if name.startswith(_OWN_PREFIX):
        where, _, own = bytes.fromhex(name.removeprefix(_OWN_PREFIX)).decode().rpartition(":")
        arguments, settings = _arguments(node)
        return Own(where, own, tuple(map(_plain, arguments)), {key: _plain(value) for key, value in settings.items()})
    if name in PRESETS:
        made: Strategy | Hierarchy = _call(f"The preset {PRESETS[name].name}", PRESETS[name].make, node)
        return made
    if name == "hierarchy":
        hierarchy: Hierarchy = _call("A hierarchy", Hierarchy, node)
        return hierarchy
    if name in ANSWERS:
        question, answer = _answer(node)
        return Strategy(**{question: answer})
    known = [*(p.name for p in PRESETS.values()), *ANSWERS, "hierarchy"]
    raise UnknownName.among("strategy", name, known, more="See: syncline strategies.")


def _plain(node: ast.expr) -> Any:
    if (value := _literal(node)) is _NONE:
        raise ConfigError(f"Cannot read {_shown(node)!r}: a strategy of one's own takes plain values, such as tau=5.")
    return value


def _joined(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_joined(node.left), *_joined(node.right)]
    return [node]


def _answer(node: ast.expr) -> tuple[str, Any]:
    name = _name(node)
    # 'onebit' is both: after | or +, where an answer is wanted, it is the answer.
    if name not in ANSWERS and (name in PRESETS or name == "hierarchy"):
        shown = PRESETS[name].name if name in PRESETS else name
        raise ConfigError(
            f"{shown} is a whole strategy and no answer to one of the four questions. Write it first and alone, and "
            f"add an encoding with +, as in '{shown} + int8'; or join answers, as in 'updates | every(10) | int8'."
        )
    if name not in ANSWERS:
        raise UnknownName.among("answer", name, ANSWERS)
    question, kind = ANSWERS[name]
    return question, _call(name, kind, node)


def _name(node: ast.expr) -> str:
    """The name in `name` or `name(...)`."""
    function = node.func if isinstance(node, ast.Call) else node
    if not isinstance(function, ast.Name):
        raise ConfigError(f"Cannot read {_shown(node)!r}: a name is wanted here, such as int8 or every(10).")
    return "async" if function.id == "async_" else function.id.lower()


def _call(what: str, make: Callable[..., Any], node: ast.expr) -> Any:
    """What `make` makes of the settings in brackets. Each is read as what it should be, so its name decides how."""
    parameters = list(inspect.signature(make).parameters)
    takes = f"It takes: {', '.join(parameters)}." if parameters else "It takes none."
    positional, named = _arguments(node)
    check_options(what, named, parameters, kind="setting")
    try:
        inspect.signature(make).bind(*positional, **named)
    except TypeError as error:
        raise ConfigError(f"{what} cannot be used so: {error}. {takes}") from None
    settings = {**dict(zip(parameters, positional, strict=False)), **named}
    values = {name: _value(name, value) for name, value in settings.items()}
    try:
        return make(**values)
    except TypeError:
        # A number was compared with something else; the type itself reports numbers out of range.
        shown = ", ".join(f"{name}={_shown(value)}" for name, value in settings.items())
        raise ConfigError(f"{what} cannot be used with {shown}: a value is of the wrong kind. {takes}") from None


def _arguments(node: ast.expr) -> tuple[list[ast.expr], dict[str, ast.expr]]:
    if not isinstance(node, ast.Call):
        return [], {}
    named = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in named:
            raise ConfigError(f"Cannot read {_shown(node)!r}: every setting is given once, by its name.")
        named[keyword.arg] = keyword.value
    return node.args, named


def _value(setting: str, node: ast.expr) -> Any:
    if setting in ("inside_host", "across_hosts"):
        return _strategy(node)
    if (value := _literal(node)) is not _NONE:
        return value
    if setting == "outer" and isinstance(node, (ast.Name, ast.Call)):
        name = _name(node)
        if name not in OUTERS:
            raise UnknownName.among("outer optimizer", name, OUTERS)
        return _call(name, OUTERS[name], node)
    if setting == "optimizer" and isinstance(node, (ast.Name, ast.Call)):
        return _optimizer(node)
    if setting in ("topology", "score") and isinstance(node, ast.Name):
        return node.id  # a word, also without quotes
    raise ConfigError(f"Cannot read the value {_shown(node)!r} of {setting}: write a number, True or False.")


def _optimizer(node: ast.expr) -> Spec:
    name = _name(node)
    if name not in map(str.lower, OPTIMIZERS):
        raise UnknownName.among("optimizer in torch.optim", name, map(str.lower, OPTIMIZERS))
    positional, named = _arguments(node)
    if len(positional) > 1 or (positional and "lr" in named):
        raise ConfigError(f"Cannot read {_shown(node)!r}: after the learning rate, every setting needs its name.")
    settings = {**({"lr": positional[0]} if positional else {}), **named}
    return Spec(name, {setting: _value(setting, value) for setting, value in settings.items()})


_NONE = object()


def _literal(node: ast.expr) -> Any:
    try:
        return literal(node)
    except _UNREADABLE:
        return _NONE


def _shown(node: ast.expr) -> str:
    return re.sub(r"\basync_\b", "async", ast.unparse(node))


def _names(question: str) -> str:
    return ", ".join(name for name, (q, _) in ANSWERS.items() if q == question)
