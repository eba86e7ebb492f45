"""A language model opens the same from a GGUF file, its converted copy and a folder; what is none is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from assay.data import DataError, MissingData, asset, fetch, resolve  # noqa: E402
from assay.lm import (  # noqa: E402
    LanguageModel,
    _gguf,
    load,
)

NAME = "smollm2-135m-instruct"


def direct(gguf: Path) -> torch.nn.Module:
    """The model as transformers reads it from the GGUF file."""
    with _gguf.quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        ).eval()


def test_a_converted_gguf_file_gives_the_same_logits_to_the_last_bit(cache: Path, tiny_gguf: Path):
    loaded = load(tiny_gguf)
    assert isinstance(loaded, LanguageModel)
    assert loaded.path.is_relative_to(cache)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, direct(tiny_gguf)(ids).logits)
    assert not loaded.model.training
    assert loaded.model.dtype == torch.float32
    assert loaded.tokenizer.decode(loaded.tokenizer("the cat").input_ids) == "the cat"


def test_a_gguf_file_is_converted_once(cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    first = load(tiny_gguf)
    monkeypatch.setattr(_gguf, "convert", lambda *_: pytest.fail("it was converted again"))
    second = load(tiny_gguf)
    assert second.path == first.path
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters()))


def test_another_gguf_file_of_the_same_name_is_another_model(cache: Path, tiny_gguf: Path, tmp_path: Path):
    first = _gguf.converted(tiny_gguf)
    copy = tmp_path / tiny_gguf.name
    content = bytearray(tiny_gguf.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content)
    assert _gguf.converted(copy) != first


def test_a_conversion_that_fails_leaves_nothing(cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", fail)
    with pytest.raises(DataError, match="no space left"):
        load(tiny_gguf)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_folder_is_opened_in_the_dtype_that_is_asked(cache: Path, tiny_gguf: Path):
    folder = _gguf.converted(tiny_gguf)
    assert load(folder, dtype="bfloat16").model.dtype == torch.bfloat16
    assert load(str(folder)).path == folder
    with pytest.raises(DataError, match=r"dtype 'int8'.*float32, bfloat16, float16"):
        load(folder, dtype="int8")


def test_a_copy_has_no_trace_of_the_quantisation(cache: Path, tiny_gguf: Path, tmp_path: Path):
    loaded = load(tiny_gguf)
    assert "quantization_config" not in json.loads((loaded.path / "config.json").read_text())
    loaded.model.save_pretrained(tmp_path / "again")  # refused for a model that counts as quantised
    assert (tmp_path / "again" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"pytorch_model.bin": b""}, "only pickled weights, which can run code"),
        ({}, "no weights: give a folder with .safetensors"),
        ({"model.safetensors": b""}, "has no tokenizer"),
        ({"model.safetensors": b"", "tokenizer.json": b"{}"}, "cannot be opened as a causal language model"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(cache: Path, tmp_path: Path, files: dict[str, bytes], sentence: str):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=sentence) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_model_with_a_tensor_left_out_is_refused(cache: Path, tiny_gguf: Path):
    from safetensors.torch import load_file, save_file

    weights = _gguf.converted(tiny_gguf) / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"lacks 1 of the model's tensors \(model\.layers\.1\.mlp\.up_proj\.weight"):
        load(weights.parent)


def test_a_cut_gguf_file_is_refused(cache: Path, tiny_gguf: Path, tmp_path: Path):
    for keep in (6, 200, 3000, -100):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(tiny_gguf.read_bytes()[:keep])
        with pytest.raises(DataError, match=r"cut\.gguf is not a whole GGUF file") as caught:
            load(cut)
        assert "\n" not in str(caught.value)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_what_is_no_language_model_is_refused(cache: Path, tmp_path: Path):
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(DataError, match=r"a\.csv looks like a table, but a language model is expected"):
        load(tmp_path / "a.csv")


def test_the_asset_remakes_itself_when_the_conversion_changes():
    assert asset(NAME).version == _gguf.VERSION


@pytest.fixture(scope="module")
def smollm2() -> LanguageModel:
    try:
        fetch(NAME)
    except MissingData as error:
        pytest.skip(str(error))
    return load(NAME)


@pytest.mark.network
def test_smollm2_is_the_model_of_its_digest(smollm2: LanguageModel):
    model, tokenizer, path = smollm2
    assert "b179c9523d0e6a0f" in path.name
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.hidden_size, config.vocab_size, config.max_position_embeddings) == (576, 49_152, 8_192)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert tokenizer("plain").input_ids[0] != tokenizer.bos_token_id
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


@pytest.mark.network
def test_smollm2_knows_the_capital_of_france(smollm2: LanguageModel):
    ids = smollm2.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = smollm2.model(ids).logits[0, -1].argmax()
        after = smollm2.model(torch.cat([ids, best.reshape(1, 1)], 1)).logits[0, -1].argmax()
    assert smollm2.tokenizer.decode([best, after]) == " Paris."


@pytest.mark.network
def test_smollm2_opens_fast_from_its_copy(smollm2: LanguageModel):
    started = time.process_time()
    load(NAME)
    assert time.process_time() - started < 5  # the GGUF file takes 18 CPU-seconds and more
    assert resolve(NAME).path == smollm2.path


@pytest.mark.network
@pytest.mark.slow
def test_smollm2_gives_the_logits_of_its_gguf_file_to_the_last_bit(smollm2: LanguageModel):
    model = direct(fetch(f"{NAME}-gguf"))
    ids = smollm2.tokenizer("It was the best of times, it was the worst of times,", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(model(ids).logits, smollm2.model(ids).logits)
