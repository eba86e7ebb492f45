"""What can go wrong with data, each said in one sentence."""

from __future__ import annotations

from assay._errors import InputError


class DataError(InputError):
    """Data are not what they should be: a wrong digest, a file that cannot be read."""


class UnknownAsset(DataError):
    """No asset, file or hub model has the name that was given."""


class MissingData(DataError):
    """The data are not on this machine and could not be fetched. A trial that needs them is skipped, with this sentence."""


class Offline(MissingData):
    """``ASSAY_OFFLINE=1`` forbids the download that would be needed."""
