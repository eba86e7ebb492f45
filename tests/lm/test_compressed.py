"""A compressed model comes back from its folder as it was, and never as something else."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from assay._errors import InputError
from assay.data import DataError

transformers = pytest.importorskip("transformers")

from assay.lm import (  # noqa: E402
    Kind,
    LowRankLinear,
    blocks,
    load_compressed,
    merge_to_dense,
    register_kind,
    save_compressed,
    svd_factors,
)
from assay.lm._blocks import replace, weight_of  # noqa: E402

IDS = torch.randint(60, (2, 7), generator=torch.Generator().manual_seed(1))


def compressed(family: str = "Llama", **changes) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16} | changes
    if family != "GPT2":
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 24}
    config = getattr(transformers, f"{family}Config")(**sizes)
    head = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, head)(config).eval()
    block = blocks(model)[1]
    for name in ("attn.c_attn", "mlp.c_proj") if family == "GPT2" else ("self_attn.q_proj", "mlp.down_proj"):
        linear = block.get_submodule(name)
        replace(
            block,
            name,
            LowRankLinear.from_factors(*svd_factors(weight_of(linear).detach(), 5), getattr(linear, "bias", None)),
        )
    return model


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "GPT2"])
def test_it_comes_back_the_same_to_the_bit(family, tmp_path):
    model = compressed(family)
    want = model(IDS).logits
    save_compressed(model, tmp_path / "one", method="svd")
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one").eval()
    auto.save_pretrained(tmp_path / "two")  # as a trainer would
    for back in (model, auto, load_compressed(tmp_path / "two")):
        assert torch.equal(back(IDS).logits, want)
        assert sum(p.numel() for p in back.parameters()) == sum(p.numel() for p in model.parameters())
        assert torch.equal(
            back.generate(IDS, max_new_tokens=5, do_sample=False),
            model.generate(IDS, max_new_tokens=5, do_sample=False),
        )
    assert auto.config.compressed["method"] == "svd"
    assert {m["rank"] for m in auto.config.compressed["modules"].values()} == {5}
    assert torch.equal(pickle.loads(pickle.dumps(auto))(IDS).logits, want)


def test_half_precision_stays(tmp_path):
    model = compressed().to(torch.bfloat16)
    save_compressed(model, tmp_path)
    assert next(load_compressed(tmp_path).parameters()).dtype == torch.bfloat16
    assert next(load_compressed(tmp_path, dtype=torch.float32).parameters()).dtype == torch.float32


def test_the_dense_counterpart_computes_the_same_and_is_plain(tmp_path):
    model = compressed("Qwen2")  # with biases
    save_compressed(model, tmp_path / "c")
    plain = merge_to_dense(load_compressed(tmp_path / "c"))
    assert type(plain) is transformers.Qwen2ForCausalLM
    assert not any(isinstance(m, LowRankLinear) for m in plain.modules())
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits)
    plain.save_pretrained(tmp_path / "p")
    assert json.loads((tmp_path / "p" / "config.json").read_text())["model_type"] == "qwen2"
    assert type(model).__name__ == "CompressedQwen2ForCausalLM"  # the copy alone was changed


def test_adapters_and_a_step_of_training_work(tmp_path):
    peft = pytest.importorskip("peft")
    save_compressed(compressed(), tmp_path / "c")
    model = load_compressed(tmp_path / "c")
    before = model(IDS).logits
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["A", "B"], task_type="CAUSAL_LM"))
    optimiser = torch.optim.SGD([p for p in lora.parameters() if p.requires_grad], lr=1.0)
    for _ in range(3):
        optimiser.zero_grad()
        loss = lora(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimiser.step()
    assert lora(input_ids=IDS, labels=IDS).loss < loss
    assert not torch.equal(lora(IDS).logits, before)
    lora.save_pretrained(tmp_path / "lora")
    again = peft.PeftModel.from_pretrained(load_compressed(tmp_path / "c"), tmp_path / "lora")
    torch.testing.assert_close(again(IDS).logits, lora(IDS).logits)


def change_config(folder, change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_what_does_not_fit_is_refused(tmp_path):
    model = compressed()
    save_compressed(model, tmp_path)
    name = "model.layers.1.mlp.down_proj"
    about = json.loads((tmp_path / "config.json").read_text())["compressed"]["modules"]
    assert set(about) == {name, "model.layers.1.self_attn.q_proj"}
    change_config(tmp_path, lambda c: c["compressed"]["modules"][name].update(rank=4))
    with pytest.raises(DataError, match=r"mismatched: .*down_proj\.A"):
        load_compressed(tmp_path)
    change_config(tmp_path, lambda c: c["compressed"]["modules"].pop(name))
    with pytest.raises(DataError, match=r"missing: model.layers.1.mlp.down_proj.weight .*; unexpected: .*down_proj.A"):
        load_compressed(tmp_path)
    change_config(tmp_path, lambda c: c["compressed"].update(format=99))
    with pytest.raises(DataError, match="of format 99"):
        load_compressed(tmp_path)
    with pytest.raises(DataError, match=r"no config\.json"):
        load_compressed(tmp_path / "nothing")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path / "plain")
    with pytest.raises(DataError, match="'llama' that is not compressed"):
        load_compressed(tmp_path / "plain")
    with pytest.raises(InputError, match="nothing in this LlamaForCausalLM is compressed"):
        save_compressed(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)), tmp_path / "x")


SMALL = {"vocab_size": 9, "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 4, "intermediate_size": 4}


class Doubled(nn.Module):
    """Stands where a Linear was."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((features,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_other_kinds_are_saved_and_an_unknown_one_says_its_import(tmp_path, monkeypatch):
    from assay.lm import _compressed

    monkeypatch.setattr(_compressed, "_KINDS", dict(_compressed._KINDS))
    kind = Kind(
        Doubled, lambda m: {"features": len(m.scale)}, lambda there, a: Doubled(a["features"]), None, "my.module"
    )
    register_kind("doubled", kind)
    with pytest.raises(InputError, match="'doubled' is known already"):
        register_kind("doubled", kind._replace(module=nn.Identity))
    model = compressed()
    blocks(model)[0].self_attn.o_proj = Doubled(16)
    want = model(IDS).logits
    save_compressed(model, tmp_path)
    assert torch.equal(load_compressed(tmp_path)(IDS).logits, want)
    with pytest.raises(InputError, match="no plain counterpart"):
        merge_to_dense(model)
    del _compressed._KINDS["doubled"]
    with pytest.raises(DataError, match=r"o_proj is of the kind 'doubled', .* import assay.lm and my.module first"):
        load_compressed(tmp_path)


def test_transformers_opens_it_where_assay_was_imported_first(tmp_path):
    """The other order is that of this module."""
    save_compressed(compressed(), tmp_path)
    code = f"import assay.lm; import transformers; m = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}); print(type(m).__name__)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.stdout.strip() == "CompressedLlamaForCausalLM", said.stderr


def test_without_the_import_transformers_refuses(tmp_path):
    save_compressed(compressed(), tmp_path)
    code = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.returncode
    assert "assay-compressed" in said.stderr
