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


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    """A random llama of two layers with a byte-pair tokenizer, in float32."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    np = pytest.importorskip("numpy")
    rng = np.random.default_rng(0)
    hidden, heads, kv_heads, inner = 32, 4, 2, 48
    words = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "th", "the"]

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_merges(["t h", "th e"])
    writer.add_token_types([3] + [1] * (len(words) - 1))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    shapes = {"token_embd.weight": (len(words), hidden), "output_norm.weight": (hidden,)}
    for layer in range(2):
        block = f"blk.{layer}"
        shapes |= {
            f"{block}.attn_q.weight": (hidden, hidden),
            f"{block}.attn_k.weight": (hidden * kv_heads // heads, hidden),
            f"{block}.attn_v.weight": (hidden * kv_heads // heads, hidden),
            f"{block}.attn_output.weight": (hidden, hidden),
            f"{block}.ffn_gate.weight": (inner, hidden),
            f"{block}.ffn_up.weight": (inner, hidden),
            f"{block}.ffn_down.weight": (hidden, inner),
            f"{block}.attn_norm.weight": (hidden,),
            f"{block}.ffn_norm.weight": (hidden,),
        }
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(0, 0.3, shape).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
