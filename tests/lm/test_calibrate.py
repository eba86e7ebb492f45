"""What the driver says a layer is fed is what whole forwards of whole models say."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from assay._errors import InputError
from assay.lm._blocks import blocks, groups
from assay.lm._calibrate import Site, groups_in_a_forward, walk, windows
from assay.lm._fisher import feature_importance
from assay.lm._stats import LayerStats

transformers = pytest.importorskip("transformers")


def llama(**changes) -> nn.Module:
    torch.manual_seed(0)
    config = {
        "vocab_size": 60,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
    } | changes
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()


IDS = torch.randint(60, (3, 7), generator=torch.Generator().manual_seed(1))


def fed(model: nn.Module, block: int, name: str, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The input of a Linear in a whole forward."""
    caught: list[Tensor] = []
    hook = blocks(model)[block].get_submodule(name).register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    hook.remove()
    return caught[0]


def moments(x: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    x, ref = x.reshape(-1, x.shape[-1]).double(), ref.reshape(-1, ref.shape[-1]).double()
    return 2 / len(x) * x.T @ x, 2 / len(x) * (ref - x).T @ x


def halved(site: Site) -> nn.Module:
    """A visible change."""
    made = copy.deepcopy(site.linear)
    made.weight.data.mul_(0.5)
    return made


@pytest.mark.parametrize("offload", [None, "cpu", "disk"])
def test_both_streams_are_those_of_whole_forwards(offload):
    original, model = llama(), llama()
    seen = []

    def visit(site: Site) -> nn.Module:
        # The model is half changed at this moment: everything before this group is replaced, nothing from it on.
        first = next(name for group in groups(blocks(original)[site.block]) if site.name in group for name in group)
        if site.name == first:
            H, Delta = moments(fed(model, site.block, first, IDS), fed(original, site.block, first, IDS))
            torch.testing.assert_close(site.stats.H, H, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(site.stats.Delta, Delta, rtol=1e-4, atol=1e-4)
        seen.append((site.block, site.name))
        return halved(site)

    done = []
    walk(
        model,
        [IDS[:2], IDS[2:]],
        visit,
        offload=offload,
        dtype=torch.float64,
        on_block=lambda *said: done.append(said),
    )
    assert len(seen) == 14
    assert [name.split(".")[-1] for _, name in seen[:7]] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    behind = [m(input_ids=IDS, output_hidden_states=True, use_cache=False).hidden_states[1] for m in (model, original)]
    assert [said[:2] for said in done] == [(0, 2), (1, 2)]
    assert done[0][2] == pytest.approx(float(torch.cosine_similarity(*behind, dim=-1).mean()), abs=1e-5)


def test_the_first_group_is_fed_the_same_and_without_reference_nothing_differs():
    walk(llama(), [IDS], lambda s: assert_zero(s) if s.block == 0 and "q_proj" in s.name else halved(s))
    walk(llama(), [IDS], lambda s: assert_zero(s) or halved(s), reference=False)


def assert_zero(site: Site) -> None:
    assert not site.stats.Delta.any()


def test_original_inputs_are_those_of_the_untouched_network():
    original, model = llama(), llama()

    def visit(site: Site) -> nn.Module:
        first = next(name for group in groups(blocks(original)[site.block]) if site.name in group for name in group)
        x = fed(original, site.block, first, IDS)
        torch.testing.assert_close(site.stats.H, moments(x, x)[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(site.stats.mean_abs, x.abs().mean((0, 1)).double(), rtol=1e-4, atol=1e-5)
        return halved(site)

    walk(model, [IDS[:1], IDS[1:]], visit, inputs="original", dtype=torch.float64)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_statistics(side):
    plain, padded = {}, {}
    pad = torch.zeros(3, 2, dtype=torch.int64)
    parts = (pad, IDS) if side == "left" else (IDS, pad)
    mask = torch.cat([torch.zeros_like(p) if p is pad else torch.ones_like(p) for p in parts], 1)
    walk(llama(), [IDS], lambda s: plain.__setitem__((s.block, s.name), s.stats) or halved(s))
    walk(
        llama(),
        [{"input_ids": torch.cat(parts, 1), "attention_mask": mask}],
        lambda s: padded.__setitem__((s.block, s.name), s.stats) or halved(s),
    )
    for where, stats in plain.items():
        torch.testing.assert_close(padded[where].H, stats.H, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(padded[where].Delta, stats.Delta, rtol=1e-3, atol=1e-4)
        assert padded[where].n == stats.n == 21


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3", "OPT", "GPT2"])
def test_families_are_walked_as_their_forwards_go(family):
    sizes = {"vocab_size": 60, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16}
    sizes |= {
        "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 32},
        "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
        "Mistral": {"num_key_value_heads": 2, "intermediate_size": 24, "sliding_window": 3},
        "Qwen2": {
            "num_key_value_heads": 2,
            "intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 1,
        },
        "Qwen3": {"num_key_value_heads": 2, "intermediate_size": 24, "head_dim": 4},
    }[family]
    if family == "GPT2":
        sizes = {k: v for k, v in sizes.items() if k.startswith("n_") or k == "vocab_size"}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    head = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, head)(config).eval()
    original = copy.deepcopy(model)
    last = groups(blocks(original)[1])[-1]

    def visit(site: Site) -> nn.Module:
        if site.block == 1 and site.name in last:
            H, Delta = moments(fed(model, 1, site.name, IDS), fed(original, 1, site.name, IDS))
            torch.testing.assert_close(site.stats.H, H, rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(site.stats.Delta, Delta, rtol=1e-3, atol=1e-6)
            visit.checked = True
        return halved(site)

    walk(model, [IDS], visit, dtype=torch.float64)
    assert visit.checked


def test_named_targets_alone_are_visited_and_found_in_any_block():
    seen = []
    walk(llama(), [IDS], lambda s: seen.append(s.name), targets=("up_proj", "self_attn.o_proj"), limit=1)
    assert seen == ["self_attn.o_proj", "mlp.up_proj"]
    model = llama()
    block = blocks(model)[0]
    block.mlp.up_proj, block.mlp.other = None, None  # a block whose layout is not known
    with pytest.raises(InputError, match="name the targets"):
        groups(block)


def test_a_forward_finds_the_groups_that_the_names_say():
    model = llama()
    found = []
    from assay.lm._blocks import inputs_of

    entering = inputs_of(model, {"input_ids": IDS})
    found = groups_in_a_forward(blocks(model)[0], entering.hidden, entering.arguments[0])
    assert [list(group) for group in found] == [list(group) for group in groups(blocks(model)[0])]


def test_rows_of_great_length_are_cut():
    sizes = {}
    for clip in (None, 1.0):
        walk(
            llama(),
            [IDS],
            lambda s, clip=clip: sizes.__setitem__(clip, s.stats.H.trace()) if s.name.endswith("down_proj") else None,
            limit=1,
            clip=clip,
        )
    x = fed(llama(), 0, "mlp.down_proj", IDS)
    norms = x.norm(dim=-1).flatten()
    torch.testing.assert_close(sizes[None], 2 * norms.square().mean())
    torch.testing.assert_close(sizes[1.0], 2 * norms.clamp_max(norms.median()).square().mean())


def test_a_poisoned_layer_is_named_and_the_model_keeps_its_mode():
    model = llama().train()
    blocks(model)[1].self_attn.v_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"block 1, self_attn.o_proj: an input of the calibration is not finite"):
        walk(model, [IDS], lambda s: None)
    assert model.training
    with pytest.raises(InputError, match="no batch"):
        walk(model, [], lambda s: None)
    with pytest.raises(InputError, match="offload='tape'"):
        walk(model, [IDS], lambda s: None, offload="tape")


class Letters:
    """A tokenizer: one token a letter."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict:
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}


def test_windows_come_from_as_many_texts_as_there_are():
    texts = [letter * 10 for letter in "abcde"] + ["f"]
    found = windows(texts, Letters(), 5, 4)
    assert sorted(set(found[:, 0].tolist())) == [ord(c) for c in "abcde"]
    more = windows(texts, Letters(), 10, 4, seed=1)
    assert torch.equal(more[:, :1].expand(-1, 4), more)
    assert all((more[:, 0] == ord(c)).sum() == 2 for c in "abcde")
    assert not torch.equal(windows(texts, Letters(), 5, 4, seed=3), found)
    assert torch.equal(windows(texts, Letters(), 5, 4), found)
    with pytest.raises(InputError, match="hold 10 windows of 4 tokens, not 11"):
        windows(texts, Letters(), 11, 4)


def test_windows_in_order_begin_where_they_are_told():
    found = windows(["abcdefghij", "klmnop", "qrstuvwxyz"], Letters(), 2, 3, seed=None, skip=4)
    assert ["".join(map(chr, row)) for row in found.tolist()] == ["efg", "uvw"]
    whole = windows(["abcdefghijkl"], Letters(), 3, 4, seed=5)
    assert sorted("".join(map(chr, row)) for row in whole.tolist()) == ["abcd", "efgh", "ijkl"]  # none overlap


def test_importance_is_the_root_of_the_mean_square_of_the_gradients():
    model = llama()
    block = blocks(model)[1]
    found = feature_importance(model, IDS, [block.mlp.down_proj, block.self_attn.q_proj])
    total = torch.zeros(24)
    for row in IDS:
        model.zero_grad()
        model(input_ids=row[None], labels=row[None]).loss.backward()
        total += block.mlp.down_proj.weight.grad.square().sum(0)
    torch.testing.assert_close(found[block.mlp.down_proj], (total / 3).sqrt())
    assert all(p.requires_grad for p in model.parameters())


def test_processes_share_what_they_saw(tmp_path):
    """Two processes with a batch each have the statistics of one with both."""
    script = tmp_path / "both.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from assay.lm._stats import LayerStats\n"
        "rank = int(sys.argv[1])\n"
        "dist.init_process_group('gloo', init_method='file://' + sys.argv[2], rank=rank, world_size=2)\n"
        "x = torch.arange(30.).reshape(10, 3)\n"
        "stats = LayerStats(3)\n"
        "stats.update(x[:7] if rank else x[7:], 2 * x[:7] if rank else x[7:] + 1)\n"
        "stats.all_reduce()\n"
        "torch.save([stats.H, stats.Delta, stats.mean_abs, stats.n], sys.argv[3] + str(rank))\n"
        "dist.destroy_process_group()\n"
    )
    both = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path / "meet"), str(tmp_path / "out")])
        for rank in (0, 1)
    ]
    assert [p.wait(timeout=60) for p in both] == [0, 0]
    x = torch.arange(30.0).reshape(10, 3)
    whole = LayerStats(3)
    whole.update(x, torch.cat([2 * x[:7], x[7:] + 1]))
    for rank in (0, 1):
        H, Delta, mean_abs, n = torch.load(tmp_path / f"out{rank}", weights_only=True)
        torch.testing.assert_close((H, Delta, mean_abs), (whole.H, whole.Delta, whole.mean_abs))
        assert n == 10
