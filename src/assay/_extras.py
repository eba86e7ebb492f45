"""One sentence where an optional package is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def install_line(*names: str) -> str:
    """The command that installs extras: into the environment of the repository where Assay runs from one.

    Parameters
    ----------
    names
        Of the extras.
    """
    wanted = f"[{','.join(names)}]"
    package = Path(__file__).parent
    root = package.parents[1]
    if package == root / "src" / "assay" and (root / "pyproject.toml").is_file():
        return f'pip install -e "{"." if Path.cwd() == root else root}{wanted}"'
    return f'pip install "assay{wanted}"'


@contextmanager
def extras(*names: str) -> Iterator[None]:
    """Around imports: a package that is not installed raises an ImportError that names the extra to install.

    Parameters
    ----------
    names
        The extras of Assay that bring what is imported inside.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "assay":
            raise
        package = error.name.split(".")[0]
        raise ImportError(
            f"the package {package!r} is not installed: {install_line(*names)}", name=error.name
        ) from error
