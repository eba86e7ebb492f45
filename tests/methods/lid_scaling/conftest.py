"""What several tests read."""

import pytest

from assay.methods.lid_scaling import FailureTable


@pytest.fixture(scope="session")
def table():
    return FailureTable(2.5, 0.5, v=(1e-4, 5.0), k=1e5)
