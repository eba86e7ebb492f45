"""Small models and their worlds, made by seeded recipes: what the studies of larger methods stand on.

`runsum` is a worksheet with an exact checker and masked-diffusion models that solve it; `gsm8k_text` a small model of real
text for teacher-forced measurements; `ReplayTimer` times the forwards of a real run at the sizes of large models::

    from assay.testbeds import load, runsum

    model = load("runsum-dlm", seed=0)          # shipped weights, the cache, or trained now
    problems = runsum.problems("hard", 32)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from assay._extras import extras

if TYPE_CHECKING:
    from assay.testbeds import gsm8k_text, runsum
    from assay.testbeds._replay import Replayed, ReplayTimer, scaled_trace
    from assay.testbeds._runsum_models import load

_HOMES = {
    "ReplayTimer": "_replay",
    "Replayed": "_replay",
    "load": "_runsum_models",
    "scaled_trace": "_replay",
}
_MODULES = ("gsm8k_text", "runsum")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import assay.testbeds` alone does not load torch."""
    if name not in _HOMES and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extras("lm"):
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


__all__ = ["ReplayTimer", "Replayed", "gsm8k_text", "load", "runsum", "scaled_trace"]
