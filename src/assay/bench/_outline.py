"""The plan of a study, read from the source of its study.py without running it.

A card is checked, and a check is planned, before torch or anything else that a study needs is imported. That is why the
arguments of `experiment` and `prepare` are literals, names of module-level literals, or functions by their names.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from assay._errors import InputError
from assay.bench._study import SCALES, Value

MOST_SEEDS = 1000


@dataclass(frozen=True)
class PrepareOutline:
    """A `prepare` as its source has it; functions are given by their names."""

    name: str
    doc: str
    per: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    minutes: float = 30
    memory_gib: float = 8
    threads: int = 1
    alone: bool = False

    @property
    def axes(self) -> dict[str, tuple[Value, ...]]:
        """Its own settings that have several values."""
        return {name: value for name, value in self.settings.items() if isinstance(value, tuple)}


@dataclass(frozen=True)
class ScaledExperiment:
    """An experiment as one scale runs it: what is an axis has a tuple of values, everything else one value."""

    name: str
    doc: str
    scale: str
    arms: tuple[str, ...]
    derived_arms: tuple[str, ...]
    measures: tuple[str, ...]
    curves: tuple[str, ...]
    axes: Mapping[str, tuple[Value, ...]]
    settings: Mapping[str, Value]
    inputs: Mapping[str, str]
    ignores: Mapping[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    needs: tuple[str, ...]
    together: tuple[str, ...]
    alone: bool
    threads: int
    minutes: float
    memory_gib: float
    device: str | None
    derive: str | None
    overridden: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    narrowed: Mapping[str, tuple[Value, ...]] = field(
        default_factory=dict
    )  # values of an axis that the scale leaves out


@dataclass(frozen=True)
class ExperimentOutline:
    """An `experiment` as its source has it; functions are given by their names."""

    name: str
    doc: str
    arms: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()
    curves: tuple[str, ...] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    together: tuple[str, ...] = ()
    alone: bool = False
    threads: int = 1
    minutes: float = 20
    memory_gib: float = 8
    device: str | None = None
    derive: str | None = None
    derived_arms: tuple[str, ...] = ()
    seeds: int = 5
    quick: Mapping[str, Any] | bool = True
    full: Mapping[str, Any] | bool = True
    paper: Mapping[str, Any] | bool = True

    @property
    def axes(self) -> dict[str, tuple[Value, ...]]:
        """Settings, then inputs, that have several values: by default, or at one of the scales."""
        found: dict[str, tuple[Value, ...]] = {}
        for name, value in [*self.settings.items(), *self.inputs.items()]:
            scales = [scale.get(name) for scale in (self.quick, self.full, self.paper) if isinstance(scale, Mapping)]
            several = [v for v in (value, *scales) if isinstance(v, tuple)]
            if several:
                found[name] = several[0]
        return found

    def at_scale(
        self,
        scale: str,
        *,
        seeds: int | None = None,
        overrides: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> ScaledExperiment | None:
        """The experiment as a scale runs it, or None where the scale leaves it out.

        Parameters
        ----------
        scale : {"quick", "full", "paper"}
        seeds
            How many, instead of the scale's own number.
        overrides
            ``{setting: value}``: as text (``"1000"``, several values with commas) or as values. Names that this
            experiment does not have are passed over.
        inputs
            ``{input: name or path}``, several with commas or as a tuple. Names that it does not have are passed over.

        Raises
        ------
        InputError
            For a value of the wrong kind.
        """
        if scale not in SCALES:
            raise InputError(f"there is no scale {scale!r}: choose one of {', '.join(SCALES)}{nearest(scale, SCALES)}")
        change = getattr(self, scale)
        if change is False:
            return None
        change = {} if change is True else dict(change)
        arms = tuple(change.pop("arms", self.arms))
        count = change.pop("seeds", self.seeds)
        settings = {**self.settings, **{k: v for k, v in change.items() if k in self.settings}}
        given = {**self.inputs, **{k: v for k, v in change.items() if k in self.inputs}}
        overridden, replaced = [], []
        for name, value in (overrides or {}).items():
            if name in settings:
                new = parse_setting(name, value, settings[name])
                _once(name, new)
                if new != settings[name]:
                    settings[name] = new
                    overridden.append(f"{name}={_shown(new)}")
                    replaced.append(name)
        for name, value in (inputs or {}).items():
            if name in given:
                names = tuple(str(v) for v in (value.split(",") if isinstance(value, str) else value))
                if not all(names):
                    raise InputError(f"{name} has an empty value: give a name or a path, several with commas")
                _once(name, names)
                given[name] = names if len(names) > 1 else names[0]
                overridden.append(f"{name}={_shown(given[name])}")
                replaced.append(name)
        axes: dict[str, tuple[Value, ...]] = {}
        single: dict[str, Value] = {}
        for name, value in [*settings.items(), *given.items()]:
            if name in self.axes or isinstance(value, tuple):
                axes[name] = value if isinstance(value, tuple) else (value,)
            else:
                single[name] = value
        return ScaledExperiment(
            name=self.name,
            doc=self.doc,
            scale=scale,
            arms=arms,
            derived_arms=self.derived_arms,
            measures=self.measures,
            curves=self.curves,
            axes=axes,
            settings={k: v for k, v in single.items() if k in settings},
            inputs={k: str(v) for k, v in single.items() if k in given},
            ignores={arm: axes_ for arm, axes_ in self.ignores.items() if arm in arms},
            seeds=tuple(range(count if seeds is None else seeds)),
            needs=self.needs,
            together=self.together,
            alone=self.alone,
            threads=self.threads,
            minutes=self.minutes,
            memory_gib=self.memory_gib,
            device=self.device,
            derive=self.derive,
            overridden=tuple(overridden),
            replaced=tuple(replaced),
            narrowed={
                name: rest
                for name, values in axes.items()
                if name not in replaced and (rest := tuple(v for v in self.axes.get(name, ()) if v not in values))
            },
        )


@dataclass(frozen=True)
class StudyOutline:
    """All experiments and prepares of a study, in the order of the source."""

    folder: Path
    doc: str
    experiments: Mapping[str, ExperimentOutline]
    prepares: Mapping[str, PrepareOutline]
    functions: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """Its study.py."""
        return self.folder / "study.py"


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing where no known word is near."""
    close = difflib.get_close_matches(word, [str(k) for k in known], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def read_outline(folder: Path) -> StudyOutline:
    """Read the plan of a study from its source, without importing it.

    Parameters
    ----------
    folder
        A method's folder, the one with card.toml and study.py.

    Raises
    ------
    InputError
        Where the file is missing, is not Python, or has an argument that cannot be read without running it; names the
        file and the line.
    """
    path = Path(folder) / "study.py"
    try:
        source = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path} is missing: a method's experiments stand in its study.py") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}): save it as UTF-8") from None
    try:
        tree = ast.parse(source, filename=str(path))
    except SyntaxError as error:
        raise InputError(f"{path}, line {error.lineno}, is not Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path} is not Python: {error}") from None
    reader = _Reader(path, tree)
    experiments: dict[str, ExperimentOutline] = {}
    prepares: dict[str, PrepareOutline] = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            kind = decorator_kind(decorator)
            if kind is None:
                continue
            if node.name in experiments or node.name in prepares:
                raise InputError(
                    f"{path}, line {node.lineno}: {node.name!r} is there twice: names are unique in a study"
                )
            doc = ast.get_docstring(node) or ""
            if kind == "experiment":
                experiments[node.name] = reader.experiment(node.name, doc, decorator)
            else:
                prepares[node.name] = reader.prepare(node.name, doc, decorator)
    functions = tuple(n.name for n in tree.body if isinstance(n, ast.FunctionDef))
    outline = StudyOutline(Path(folder), ast.get_docstring(tree) or "", experiments, prepares, functions)
    _check(outline)
    return outline


def decorator_kind(node: ast.expr) -> str | None:
    """``"experiment"`` or ``"prepare"`` where a decorator is one of the two, else None."""
    target = node.func if isinstance(node, ast.Call) else node
    name = target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""
    return name if name in ("experiment", "prepare") else None


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
}
# What names a function rather than a value.
_FUNCTIONS = ("needs", "derive")


class _Reader:
    """Evaluates the few kinds of expression that a decorator may hold."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path = path
        self.constants: dict[str, ast.expr] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.constants[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self.constants[node.target.id] = node.value

    def experiment(self, name: str, doc: str, node: ast.expr) -> ExperimentOutline:
        given = self._arguments(node, {f.name for f in fields(ExperimentOutline)} - {"name", "doc"}, name)
        for key in ("arms", "measures"):
            if not given.get(key):
                raise InputError(f"{self.path}: experiment {name!r} has no {key}=: name them in a tuple")
        for key in ("arms", "measures", "curves", "needs", "together", "derived_arms"):
            given[key] = self._texts(given.get(key, ()), key, name)
        for key in ("inputs", "settings"):
            given[key] = {k: _axis(v) for k, v in self._mapping(given.get(key), key, name).items()}
        given["ignores"] = {
            arm: self._texts(v, "ignores", name)
            for arm, v in self._mapping(given.get("ignores"), "ignores", name).items()
        }
        for scale in SCALES:
            change = given.get(scale, True)
            if not isinstance(change, bool):
                given[scale] = {k: _axis(v) for k, v in self._mapping(change, scale, name).items()}
        return ExperimentOutline(name=name, doc=doc, **given)

    def prepare(self, name: str, doc: str, node: ast.expr) -> PrepareOutline:
        given = self._arguments(node, {f.name for f in fields(PrepareOutline)} - {"name", "doc"}, name, ("per",))
        given["per"] = self._texts(given.get("per", ()), "per", name)
        given["needs"] = self._texts(given.get("needs", ()), "needs", name)
        given["settings"] = {k: _axis(v) for k, v in self._mapping(given.get("settings"), "settings", name).items()}
        return PrepareOutline(name=name, doc=doc, **given)

    def _arguments(
        self, node: ast.expr, known: set[str], name: str, positional: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        if not isinstance(node, ast.Call):
            return {}
        if len(node.args) > len(positional):
            raise InputError(f"{self.path}, line {node.lineno}: the arguments of {name!r} are given by name")
        given = dict(zip(positional, node.args))
        values: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                extra = self.value(keyword.value)
                if not isinstance(extra, dict):
                    raise self._unreadable(keyword.value)
                values.update(extra)
            else:
                given[keyword.arg] = keyword.value
        for key, value in given.items():
            values[key] = self._names(value) if key in _FUNCTIONS else self.value(value)
        for key in values:
            if key not in known:
                raise InputError(
                    f"{self.path}, line {node.lineno}: {name!r} has no argument {key!r}{nearest(key, known)}"
                )
        return values

    def _names(self, node: ast.expr) -> Any:
        """Functions by name: ``derive=f``, ``needs=(f, g)``."""
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(self._names(item) for item in node.elts)
        if isinstance(node, ast.Constant) and node.value is None:
            return None
        if isinstance(node, ast.Name):
            value = self.constants.get(node.id)
            return self._names(value) if isinstance(value, ast.Tuple | ast.List) else node.id
        raise self._unreadable(node)

    def value(self, node: ast.expr, seen: tuple[str, ...] = ()) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.constants and node.id not in seen:
            return self.value(self.constants[node.id], (*seen, node.id))
        if isinstance(node, ast.Tuple | ast.List):
            items: list[Any] = []
            for item in node.elts:
                if isinstance(item, ast.Starred):
                    several = self.value(item.value, seen)
                    if not isinstance(several, tuple):
                        raise self._unreadable(item.value)
                    items.extend(several)
                else:
                    items.append(self.value(item, seen))
            return tuple(items)
        if isinstance(node, ast.Dict):
            found: dict[Any, Any] = {}
            for key, value in zip(node.keys, node.values):
                if key is None:
                    extra = self.value(value, seen)
                    if not isinstance(extra, dict):
                        raise self._unreadable(value)
                    found.update(extra)
                else:
                    name = self.value(key, seen)
                    if not isinstance(name, str):
                        raise self._unreadable(key)
                    found[name] = self.value(value, seen)
            return found
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.value(node.operand, seen)
            if not isinstance(value, int | float):
                raise self._unreadable(node)
            return -value
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            try:
                return _BINARY[type(node.op)](self.value(node.left, seen), self.value(node.right, seen))
            except (TypeError, ArithmeticError):
                raise self._unreadable(node) from None
        raise self._unreadable(node)

    def _unreadable(self, node: ast.expr) -> InputError:
        return InputError(
            f"{self.path}, line {node.lineno}: {ast.unparse(node)!r} cannot be read without running it: "
            "write a literal, the name of a module-level literal, or a function's name"
        )

    def _texts(self, value: Any, key: str, name: str) -> tuple[str, ...]:
        if not isinstance(value, tuple) or not all(isinstance(v, str) for v in value):
            raise InputError(
                f'{self.path}: {key}= of {name!r} must be a tuple of names, got {value!r}: ("one",) has a comma'
            )
        if len(set(value)) != len(value):
            raise InputError(f"{self.path}: {key}= of {name!r} names something twice: {', '.join(value)}")
        return value

    def _mapping(self, value: Any, key: str, name: str) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
            raise InputError(f"{self.path}: {key}= of {name!r} must be {{name: value}}, got {value!r}")
        return value


def _axis(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _shown(value: Any) -> str:
    return ",".join(str(v) for v in value) if isinstance(value, tuple) else str(value)


def _once(name: str, value: Any) -> None:
    if isinstance(value, tuple) and (twice := [v for v in value if value.count(v) > 1]):
        raise InputError(f"{name} has the value {twice[0]} twice: name each once")


def parse_setting(name: str, value: Any, default: Any) -> Any:
    """A setting's new value, of the kind that its default has; a text with commas is several.

    Raises
    ------
    InputError
        Where the value is of another kind.
    """
    like = default[0] if isinstance(default, tuple) else default
    if isinstance(value, tuple | list):
        return tuple(parse_setting(name, v, like) for v in value)
    if isinstance(value, str) and "," in value and not (isinstance(like, str) and not isinstance(default, tuple)):
        return tuple(parse_setting(name, v.strip(), like) for v in value.split(","))
    if isinstance(like, bool):
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(value).lower() in words:
            return words[str(value).lower()]
        raise InputError(f"{name} is true or false, got {value!r}: write {name}=true or {name}=false")
    if isinstance(like, int | float):
        try:
            number = float(value)
            if isinstance(like, float) and math.isfinite(number):
                return number
            if isinstance(like, int) and number == int(number):
                return int(number)
        except (TypeError, ValueError, OverflowError):
            pass
        kind = "a number" if isinstance(like, float) else "a whole number"
        raise InputError(f"{name} is {kind} (by default {_shown(default)}), got {value!r}: write {name}={_shown(like)}")
    return str(value)


def _check(study: StudyOutline) -> None:
    """Every name that an experiment or a prepare uses must be there."""
    path = study.path
    for prepare in study.prepares.values():
        for need in prepare.needs:
            if need not in study.prepares:
                raise InputError(
                    f"{path}: {prepare.name!r} needs {need!r}, which is no prepare{nearest(need, study.prepares)}"
                )
            readable = {*prepare.per, *prepare.settings}
            for name in study.prepares[need].per:
                if name not in readable and name not in study.prepares[need].settings:
                    raise InputError(
                        f"{path}: {prepare.name!r} needs {need!r}, which depends on {name!r}: add it to per= of {prepare.name!r}"
                    )
        _needs_in_order(study, prepare.name, ())
        _check_limits(prepare, f"{path}: prepare {prepare.name!r}")
        _check_values(prepare.settings, f"{path}: prepare {prepare.name!r}", ())
    for e in study.experiments.values():
        where = f"{path}: experiment {e.name!r}"
        known = {*e.settings, *e.inputs}
        if both := set(e.settings) & set(e.inputs):
            raise InputError(f"{where} has {min(both)!r} as a setting and as an input: rename one")
        if reserved := known & {"arm", "arms", "seed", "seeds", "cell", "scale"}:
            raise InputError(
                f"{where} has a setting or input named {min(reserved)!r}, which has a meaning of its own: rename it"
            )
        _check_limits(e, where)
        _check_values({**e.settings, **e.inputs}, where, e.inputs)
        for arm, axes in e.ignores.items():
            if arm not in e.arms:
                raise InputError(
                    f"{where}: ignores= names the arm {arm!r}, which it does not have{nearest(arm, e.arms)}"
                )
            for axis in axes:
                if axis not in known:
                    raise InputError(f"{where}: ignores= names {axis!r}, which it does not have{nearest(axis, known)}")
                if axis not in e.axes:
                    raise InputError(
                        f"{where}: {arm!r} ignores {axis!r}, which has one value: leave it out of ignores="
                    )
        for axis in e.together:
            if axis != "arm" and axis not in e.axes:
                raise InputError(
                    f"{where}: together= names {axis!r}, which is no axis{nearest(axis, ['arm', *e.axes])}"
                )
        for need in e.needs:
            if need not in study.prepares:
                raise InputError(f"{where} needs {need!r}, which is no prepare{nearest(need, study.prepares)}")
            prepare = study.prepares[need]
            for name in prepare.per:
                if name not in {"seed", "arm", *known, *prepare.settings}:
                    raise InputError(
                        f"{where} needs {need!r}, which depends on {name!r}: the experiment has no such setting or input"
                        f"{nearest(name, known)}"
                    )
        if e.derive is not None and e.derive not in study.functions:
            raise InputError(
                f"{where}: derive= names {e.derive!r}, which is no function of the study{nearest(e.derive, study.functions)}"
            )
        if both := set(e.arms) & set(e.derived_arms):
            raise InputError(f"{where}: {min(both)!r} is an arm and a derived arm: rename one")
        if e.derived_arms and e.derive is None:
            raise InputError(f"{where} has derived_arms= and no derive=: give the function that adds them")
        if e.device not in (None, "cuda"):
            raise InputError(f"{where}: device= is None or 'cuda', got {e.device!r}")
        for scale in SCALES:
            change = getattr(e, scale)
            if isinstance(change, bool):
                continue
            for key, value in change.items():
                if key == "arms":
                    if not isinstance(value, tuple) or not value or len(set(value)) != len(value):
                        raise InputError(f"{where}: {scale}= has arms={value!r}: give a tuple of its arms, each once")
                    unknown = [a for a in value if a not in e.arms]
                    if unknown:
                        raise InputError(
                            f"{where}: {scale}= names the arm {unknown[0]!r}, which it does not have{nearest(unknown[0], e.arms)}"
                        )
                elif key == "seeds":
                    check_seeds(value, f"{where}: {scale}=")
                elif key not in known:
                    raise InputError(
                        f"{where}: {scale}= names {key!r}, which it does not have{nearest(key, ['arms', 'seeds', *known])}"
                    )
                else:
                    _check_values({key: value}, f"{where}: {scale}=", e.inputs)
        check_seeds(e.seeds, where)


def check_seeds(seeds: Any, where: str) -> None:
    """Refuse a number of seeds that is none, or so large that its trials cannot even be listed."""
    if not isinstance(seeds, int) or isinstance(seeds, bool) or not 1 <= seeds <= MOST_SEEDS:
        raise InputError(f"{where} has seeds={seeds!r}: give a whole number from 1 to {MOST_SEEDS}")


def _check_limits(job: ExperimentOutline | PrepareOutline, where: str) -> None:
    """The numbers that a process is run under."""
    if not isinstance(job.threads, int) or isinstance(job.threads, bool) or job.threads < 1:
        raise InputError(f"{where} has threads={job.threads!r}: give a whole number, 1 or more")
    for key in ("minutes", "memory_gib"):
        limit = getattr(job, key)
        if not isinstance(limit, int | float) or isinstance(limit, bool) or not limit > 0:
            raise InputError(f"{where} has {key}={limit!r}: give a number above 0")
    if not isinstance(job.alone, bool):
        raise InputError(f"{where} has alone={job.alone!r}: give True or False")


def _check_values(given: Mapping[str, Any], where: str, inputs: Iterable[str]) -> None:
    """What settings and inputs are set to: one value, or several different ones."""
    for name, value in given.items():
        values = value if isinstance(value, tuple) else (value,)
        text_only = name in inputs
        if not values or any(not isinstance(v, str if text_only else str | int | float | bool) for v in values):
            what = "the name of an asset" if text_only else "a number, a text or true/false"
            raise InputError(f"{where}: {name!r} must be {what}, or a tuple of them, got {value!r}")
        if any(isinstance(v, float) and not math.isfinite(v) for v in values):
            raise InputError(f"{where}: {name!r} is not finite: {_shown(value)}")
        if len(set(values)) != len(values):
            raise InputError(f"{where}: {name!r} has a value twice: {_shown(value)}")


def _needs_in_order(study: StudyOutline, name: str, above: tuple[str, ...]) -> None:
    if name in above:
        raise InputError(f"{study.path}: the prepares need each other in a circle: {' -> '.join((*above, name))}")
    for need in study.prepares[name].needs:
        if need in study.prepares:
            _needs_in_order(study, need, (*above, name))
