"""Seeded training in stages, each result cached: what the recipes of the test beds are made of.

A *chain* is a tuple of stages; its result is the averaged weights after the last one. Every result is one safetensors
file in the cache, named by a digest of everything it depends on, and made once. A stage whose schedule is stopped part
way (``until``) leaves the optimizer's state in its file, so that the longer chain of the same schedule goes on from there.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

from assay.data._cache import cache, made_once
from assay.mdlm._config import MDLMConfig
from assay.mdlm._losses import block_diffusion_loss, masked_diffusion_loss
from assay.mdlm._masks import positions_from_padding
from assay.mdlm._model import MaskedDiffusionLM
from assay.mdlm._training import Training, TrainingPlan

_VERSION = 1  # of the code below and of the losses: a new one makes every cached model anew
_STEP_SEEDS = 2  # NumPy seeds a step: its batch, its masks


@dataclass(frozen=True)
class Stage:
    """One stage of training.

    Attributes
    ----------
    kind
        *ar*: causal next-token cross entropy on the answer. *masked*: the masked diffusion loss on the answer, one
        stratified rate a row. *half-blind*: the same, and in half of the batches the prompt does not see the answer.
        *blocks*: the block diffusion loss.
    plan
        Steps, rates and the like.
    until
        The step whose averaged weights are the result.
    shift
        Whether position i - 1 predicts token i, as it did in the *ar* stage.
    block_size
        Of a model that attends block by block.
    """

    kind: Literal["ar", "masked", "half-blind", "blocks"]
    plan: TrainingPlan
    until: int
    shift: bool = True
    block_size: int | None = None


Chain = tuple[Stage, ...]


class Batch(NamedTuple):
    """``input_ids`` (rows, columns) with answers from column ``start`` on; ``visible`` is False at padding."""

    input_ids: Tensor
    start: int
    visible: Tensor | None = None


@dataclass(frozen=True)
class World:
    """What a test bed trains on.

    Attributes
    ----------
    name
        Stands in the names of cached files and beside progress bars.
    shape
        Of the transformer: arguments of both configurations.
    mask_token_id
        Of the diffusion models.
    batch
        ``batch(seed)`` draws one batch of training; ``seed`` is a list of integers.
    data
        A digest of the data, where they come from a file.
    pauses
        Steps at which a long schedule is kept, to go on from.
    """

    name: str
    shape: dict[str, Any]
    mask_token_id: int
    batch: Callable[[list[int]], Batch]
    data: str = ""
    pauses: tuple[int, ...] = ()


def digest(world: World, chain: Chain, seed: int) -> str:
    """Of everything that a result depends on, 16 hexadecimal digits."""
    recipe = [_VERSION, world.name, world.shape, world.data, seed, [asdict(stage) for stage in chain]]
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def build(world: World, stage: Stage) -> Any:
    """An untrained model of a stage: a causal LM of transformers, or a `MaskedDiffusionLM`."""
    if stage.kind == "ar":
        return Qwen3ForCausalLM(_causal_config(world))
    shape = {key: value for key, value in world.shape.items() if key != "bos_token_id"}
    return MaskedDiffusionLM(
        MDLMConfig(
            **shape,
            qk_norm="head",
            attention="full" if stage.block_size is None else "block",
            block_size=stage.block_size,
            logit_shift=stage.shift,
            mask_token_id=world.mask_token_id,
            source_family="qwen3",
        )
    )


def result(
    world: World, chain: Chain, seed: int, accept: Callable[[Any, Stage], None] = lambda model, stage: None
) -> dict[str, Tensor]:
    """The averaged weights of a chain, by parameter: from the cache, or trained now.

    Parameters
    ----------
    accept
        Called with each trained model and its stage; raises where the model is not what it should be, and nothing is
        kept then.
    """
    from safetensors import safe_open

    path = _state(world, chain, seed, accept)
    with safe_open(path, "pt") as file:
        names = [name for name in file.keys() if name.startswith("average.")]  # noqa: SIM118
        return {name.removeprefix("average."): file.get_tensor(name) for name in names}


def _state(world: World, chain: Chain, seed: int, accept: Callable[[Any, Stage], None], *, pause: bool = False) -> Path:
    """The cached state of training after a chain; made, with all before it, where it is missing.

    A ``pause`` is only gone on from: its model need not be any good.
    """
    stage = chain[-1]
    target = cache() / "assets" / f"{world.name}-{digest(world, chain, seed)}.safetensors"

    def make(path: Path) -> None:
        with _one_thread():
            model = build(world, stage)
            if len(chain) == 1:
                initialise(model, _generator(seed, 0, 0))
            else:
                model.load_state_dict(result(world, chain[:-1], seed, accept))
            training = Training(model, stage.plan)
            if before := [step for step in world.pauses if step < stage.until]:
                paused = replace(stage, until=max(before))
                training.restore(_state(world, (*chain[:-1], paused), seed, accept, pause=True))
            label = f"{world.name}, seed {seed}: {stage.kind}"
            training.advance(lambda step: _loss(world, stage, model, seed, len(chain), step), stage.until, label)
            training.save(path)
            if not pause:
                training.use_average()
                accept(model, stage)

    return made_once(target, make)


def _loss(world: World, stage: Stage, model: Any, seed: int, number: int, step: int) -> Tensor:
    """The loss of one step of a stage. Batch and masks depend on seed, stage and step alone."""
    batch = world.batch([seed, number, step, 0])
    generator = _generator(seed, number, step)
    ids, start = batch.input_ids, batch.start
    if stage.kind == "ar":
        return causal_loss(model, batch)
    if stage.kind == "blocks":
        return block_diffusion_loss(model, ids, start, attention_mask=batch.visible, generator=generator)
    maskable = (torch.arange(ids.shape[1]) >= start).expand(ids.shape)
    attention_mask = batch.visible
    if stage.kind == "half-blind" and float(torch.rand((), generator=generator)) < 0.5:
        attention_mask = _blind_prompt(batch)
    position_ids = None if batch.visible is None else positions_from_padding(batch.visible)
    return masked_diffusion_loss(
        model,
        ids,
        maskable,
        attention_mask=attention_mask,
        position_ids=position_ids,
        spread="stratified",
        generator=generator,
    )


def causal_loss(model: Any, batch: Batch) -> Tensor:
    """Mean cross entropy of the answers' tokens, each given all before it."""
    logits = causal_logits(model, batch)
    return cross_entropy(logits.transpose(1, 2), batch.input_ids[:, batch.start :])


def causal_logits(model: Any, batch: Batch) -> Tensor:
    """(rows, answer columns, vocabulary): what a causal model says of each token of the answers, the true ones before it."""
    masks = {}
    if batch.visible is not None:
        masks = {
            "attention_mask": batch.visible[:, :-1].long(),
            "position_ids": positions_from_padding(batch.visible)[:, :-1],
        }
    logits = model(input_ids=batch.input_ids[:, :-1], use_cache=False, **masks).logits
    return logits[:, batch.start - 1 :]


def _blind_prompt(batch: Batch) -> Tensor:
    """(rows, 1, columns, columns), True = visible: the prompt sees itself alone, the answer sees all."""
    rows, columns = batch.input_ids.shape
    answer = torch.arange(columns) >= batch.start
    mask = ~(~answer[:, None] & answer[None, :]).expand(rows, 1, -1, -1)
    return mask if batch.visible is None else mask & batch.visible[:, None, None, :]


@torch.no_grad()
def initialise(model: Any, generator: torch.Generator) -> None:
    """Draw the weights of an untrained causal model.

    Embeddings have standard deviation 1, linear layers 1/sqrt(inputs), those that write into the residual stream that
    over sqrt(2 layers), the head 0.02. With small embeddings the first stage takes more than twice as long.
    """
    layers = model.config.num_hidden_layers
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)  # norms
        elif "embed_tokens" in name:
            weight.normal_(0, 1, generator=generator)
        elif "lm_head" in name:
            weight.normal_(0, 0.02, generator=generator)
        else:
            deviation = weight.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                deviation /= (2 * layers) ** 0.5
            weight.normal_(0, deviation, generator=generator)


def _causal_config(world: World) -> Qwen3Config:
    shape = {key: value for key, value in world.shape.items() if key != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": world.shape["rope_theta"]}
    return Qwen3Config(**shape, rope_parameters=rope, attention_bias=False)


def _generator(seed: int, stage: int, step: int) -> torch.Generator:
    mixed = np.random.SeedSequence([seed, stage, step, 1]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed >> np.uint64(1)))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums come out the same whatever the number of cores; more threads are hardly faster at this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
