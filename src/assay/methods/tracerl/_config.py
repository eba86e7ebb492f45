"""Settings of a TraceRL run."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from assay._errors import InputError
from assay.mdlm import DiffusionGenerationConfig
from assay.methods.tracerl._losses import KLNormalize, Normalize

Method = Literal["trace", "random", "coupled", "one_step"]
METHODS = ("trace", "random", "coupled", "one_step")


@dataclass(kw_only=True)
class TraceRLConfig:
    """How a policy is trained. The defaults are those of the released SDAR / TraDo runs.

    Parameters
    ----------
    generation
        How the rollouts are decoded. Its seed is not used; on a block model its blocks start at the prompt's end.
    output_dir
        Where checkpoints and the log go; None: nowhere.
    steps
        RL steps.
    tasks_per_step, num_generations
        Prompts a step, and responses a prompt.
    method
        "trace": rows follow the decoding order. "random", "coupled", "one_step": the baselines.
    shrink
        Decoding steps that become one training row; None: 8 for full attention, 1 for block attention.
    block_size
        Of a block model, and required there; None for full attention.
    warm_block_size, warm_steps
        The rollouts of the first so many steps use this block size (growing blocks).
    normalize
        Of `trace_policy_loss`; None: "step" for full attention, "length" for block attention.
    eps
        Of the clip, for the policy and for the value.
    beta, kl_ref, kl_normalize
        Weight of the KL penalty; against the policy before the step ("old") or before the run ("reference"); its scale.
    logprob_temperature
        Divides the logits of the trained policy; "rollout": the rollout's temperature. Released: 1.
    limit_margin
        Responses within so many tokens of the length limit count as wrong; None: that is the reward's business.
    keep_band
        Tasks whose mean reward lies outside are dropped; None: none are.
    post_num
        Pads that stay targets; None: all. With pad = EOS, 0 drops the answer's own stop token too.
    gamma, lam
        Of `step_gae`, with a value model.
    train_value_every
        The value model is trained every so many steps.
    value_lr, value_reward
        Its learning rate, and what it learns to expect: the z-scored reward (released) or the raw one.
    masks_per_sample, mask_rate
        Of the baselines, see `assay.methods.tracerl.baselines`.
    max_prompt_length
        Longer prompts are dropped, in tokens; None: none are.
    learning_rate, adam_betas, adam_eps, weight_decay, max_grad_norm
        AdamW and the clip of the gradient's norm. The rate is constant unless a scheduler is given.
    micro_batch_size
        Training rows in a forward.
    gradient_accumulation_steps
        Forwards an update; the last update of a step may have fewer.
    updates_per_step
        Share the rows of a step out to so many updates instead.
    rollout_batch_size
        Canvases generated at once.
    eval_every, eval_generation
        Evaluate every so many steps (0: only when asked), decoding so; None: as the rollouts, at temperature 0.
    save_every
        Keep a checkpoint every so many steps (0: at the end).
    seed
        Of prompts' order, sampling, masks and rows' order.
    bf16, gradient_checkpointing, use_cpu
        bfloat16 autocast; recompute activations; stay on the CPU where there is a GPU.

    Raises
    ------
    InputError
        If a value is out of its range.

    Source: arXiv:2509.06949, table of settings and released configs.
    """

    generation: DiffusionGenerationConfig
    output_dir: str | None = None
    steps: int = 100
    tasks_per_step: int = 64
    num_generations: int = 16
    method: Method = "trace"
    shrink: int | None = None
    block_size: int | None = None
    warm_block_size: int | None = None
    warm_steps: int = 0
    normalize: Normalize | None = None
    eps: float = 0.2
    beta: float = 0.01
    kl_ref: Literal["old", "reference"] = "old"
    kl_normalize: KLNormalize | None = None
    logprob_temperature: float | Literal["rollout"] = 1.0
    limit_margin: int | None = 5
    keep_band: tuple[float, float] | None = (0.2, 0.8)
    post_num: int | None = 0
    gamma: float = 1.0
    lam: float = 1.0
    train_value_every: int = 1
    value_lr: float = 5e-6
    value_reward: Literal["zscore", "raw"] = "zscore"
    masks_per_sample: int | None = None
    mask_rate: tuple[float, float] = (0.1, 0.9)
    max_prompt_length: int | None = None
    learning_rate: float = 1e-6
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch_size: int = 8
    gradient_accumulation_steps: int = 32
    updates_per_step: int | None = None
    rollout_batch_size: int = 256
    eval_every: int = 0
    eval_generation: DiffusionGenerationConfig | None = None
    save_every: int = 0
    seed: int = 0
    bf16: bool = False
    gradient_checkpointing: bool = False
    use_cpu: bool = False

    def __post_init__(self) -> None:
        least_one: tuple[str, ...] = (
            "steps",
            "tasks_per_step",
            "num_generations",
            "shrink",
            "block_size",
            "warm_block_size",
        )
        least_one += ("train_value_every", "masks_per_sample", "max_prompt_length", "micro_batch_size")
        least_one += ("gradient_accumulation_steps", "updates_per_step", "rollout_batch_size")
        for name in least_one:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}, expected at least 1: change it in TraceRLConfig")
        for name in ("warm_steps", "eval_every", "save_every", "post_num", "limit_margin", "seed", "eps", "beta"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InputError(f"{name} is {value}, expected 0 or more: change it in TraceRLConfig")
        for name in ("learning_rate", "value_lr", "max_grad_norm"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise InputError(f"{name} is {value}, expected a positive number: change it in TraceRLConfig")
        if self.num_generations < 2:
            raise InputError(
                "num_generations is 1, and a group of one has no baseline: sample at least 2 responses a prompt"
            )
        for name, value, known in (
            ("method", self.method, METHODS),
            ("normalize", self.normalize, (None, "step", "length")),
            ("kl_normalize", self.kl_normalize, (None, "step", "length", "sum")),
            ("kl_ref", self.kl_ref, ("old", "reference")),
            ("value_reward", self.value_reward, ("zscore", "raw")),
        ):
            if value not in known:
                raise InputError(f"{name} is {value!r}, expected one of {', '.join(map(str, known))}")
        if self.keep_band is not None and not self.keep_band[0] <= self.keep_band[1]:
            raise InputError(f"keep_band {self.keep_band} is no band: give (low, high), or None to keep all tasks")
        temperature = self.logprob_temperature
        if isinstance(temperature, str):
            if temperature != "rollout" or self.generation.temperature == 0:
                raise InputError(
                    f"logprob_temperature is {temperature!r} at a rollout temperature of {self.generation.temperature}: give a "
                    "positive number, or 'rollout' with a temperature above 0"
                )
        elif temperature <= 0:
            raise InputError(f"logprob_temperature is {temperature}, expected a positive number: released is 1")
        if (self.warm_block_size is None) != (self.warm_steps == 0):
            raise InputError("warm_block_size and warm_steps go together: give both, or neither")

    @property
    def temperature(self) -> float:
        """What divides the logits of the trained policy."""
        given = self.logprob_temperature
        return float(self.generation.temperature if given == "rollout" else given)

    @property
    def responses_per_step(self) -> int:
        """The batch of a step before tasks are dropped."""
        return self.tasks_per_step * self.num_generations

    def as_dict(self) -> dict[str, Any]:
        """All settings, nested, for a result's file."""
        return asdict(self)
