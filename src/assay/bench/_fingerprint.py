"""Which code a trial ran: a hash that changes when that code does, and not when other code does.

It covers the parts of study.py that the experiment reaches, every module of Assay that these import (transitively, and
imports inside functions too), and the data files in the method's folder. Comments, docstrings and layout do not count,
nor do the workbench and the command line, which only carry a trial out.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import assay
from assay.bench._outline import StudyOutline, decorator_kind

_LEFT_OUT = ("assay.bench", "assay.cli")
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def fingerprints(study: StudyOutline) -> dict[str, str]:
    """The fingerprint of each experiment and each prepare of a study, and of each ``derive`` function.

    Returns
    -------
    ``{name: sha256 in hexadecimal}``. An experiment's covers the prepares that it needs, but not its ``derive=``, which
    reads what trials returned and is called anew.
    """
    tree = _parsed(study.path)
    data = _data_digest(study.folder)
    found: dict[str, str] = {}
    needs = {p.name: p.needs for p in study.prepares.values()}
    roots = {e.name: (e.name, *_all_needs(e.needs, needs)) for e in study.experiments.values()}
    roots |= {p.name: (p.name, *_all_needs(p.needs, needs)) for p in study.prepares.values()}
    roots |= {e.derive: (e.derive,) for e in study.experiments.values() if e.derive}
    for name, names in roots.items():
        nodes = _reached(tree, names)
        digest = hashlib.sha256()
        for node in nodes:
            digest.update(_normal(node).encode())
            digest.update(b"\0")
        package = f"assay.methods.{study.folder.name}"
        modules = _closure({m for node in nodes for m in _imports(node, package, True, study.folder)}, study.folder)
        for module in sorted(modules):
            path = _module_path(module, study.folder)
            assert path is not None
            digest.update(f"{module}\0{_source_digest(path)}\0".encode())
        digest.update(data.encode())
        found[name] = digest.hexdigest()
    return found


def _all_needs(names: tuple[str, ...], needs: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    todo = list(names)
    while todo:
        name = todo.pop(0)
        if name not in found:
            found[name] = None
            todo.extend(needs[name])
    return tuple(found)


def _parsed(path: Path) -> ast.Module:
    status = path.stat()
    return _parse(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1024)
def _parse(path: Path, mtime: int, size: int) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8-sig"), filename=str(path))


def _source_digest(path: Path) -> str:
    status = path.stat()
    return _digest(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1024)
def _digest(path: Path, mtime: int, size: int) -> str:
    tree = _parse(path, mtime, size)
    return hashlib.sha256("\0".join(_normal(node) for node in tree.body).encode()).hexdigest()


class _Bare(ast.NodeTransformer):
    """Takes docstrings away, and the decorators `experiment` and `prepare`, whose arguments are in a trial's key."""

    def _visit_body(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        body = node.body  # type: ignore[attr-defined]
        first = body[0].value if body and isinstance(body[0], ast.Expr) else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            node.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [d for d in node.decorator_list if decorator_kind(d) is None]
        return self._visit_body(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._visit_body(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._visit_body(node)


def _normal(node: ast.stmt) -> str:
    """The statement without comments, docstrings and layout."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return ""
    again = ast.parse(ast.unparse(node))
    return ast.unparse(_Bare().visit(again))


def _reached(tree: ast.Module, roots: tuple[str, ...]) -> list[ast.stmt]:
    """The statements of study.py that matter to these functions: what they name, what that names, and what just runs."""
    binds: dict[str, list[ast.stmt]] = {}
    always: list[ast.stmt] = []
    for node in tree.body:
        names = _bound(node)
        if names is None:
            always.append(node)
        for name in names or ():
            binds.setdefault(name, []).append(node)
    todo = list(roots) + [n for node in always for n in _named(node)]
    seen: set[str] = set()
    kept = {id(node) for node in always}
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for node in binds.get(name, ()):
            kept.add(id(node))
            todo.extend(_named(node))
    return [node for node in tree.body if id(node) in kept]


def _bound(node: ast.stmt) -> list[str] | None:
    """The names that a statement binds; None where it does more than that, so that it always counts."""
    if isinstance(node, _FUNCTION):
        return [node.name]
    if isinstance(node, ast.Import):
        return [(a.asname or a.name).split(".")[0] for a in node.names]
    if isinstance(node, ast.ImportFrom):
        return None if any(a.name == "*" for a in node.names) else [a.asname or a.name for a in node.names]
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return [] if docstring or _for_types_only(node) else None


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not node.orelse


def _named(node: ast.stmt) -> Iterator[str]:
    """The names that a statement reads, those in the arguments of `experiment` and `prepare` left out."""
    todo: list[ast.AST] = [node]
    while todo:
        part = todo.pop()
        if isinstance(part, ast.Name):
            yield part.id
        skipped = {id(d) for d in getattr(part, "decorator_list", ()) if decorator_kind(d)}
        todo.extend(child for child in ast.iter_child_nodes(part) if id(child) not in skipped)


def _imports(node: ast.AST, module: str, is_package: bool, method: Path) -> Iterator[str]:
    """The modules of Assay that a piece of code imports, wherever in it the import stands."""
    package = module if is_package else module.rpartition(".")[0]
    todo: list[ast.AST] = [node]
    while todo:
        part = todo.pop()
        if _for_types_only(part):
            continue
        todo.extend(ast.iter_child_nodes(part))
        if isinstance(part, ast.Import):
            for alias in part.names:
                yield alias.name
        elif isinstance(part, ast.ImportFrom):
            base = part.module or ""
            if part.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - part.level + 1], *([base] if base else [])])
            yield base
            for alias in part.names:
                if _module_path(f"{base}.{alias.name}", method) is not None:
                    yield f"{base}.{alias.name}"


def _lazy_imports(tree: ast.Module, package: str, method: Path) -> Iterator[str]:
    """What a module with a ``__getattr__`` of its own may import by text: ``"assay.lm:load"``, ``"_load"``."""
    if not any(isinstance(n, ast.FunctionDef) and n.name == "__getattr__" for n in tree.body):
        return
    for part in ast.walk(tree):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value:
            text = part.value.partition(":")[0].strip(".")
            if text.replace(".", "").replace("_", "").isalnum():
                for name in (text, f"{package}.{text}"):
                    if _module_path(name, method) is not None:
                        yield name


def _closure(modules: set[str], method: Path) -> set[str]:
    """All modules of Assay that these import, the packages that they lie in included."""
    found: set[str] = set()
    todo = list(modules)
    while todo:
        name = todo.pop()
        # The root package holds nothing but the version, which is no code that a trial runs.
        if name in found or name == "assay" or not name.startswith("assay.") or name.startswith(_LEFT_OUT):
            continue
        path = _module_path(name, method)
        if path is None:
            continue
        found.add(name)
        todo.append(name.rpartition(".")[0])
        tree = _parsed(path)
        is_package = path.name == "__init__.py"
        todo.extend(_imports(tree, name, is_package, method))
        todo.extend(_lazy_imports(tree, name if is_package else name.rpartition(".")[0], method))
    return found


def _module_path(name: str, method: Path) -> Path | None:
    """The file of a module of Assay; the study's own method is found in its own folder, wherever that lies."""
    parts = name.split(".")
    if parts[0] != "assay":
        return None
    if parts[1:2] == ["methods"] and parts[2:3] == [method.name]:
        base, rest = method, parts[3:]
    else:
        base, rest = Path(assay.__file__).parent, parts[1:]
    path = base.joinpath(*rest)
    if (path / "__init__.py").is_file():
        return path / "__init__.py"
    file = path.with_suffix(".py") if rest else path / "__init__.py"
    return file if rest and file.is_file() else None


def _data_digest(folder: Path) -> str:
    """One hash over the files in a method's folder that are neither code nor its card."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in inside.parts)
        if hidden or not path.is_file() or path.suffix in (".py", ".pyc", ".md") or inside == Path("card.toml"):
            continue
        status = path.stat()
        digest.update(f"{inside.as_posix()}\0{_file_digest(path, status.st_mtime_ns, status.st_size)}\0".encode())
    return digest.hexdigest()


@lru_cache(maxsize=1024)
def _file_digest(path: Path, mtime: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
