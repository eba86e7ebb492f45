"""What every test runs under: shapes checked at run time, a home of its own, and no model hub."""

import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# The store, the report and whatever else a run keeps: never the user's own. Downloads (ASSAY_CACHE) stay shared.
_HOME = tempfile.mkdtemp(prefix="assay-tests-")
os.environ["ASSAY_HOME"] = _HOME
os.environ["XDG_DATA_HOME"] = _HOME  # where a test takes ASSAY_HOME away
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
for _name in ("ASSAY_METHODS", "ASSAY_DEBUG", "ASSAY_START"):
    os.environ.pop(_name, None)

# Signatures are checked in the numeric packages. Not in compiled kernels, which numba must see as they are written, and
# not in studies and commands, which have no shapes and are given stand-ins.
_NUMERIC = ["assay.stats", "assay.lm", "assay.nn", "assay.rl", "assay.mdlm", "assay.evals", "assay.images"]
_NUMERIC += ["assay.render", "assay.testbeds", "assay.methods"]
_PLAIN = ("study", "command")
_hook = install_import_hook(_NUMERIC, "beartype.beartype").hook
_named = _hook.should_instrument


def _instrumented(module: str) -> bool:
    last = module.rpartition(".")[2]
    return _named(module) and last not in _PLAIN and not last.startswith("_kernel")


_hook.should_instrument = _instrumented

settings.register_profile(
    "assay",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
settings.load_profile("assay")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("ASSAY_OFFLINE"):
        for item in items:
            if "network" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="ASSAY_OFFLINE is set"))


def pytest_sessionfinish() -> None:
    shutil.rmtree(_HOME, ignore_errors=True)
