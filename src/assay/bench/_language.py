"""The condition language of a card: from text to a tree, and the check of a tree against an experiment.

Nothing that a card says is ever executed. The references ``measure[arm, axis=value]`` are lifted out first (arms and
values are free text, as ``top-k``), the rest is parsed by Python's `ast`, and only the nodes listed here are let through.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from assay._errors import InputError
from assay.bench._study import SCALES, Value

ALWAYS_MEASURED = ("seconds", "peak_bytes")

# How many arguments each function takes, and what they are.
ARITHMETIC = {"abs": 1, "log": 1, "exp": 1}
CHOICE = ("min", "max")
OVER_CASES = {"share": 1, "pearson": 2, "spearman": 2, "auc": 2}
OVER_AXIS = ("slope", "exponent", "r2", "spread")
FUNCTIONS = (*ARITHMETIC, *CHOICE, *OVER_CASES, *OVER_AXIS, "speedup")

_LONGEST = 1000  # characters; a condition is a line, and Python's parser need not meet anything deeper
_DEEPEST = 40


class LanguageError(InputError):
    """A condition is not in the language, or names something that the experiment does not have."""


# ---------------------------------------------------------------------------------------------------------------- tree


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the card."""

    value: float

    def __str__(self) -> str:
        return repr(self.value).removesuffix(".0")


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis by its name: its value in the cell."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Reference:
    """``measure[arm|arm, axis=value|value, ...]``. Values are the card's text; `value_of` finds the axis's own."""

    measure: str
    arms: tuple[str, ...]
    at: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __str__(self) -> str:
        parts = ["|".join(self.arms), *(f"{axis}={'|'.join(values)}" for axis, values in self.at)]
        return f"{self.measure}[{', '.join(parts)}]"


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the language."""

    function: str
    arguments: tuple[Node, ...]

    def __str__(self) -> str:
        return f"{self.function}({', '.join(map(str, self.arguments))})"


@dataclass(frozen=True, slots=True)
class Binary:
    """``left operator right`` with one of ``+ - * /``."""

    operator: str
    left: Node
    right: Node

    def __str__(self) -> str:
        rank = _rank(self)
        left = f"({self.left})" if _rank(self.left) < rank else str(self.left)
        right = f"({self.right})" if _rank(self.right) <= rank else str(self.right)
        return f"{left} {self.operator} {right}"


@dataclass(frozen=True, slots=True)
class Negative:
    """``-of``."""

    of: Node

    def __str__(self) -> str:
        return f"-({self.of})" if _rank(self.of) < _rank(self) else f"-{self.of}"


@dataclass(frozen=True, slots=True)
class Condition:
    """``side relation side {relation side}``, chained as in Python."""

    sides: tuple[Node, ...]
    relations: tuple[str, ...]

    def __str__(self) -> str:
        return str(self.sides[0]) + "".join(f" {r} {s}" for r, s in zip(self.relations, self.sides[1:], strict=True))

    def links(self) -> tuple[Condition, ...]:
        """The chain as its single inequalities: all must be true."""
        return tuple(Condition(self.sides[i : i + 2], (r,)) for i, r in enumerate(self.relations))


Node = Number | Axis | Reference | Call | Binary | Negative | Condition


def _rank(node: Node) -> int:
    """How tightly a node binds, for the brackets around it."""
    if isinstance(node, Condition):
        return 0
    if isinstance(node, Binary):
        return 1 if node.operator in "+-" else 2
    return 3 if isinstance(node, Negative) else 4


def children(node: Node) -> tuple[Node, ...]:
    """The nodes right below."""
    if isinstance(node, Call):
        return node.arguments
    if isinstance(node, Binary):
        return (node.left, node.right)
    if isinstance(node, Negative):
        return (node.of,)
    return node.sides if isinstance(node, Condition) else ()


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it."""
    yield node
    for child in children(node):
        yield from walk(child)


def references(node: Node) -> tuple[Reference, ...]:
    """The references in a tree, each once, from left to right."""
    return tuple(dict.fromkeys(n for n in walk(node) if isinstance(n, Reference)))


def is_measured(node: Node) -> bool:
    """Whether anything in the tree comes from a trial."""
    return any(isinstance(n, Reference) for n in walk(node))


# ------------------------------------------------------------------------------------------------------------- parsing

_TOKEN = re.compile(
    r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<reference>[A-Za-z_]\w*[ ]?\[[^\[\]]*\])"
    r"|(?P<function>[A-Za-z_]\w*)(?=[ ]?\()"
    r"|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<sign><=|>=|[-+*/<>(),])"
    r"|(?P<space>[ ])",
    re.ASCII,
)
_RELATIONS: dict[type[ast.cmpop], str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


@lru_cache(maxsize=4096)
def parse_condition(text: str) -> Condition:
    """Parse ``side relation side {relation side}``.

    Raises
    ------
    LanguageError
        If the text is not in the language, with what was expected.
    """
    node = _parse(text)
    if not isinstance(node, Condition):
        raise LanguageError(f"{text!r} compares nothing, expected one of < <= > >=: write the bar, or use `report`")
    for link in node.links():
        if not is_measured(link):
            raise LanguageError(f"'{link}' has no measure[arm] on either side: one side must be measured")
    return node


@lru_cache(maxsize=4096)
def parse_expression(text: str) -> Node:
    """Parse one side: an expression without a relation, as `report` takes it.

    Raises
    ------
    LanguageError
        If the text is not in the language, with what was expected.
    """
    node = _parse(text)
    if isinstance(node, Condition):
        raise LanguageError(
            f"{text!r} is a condition, expected an expression without < <= > >=: use `holds_if` for a bar"
        )
    if not is_measured(node):
        raise LanguageError(f"{text!r} has no measure[arm] in it, expected something measured")
    return node


def parse_each(text: str) -> tuple[str, tuple[str, ...] | None]:
    """Parse ``"axis"`` or ``"axis=value|value"``: the axis, and the values named or None.

    Raises
    ------
    LanguageError
        If the text is neither.
    """
    axis, equals, values = (part.strip() for part in text.partition("="))
    named = tuple(v.strip() for v in values.split("|")) if equals else None
    if not _is_name(axis) or (named is not None and not all(named)):
        raise LanguageError(f'{text!r} is not an axis, expected "axis" or "axis=value|value"')
    if named is not None and len(set(named)) < len(named):
        raise LanguageError(f"{text!r} names a value twice: name each once")
    return axis, named


def _parse(text: str) -> Node:
    line = " ".join(text.split())
    if not line:
        raise LanguageError("a condition is empty, expected for example 'loss[ours] < loss[theirs]'")
    if len(line) > _LONGEST:
        raise LanguageError(
            f"a condition has {len(line)} characters, expected at most {_LONGEST}: split it into a list"
        )
    # Every name becomes a placeholder, so that Python's parser meets no name of the card (`return` and `lambda` are
    # fine names for a measure and an axis), and nothing but numbers, signs and placeholders.
    lifted: dict[str, Node | str] = {}
    code: list[str] = []
    position = 0
    while position < len(line):
        token = _TOKEN.match(line, position)
        if token is None:
            raise LanguageError(
                f"{line!r} has {line[position]!r} where the language has no such sign{_hint(line[position])}"
            )
        position = token.end()
        if token.lastgroup in ("number", "sign", "space"):
            code.append(token.group())
            continue
        name = f"_{len(lifted)}"
        if token.lastgroup == "reference":
            lifted[name] = _reference(token.group())
        elif token.lastgroup == "function":
            if token.group() not in FUNCTIONS:
                raise LanguageError(unknown("function", token.group(), FUNCTIONS, f"{line!r}"))
            lifted[name] = token.group()
        else:
            if token.group() in ("and", "or", "not", "in", "is", "if", "else", "for"):
                raise LanguageError(
                    f"{line!r} has {token.group()!r}, which the language has not: use a list of conditions"
                )
            lifted[name] = Axis(token.group())
        code.append(f" {name} ")
    try:
        tree = ast.parse("".join(code).strip(), mode="eval").body
        node = _node(tree, lifted, line, 0)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        if isinstance(error, LanguageError):
            raise
        raise LanguageError(
            f"{line!r} does not read as a condition, expected for example 'a[x] - b[y] <= 0.1'"
        ) from None
    _check_form(node, line, within=None)
    return node


def _hint(sign: str) -> str:
    if sign in "=!":
        return ": write `0 <= a - b <= 0` for equality"
    if sign in "[]":
        return ": write measure[arm, axis=value]"
    return ""


def _reference(text: str) -> Reference:
    measure, _, inside = text[:-1].partition("[")
    parts = [part.strip() for part in inside.split(",")]
    arms = tuple(arm.strip() for arm in parts[0].split("|"))
    if "=" in parts[0] or not all(arms):
        raise LanguageError(f"{text!r} names no arm, expected measure[arm] or measure[arm, axis=value]")
    if len(set(arms)) < len(arms):
        raise LanguageError(f"{text!r} names an arm twice: name each once")
    at: list[tuple[str, tuple[str, ...]]] = []
    for part in parts[1:]:
        if "=" not in part:
            raise LanguageError(f"{text!r} has {part!r}, expected axis=value: several arms are written arm|arm")
        axis, values = parse_each(part)
        if axis in dict(at):
            raise LanguageError(f"{text!r} names the axis {axis} twice: write {axis}=value|value for a mean")
        at.append((axis, values or ()))
    return Reference(measure.strip(), arms, tuple(at))


def _node(tree: ast.expr, lifted: Mapping[str, Node | str], line: str, depth: int) -> Node:
    if depth > _DEEPEST:
        raise LanguageError(f"{line!r} is nested more than {_DEEPEST} deep: split it, or compute it in the trial")

    def below(part: ast.expr) -> Node:
        return _node(part, lifted, line, depth + 1)

    match tree:
        case ast.Name(id=name) if not isinstance(lifted[name], str):
            return lifted[name]  # type: ignore[return-value]
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool) and math.isfinite(value):
            return Number(float(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return Negative(below(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return Binary(_OPERATORS[type(op)], below(left), below(right))
        case ast.Compare(left=left, ops=ops, comparators=rest) if all(type(op) in _RELATIONS for op in ops):
            return Condition((below(left), *map(below, rest)), tuple(_RELATIONS[type(op)] for op in ops))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if isinstance(lifted[name], str):
            return Call(str(lifted[name]), tuple(map(below, arguments)))
    raise LanguageError(
        f"{line!r} has a part that the language has not, expected numbers, measure[arm], axes, + - * / and functions"
    )


def _check_form(node: Node, line: str, within: str | None) -> None:
    """Refuse what has the right signs but no meaning: a condition inside a sum, a share of a share, several arms alone."""
    if isinstance(node, Reference) and len(node.arms) > 1:
        raise LanguageError(f"'{node}' in {line!r} names several arms, which stand only in min() and max(): name one")
    if isinstance(node, Condition) and any(isinstance(side, Condition) for side in node.sides):
        raise LanguageError(f"{line!r} compares a comparison: write a chain without brackets")
    if isinstance(node, Binary | Negative) and any(isinstance(child, Condition) for child in children(node)):
        raise LanguageError(
            f"{line!r} has a condition where a number is expected: conditions stand alone or in share()"
        )
    below: Iterable[Node] = children(node)
    if isinstance(node, Call):
        _check_call(node, line, within)
        if node.function in CHOICE:
            below = (a for a in node.arguments if not isinstance(a, Reference))
        elif node.function in OVER_AXIS:
            below = node.arguments[:1]
        elif node.function == "speedup":
            below = ()
        within = node.function if node.function in OVER_CASES else within
    for child in below:
        _check_form(child, line, within)


def _check_call(node: Call, line: str, within: str | None) -> None:
    name, arguments = node.function, node.arguments
    if within is not None and name in (*OVER_CASES, "speedup"):
        raise LanguageError(f"{line!r} has {name}() inside {within}(), which looks at single cases: take it out")
    wanted = ARITHMETIC.get(name) or OVER_CASES.get(name) or (2 if name in (*OVER_AXIS, "speedup") else None)
    if wanted is not None and len(arguments) != wanted:
        raise LanguageError(f"{name}() in {line!r} has {len(arguments)} arguments, expected {wanted}")
    if name == "share":
        if not isinstance(arguments[0], Condition):
            raise LanguageError(f"'{node}' in {line!r} is a share of a number, expected share(condition)")
    elif any(isinstance(a, Condition) for a in arguments):
        raise LanguageError(f"{name}() in {line!r} has a condition where a number is expected: only share() takes one")
    if name in OVER_CASES and not is_measured(node):
        raise LanguageError(f"'{node}' in {line!r} has no measure[arm] in it: it is over the cases of one")
    if (
        name in CHOICE
        and len(arguments) < 2
        and not any(isinstance(a, Reference) and len(a.arms) > 1 for a in arguments)
    ):
        raise LanguageError(f"'{node}' in {line!r} has nothing to choose from: write {name}(measure[arm|arm])")
    if name in OVER_AXIS:
        if not isinstance(arguments[1], Axis):
            raise LanguageError(
                f"'{node}' in {line!r} has {arguments[1]} for an axis, expected {name}(measure[arm], axis)"
            )
        if not is_measured(arguments[0]):
            raise LanguageError(f"'{node}' in {line!r} has no measure[arm] in it, expected {name}(measure[arm], axis)")
    if name == "speedup":
        for argument in arguments:
            if not isinstance(argument, Reference) or len(argument.arms) > 1:
                raise LanguageError(f"'{node}' in {line!r} has {argument}, expected speedup(curve[arm], curve[arm])")
            if any(len(values) > 1 for _, values in argument.at):
                raise LanguageError(
                    f"'{argument}' in {line!r} is several curves, expected one value of each axis it names"
                )


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*", text, re.ASCII) is not None


# ------------------------------------------------------------------------------------------------------------ checking


class Outline(Protocol):
    """What the check needs to know of an experiment; its source is read, not run."""

    @property
    def arms(self) -> Sequence[str]: ...
    @property
    def derived_arms(self) -> Sequence[str]: ...
    @property
    def measures(self) -> Sequence[str]: ...
    @property
    def curves(self) -> Sequence[str]: ...
    @property
    def inputs(self) -> Mapping[str, Any]: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def quick(self) -> Mapping[str, Any] | bool: ...
    @property
    def full(self) -> Mapping[str, Any] | bool: ...
    @property
    def paper(self) -> Mapping[str, Any] | bool: ...


def values_by_axis(outline: Outline) -> dict[str, tuple[Value, ...]]:
    """Every setting and input with the values that it has at any scale."""
    found: dict[str, dict[Value, None]] = {}
    for mapping in (outline.inputs, outline.settings, *(getattr(outline, scale) for scale in SCALES)):
        if not isinstance(mapping, Mapping):
            continue
        for name, values in mapping.items():
            if name in outline.inputs or name in outline.settings:
                several = values if isinstance(values, tuple | list) else (values,)
                found.setdefault(name, {}).update(dict.fromkeys(several))
    return {name: tuple(values) for name, values in found.items()}


def value_of(text: str, values: Iterable[Value]) -> Value | None:
    """The axis's own value that the card's text names (``"0.1"`` is 0.1, ``"true"`` is True), or None."""
    for value in values:
        if isinstance(value, bool):
            if text.lower() == str(value).lower():
                return value
        elif isinstance(value, str):
            if text == value:
                return value
        else:
            try:
                if float(text) == value:
                    return value
            except ValueError:
                continue
    return None


def check_names(node: Node, outline: Outline, fixed: Iterable[str] = ()) -> None:
    """Check every name in a tree against an experiment.

    Parameters
    ----------
    node
        What `parse_condition` or `parse_expression` gave.
    outline
        The experiment's arms, measures, curves, settings and inputs.
    fixed
        The axes of ``each``, which have one value in a cell.

    Raises
    ------
    LanguageError
        An unknown arm, measure, curve, axis or value, with the nearest name; an axis without numbers where a number is
        needed; an axis function over an axis that is already fixed.
    """
    axes = values_by_axis(outline)
    fixed = set(fixed)
    arms = (*outline.arms, *outline.derived_arms)

    def check(part: Node, walked: str | None) -> None:
        if isinstance(part, Reference):
            where = f"'{part}'"
            known = (*outline.measures, *ALWAYS_MEASURED)
            if part.measure not in known:
                if part.measure in outline.curves:
                    raise LanguageError(
                        f"{where} is a curve, which stands only in speedup(): return its end as a measure"
                    )
                raise LanguageError(unknown("measure", part.measure, known, where))
            check_place(part, where)
            if walked is not None and walked in dict(part.at):
                raise LanguageError(f"{where} fixes the axis {walked} that the function around it walks: leave it out")
        elif isinstance(part, Axis):
            check_axis(part.name, f"{str(node)!r}")
            needs_numbers(part.name, f"{str(node)!r}")
        elif isinstance(part, Call) and part.function == "speedup":
            for curve in part.arguments:
                assert isinstance(curve, Reference)
                if curve.measure not in outline.curves:
                    raise LanguageError(unknown("curve", curve.measure, outline.curves, f"'{part}'"))
                check_place(curve, f"'{part}'")
        elif isinstance(part, Call) and part.function in OVER_AXIS:
            over = part.arguments[1]
            assert isinstance(over, Axis)
            check_axis(over.name, f"'{part}'")
            if over.name in fixed:
                raise LanguageError(f"'{part}' walks the axis {over.name}, which `each` fixes: take it out of `each`")
            if part.function != "spread":
                needs_numbers(over.name, f"'{part}'")
            if len(axes[over.name]) < 2:
                raise LanguageError(f"'{part}' walks {over.name}, which has one value: it needs an axis with several")
            check(part.arguments[0], over.name)
        else:
            for child in children(part):
                check(child, walked)

    def check_place(part: Reference, where: str) -> None:
        for arm in part.arms:
            if arm not in arms:
                raise LanguageError(unknown("arm", arm, arms, where))
        for axis, values in part.at:
            check_axis(axis, where)
            check_values(axis, values, where, axes)

    def check_axis(axis: str, where: str) -> None:
        if axis not in axes:
            raise LanguageError(unknown("axis", axis, axes, where))

    def needs_numbers(axis: str, where: str) -> None:
        if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in axes[axis]):
            raise LanguageError(f"the axis {axis} in {where} has values that are no numbers: it cannot stand for one")

    check(node, None)


def check_each(each: Iterable[tuple[str, tuple[str, ...] | None]], outline: Outline) -> None:
    """Check the axes and values of ``each``; raises LanguageError with the nearest name."""
    axes = values_by_axis(outline)
    for axis, values in each:
        if axis not in axes:
            raise LanguageError(unknown("axis", axis, axes, "`each`"))
        check_values(axis, values or (), "`each`", axes)


def check_values(axis: str, values: Iterable[str], where: str, axes: Mapping[str, tuple[Value, ...]]) -> None:
    """Check that an axis has the values that a card names, at one scale at least."""
    for value in values:
        if value_of(value, axes[axis]) is None:
            raise LanguageError(unknown(f"value of {axis}", value, map(str, axes[axis]), where))


def unknown(what: str, name: str, known: Iterable[str], where: str) -> str:
    """One sentence for a name that is not there: what there is, and the nearest."""
    options = list(dict.fromkeys(known))
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5) or difflib.get_close_matches(
        name.lower(), [o for o in options if o.lower() == name.lower()], n=1
    )
    shown = ", ".join(options[:12]) + (", ..." if len(options) > 12 else "")
    expected = f"expected one of {shown}" if options else "the experiment has none"
    return f"unknown {what} {name!r} in {where}, {expected}" + (f": did you mean {close[0]!r}?" if close else "")
