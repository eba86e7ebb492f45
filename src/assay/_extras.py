"""One sentence where an optional package is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
            f'the package {package!r} is not installed: pip install "assay[{",".join(names)}]"', name=error.name
        ) from error
