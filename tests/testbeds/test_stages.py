"""Training in stages: seeded, resumed and cached; what a causal model and a blind prompt may see."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.mdlm import TrainingPlan
from assay.testbeds import _runsum_models, _stages, runsum
from assay.testbeds._stages import Batch, Stage, World, build, causal_logits, causal_loss, digest, initialise, result

SMALL = {**_runsum_models.SHAPE, "hidden_size": 24, "head_dim": 8, "intermediate_size": 32, "num_hidden_layers": 2}
AR = Stage("ar", TrainingPlan(3, 5e-3), until=3)
MASKED = Stage("masked", TrainingPlan(5, 2e-3), until=5)
BLIND = Stage("half-blind", TrainingPlan(4, 2e-3), until=4)
BLOCKS = Stage("blocks", TrainingPlan(2, 2e-3), until=2, shift=False, block_size=4)


def batch(seed: list[int]) -> Batch:
    drawn = runsum.draw(4, "easy", seed)
    return Batch(torch.cat([drawn.prompts, drawn.answers], 1), runsum.PROMPT_LENGTH)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A small world over an empty cache."""
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    return World("small", SMALL, runsum.MASK, batch, pauses=(2,))


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_chain_is_trained_once_and_alike_whether_it_pauses_or_not(world, tmp_path):
    chain = (AR, MASKED)
    paused = result(world, chain, 0)
    names = {path.name for path in (tmp_path / "cache" / "assets").iterdir()}
    assert f"small-{digest(world, (AR, replace(MASKED, until=2)), 0)}.safetensors" in names
    straight = result(replace(world, name="straight", pauses=()), chain, 0)
    assert equal(paused, straight)

    def untouched(seed: list[int]) -> Batch:
        raise AssertionError("trained again")

    assert equal(result(replace(world, batch=untouched), chain, 0), paused)
    assert not equal(result(world, chain, 1), paused)


def test_every_kind_of_stage_makes_a_model_that_loads(world):
    for chain in ((AR,), (AR, MASKED), (AR, replace(MASKED, until=2), BLIND), (AR, BLOCKS)):
        model = build(world, chain[-1])
        model.load_state_dict(result(world, chain, 0))
        config = model.config
        if chain[-1].kind != "ar":
            assert config.mask_token_id == runsum.MASK
            assert config.logit_shift == (chain[-1].kind != "blocks")
            assert config.attention == ("block" if chain[-1].kind == "blocks" else "full")


def test_a_diffusion_model_starts_as_the_causal_one(world):
    """Under a causal mask the weights of stage A give the causal model's logits: nothing is lost in between."""
    weights = result(world, (AR,), 0)
    causal, diffusion = build(world, AR), build(world, MASKED)
    causal.load_state_dict(weights)
    diffusion.load_state_dict(weights)
    ids = batch([5]).input_ids
    mask = torch.ones(75, 75, dtype=torch.bool).tril().expand(4, 1, -1, -1)
    with torch.no_grad():
        ours = diffusion(input_ids=ids, attention_mask=mask).logits[:, 1:]
        assert torch.allclose(ours, causal(input_ids=ids).logits[:, :-1], atol=1e-5)


def test_a_model_that_is_refused_is_not_kept(world, tmp_path):
    def refuse(model: Any, stage: Stage) -> None:
        raise RuntimeError("not good enough")

    with pytest.raises(RuntimeError, match="not good enough"):
        result(world, (AR,), 0, refuse)
    assert not (tmp_path / "cache" / "assets" / f"small-{digest(world, (AR,), 0)}.safetensors").exists()
    assert result(world, (AR,), 0)  # it can still be made


def test_everything_that_matters_is_in_the_digest(world):
    chain = (AR, MASKED)
    others = [
        (replace(world, shape={**SMALL, "num_hidden_layers": 3}), chain, 0),
        (replace(world, data="other"), chain, 0),
        (replace(world, name="other"), chain, 0),
        (world, chain, 1),
        (world, (AR,), 0),
        (world, (AR, replace(MASKED, until=4)), 0),
        (world, (AR, replace(MASKED, shift=False)), 0),
        (world, (AR, replace(MASKED, plan=TrainingPlan(5, 1e-3))), 0),
    ]
    digests = [digest(world, chain, 0)] + [digest(*other) for other in others]
    assert len(set(digests)) == len(digests)
    assert digest(replace(world, pauses=()), chain, 0) == digests[0]


def test_the_threads_of_the_caller_are_left_as_they_were(world):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        result(world, (AR,), 3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_initial_weights_have_the_deviations_that_training_needs():
    model = build(_runsum_models.RUNSUM, AR)
    initialise(model, torch.Generator().manual_seed(0))
    layer = model.model.layers[0]
    into_stream = (2 * 4) ** -0.5
    for weight, deviation in (
        (model.model.embed_tokens.weight, 1.0),
        (layer.self_attn.q_proj.weight, 96**-0.5),
        (layer.self_attn.o_proj.weight, 96**-0.5 * into_stream),
        (layer.mlp.up_proj.weight, 96**-0.5),
        (layer.mlp.down_proj.weight, 256**-0.5 * into_stream),
        (model.lm_head.weight, 0.02),
    ):
        assert float(weight.detach().std()) == pytest.approx(deviation, rel=0.05)
    assert bool((layer.self_attn.q_norm.weight == 1).all())
    assert sum(weight.numel() for weight in model.parameters()) == 448_096


# --- what sees what


def test_the_causal_loss_is_that_of_the_answer_given_all_before_it():
    model = build(_runsum_models.RUNSUM, AR)
    initialise(model, torch.Generator().manual_seed(0))
    it = batch([1])
    with torch.no_grad():
        log_p = model(input_ids=it.input_ids).logits.log_softmax(-1)
        expected = -torch.stack(
            [log_p[:, place - 1].gather(1, it.input_ids[:, place, None]) for place in range(35, 75)]
        )
        assert float(causal_loss(model, it)) == pytest.approx(float(expected.mean()), rel=1e-5)


def test_padding_on_the_left_changes_no_causal_logits():
    model = build(_runsum_models.RUNSUM, AR)
    initialise(model, torch.Generator().manual_seed(0))
    it = batch([1])
    padded = torch.cat([torch.full((4, 6), runsum.EOS), it.input_ids], 1)
    visible = torch.cat([torch.zeros(4, 6, dtype=torch.bool), torch.ones(4, 75, dtype=torch.bool)], 1)
    with torch.no_grad():
        assert torch.allclose(causal_logits(model, it), causal_logits(model, Batch(padded, 41, visible)), atol=1e-4)


def test_a_blind_prompt_does_not_change_with_the_answer():
    model = build(_runsum_models.RUNSUM, MASKED)
    for visible in (None, (torch.arange(75) >= 2).expand(4, 75)):
        it = Batch(batch([1]).input_ids, 35, visible)
        other = it.input_ids.clone()
        other[:, 40:] = runsum.EOS
        with torch.no_grad():
            blind = [
                model(input_ids=ids, attention_mask=_stages._blind_prompt(it)).last_hidden_state
                for ids in (it.input_ids, other)
            ]
            seeing = [model(input_ids=ids, attention_mask=visible).last_hidden_state for ids in (it.input_ids, other)]
        assert torch.equal(blind[0][:, :35], blind[1][:, :35])
        assert not torch.allclose(seeing[0][:, 5:35], seeing[1][:, 5:35])
        assert not torch.allclose(blind[0][:, 35:40], blind[1][:, 35:40])  # an answer still sees all of itself


def test_half_of_the_batches_have_a_blind_prompt(monkeypatch):
    calls = []

    def watch(model: Any, ids: torch.Tensor, maskable: torch.Tensor, **settings: Any) -> torch.Tensor:
        calls.append(settings["attention_mask"] is not None)
        assert maskable.tolist() == [[False] * 35 + [True] * 40] * 4
        assert settings["spread"] == "stratified"
        return torch.zeros(())

    monkeypatch.setattr(_stages, "masked_diffusion_loss", watch)
    world = World("small", SMALL, runsum.MASK, lambda seed: batch([0]))
    for step in range(300):
        _stages._loss(world, BLIND, None, 0, 3, step)
    assert sum(calls) == pytest.approx(150, abs=30)
    assert calls[:20] != [calls[0]] * 20
