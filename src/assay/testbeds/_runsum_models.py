"""The trained models of the run sums: their recipes, the weights that ship with Assay, and the one door to both.

Stage A teaches a causal model the task. Stage B turns it into a masked diffusion model (trained so from nothing, no
result is ever learned: about one in six is masked while its left neighbour is visible). Stage C, the *main* model,
continues B with a prompt that in half of the batches does not see the answer. B may keep partial results in the
prompt's columns, which a prompt cache then freezes; C is trained to have the property that caches presuppose (a prompt
whose keys and values barely change) without any change to inference. Both are studied; *plain* is B trained to its end.
"""

import hashlib
import json
from dataclasses import replace
from functools import cache as once
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay._errors import InputError
from assay.mdlm._training import TrainingPlan
from assay.testbeds import runsum
from assay.testbeds._stages import Batch, Chain, Stage, World, build, causal_logits, digest, result

WEIGHTS = Path(__file__).parent / "weights"

SHAPE: dict[str, Any] = {
    "vocab_size": runsum.VOCABULARY,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": runsum.BOS,
    "eos_token_id": runsum.EOS,
    "pad_token_id": runsum.EOS,
}
ROWS = 16  # fresh problems a step


def _batch(seed: list[int]) -> Batch:
    drawn = runsum.draw(ROWS, "easy", seed)
    return Batch(torch.cat([drawn.prompts, drawn.answers], 1), runsum.PROMPT_LENGTH)


RUNSUM = World("runsum", SHAPE, runsum.MASK, _batch, data=f"{ROWS} rows", pauses=(900,))
GUIDER = replace(RUNSUM, shape={**SHAPE, "num_hidden_layers": 2})

_AR = Stage("ar", TrainingPlan(600, 5e-3), until=600)
_EARLY = replace(_AR, until=330)
_SFT = Stage("masked", TrainingPlan(1450, 2e-3), until=1450)
_MAIN = Stage("half-blind", TrainingPlan(620, 1.5e-3), until=620)
_UNSHIFTED = replace(_SFT, shift=False)
_BLOCKS = Stage("blocks", TrainingPlan(401, 2e-3), until=401, shift=False)

#: What each model is trained on, and in which stages.
RECIPES: dict[str, tuple[World, Chain]] = {
    "runsum-dlm": (RUNSUM, (_AR, replace(_SFT, until=900), _MAIN)),
    "runsum-dlm-plain": (RUNSUM, (_AR, _SFT)),
    # The causal model knows the task (.98 exact, teacher-forced), the diffusion model hardly: half of its answers are right,
    # and in four tasks of ten some samples are right and some wrong. There is much to learn, and all that it takes is there.
    "runsum-dlm-start": (RUNSUM, (_EARLY, replace(_SFT, until=80))),
    "runsum-dlm-unshifted": (RUNSUM, (_AR, _UNSHIFTED)),
    "runsum-dlm-block4": (RUNSUM, (_AR, replace(_BLOCKS, block_size=4))),
    "runsum-dlm-block8": (RUNSUM, (_AR, replace(_BLOCKS, block_size=8))),
    "runsum-ar": (RUNSUM, (_AR,)),
    "runsum-guider": (GUIDER, (_AR,)),
}
#: Share of exact answers, one token a step, that the main model must reach on either split.
REQUIRED = 0.97


def load(name: str, seed: int = 0) -> Any:
    """A trained model of the run sums, in float32 and evaluation mode, on the CPU.

    Shipped weights are taken where there are some (float16), then the cache; else it is trained now, with a bar, and
    kept: the main model takes about three minutes of one core.

    Parameters
    ----------
    name
        ``runsum-dlm`` (the main model), ``-plain``, ``-start`` (early: where reinforcement learning begins),
        ``-unshifted``, ``-block4``, ``-block8``: a `MaskedDiffusionLM`. ``runsum-ar`` (stage A: a strong guider) and
        ``runsum-guider`` (two layers): causal models of transformers.
    seed
        Of the training: weights, problems and masks.

    Raises
    ------
    InputError
        If there is no such model.
    RuntimeError
        If a model that was trained now is not as good as the recipe promises.
    """
    if name not in RECIPES:
        raise InputError(f"there is no model {name!r} of the run sums: use one of {', '.join(RECIPES)}")
    if seed < 0:
        raise InputError(f"a seed of {seed} is none: use 0 or more")
    world, chain = RECIPES[name]
    model = build(world, chain[-1])
    weights = _shipped(name, seed)
    model.load_state_dict(result(world, chain, seed, _accept) if weights is None else weights)
    return model.eval()


def _accept(model: Any, stage: Stage) -> None:
    """Refuse a model that did not learn its task. One that was stopped on its way need not be any good."""
    if stage.kind == "ar" and stage.until == stage.plan.steps:
        for split in ("easy", "hard"):
            share = teacher_forced_exact(model, runsum.problems(split, 256))
            _require(share, f"the causal model of {model.config.num_hidden_layers} layers", f"{split}, teacher-forced")
    if stage.kind == "half-blind":
        for split in ("easy", "hard"):
            share = one_token_a_step_exact(model, runsum.problems(split, 100))
            _require(share, "runsum-dlm", f"{split}, one token a step")


def _require(share: float, what: str, where: str) -> None:
    if share < REQUIRED:
        raise RuntimeError(
            f"{what} writes {share:.1%} of the answers exactly ({where}), at least {REQUIRED:.0%} was expected: "
            "nothing is kept; another seed may do, and a changed recipe must be looked into"
        )


@torch.no_grad()
def teacher_forced_exact(model: Any, problems: runsum.Problems) -> float:
    """Share of problems of which a causal model gets every token right, given the true ones before it."""
    ids = torch.cat([problems.prompts, problems.answers], 1)
    guess = causal_logits(model, Batch(ids, runsum.PROMPT_LENGTH)).argmax(-1)
    return float((guess == problems.answers).all(1).float().mean())


def one_token_a_step_exact(model: Any, problems: runsum.Problems) -> float:
    """Share of exact answers where the most confident token is committed at each step, without a cache."""
    from assay.mdlm import DiffusionGenerationConfig, diffusion_generate

    config = DiffusionGenerationConfig(max_new_tokens=runsum.ANSWER_LENGTH)
    written = diffusion_generate(model, problems.prompts, config).sequences[:, runsum.PROMPT_LENGTH :]
    return float(runsum.exact_match(problems.prompts, written).float().mean())


def _shipped(name: str, seed: int) -> dict[str, Tensor] | None:
    """The weights that come with Assay, if there are some and they are of today's recipe."""
    from safetensors.torch import load_file

    about = shipped_weights().get(f"{name}-{seed}")
    if about is None or about["recipe"] != digest(*RECIPES[name], seed):
        return None
    file = WEIGHTS / f"{name}-{seed}.safetensors"
    if hashlib.sha256(file.read_bytes()).hexdigest() != about["sha256"]:
        raise InputError(f"{file} is damaged: install Assay again")
    return {key: tensor.float() for key, tensor in load_file(file).items()}


@once
def shipped_weights() -> dict[str, dict[str, Any]]:
    """What ``weights/weights.json`` says of each file: the digest of its recipe, its sha256, what was measured."""
    listed = WEIGHTS / "weights.json"
    return json.loads(listed.read_text()) if listed.exists() else {}


def ship(name: str, seed: int) -> Path:
    """Write a model's weights as float16 into the package, with their digests: for whoever maintains Assay."""
    from safetensors.torch import save_file

    world, chain = RECIPES[name]
    weights = {key: tensor.half() for key, tensor in result(world, chain, seed, _accept).items()}
    WEIGHTS.mkdir(exist_ok=True)
    file = WEIGHTS / f"{name}-{seed}.safetensors"
    save_file(weights, file)
    file.chmod(0o644)
    shipped_weights.cache_clear()
    listed = dict(shipped_weights())
    listed[file.stem] = {
        "recipe": digest(world, chain, seed),
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    (WEIGHTS / "weights.json").write_text(json.dumps(dict(sorted(listed.items())), indent=1) + "\n")
    shipped_weights.cache_clear()
    return file
