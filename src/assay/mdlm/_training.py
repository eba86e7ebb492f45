"""A small training loop: AdamW, warm-up and cosine, a running average of the weights. It stops and goes on bit for bit."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from assay._errors import InputError


@dataclass(frozen=True)
class TrainingPlan:
    """How a model is trained.

    Attributes
    ----------
    steps, lr
        Optimizer steps, and the highest learning rate.
    warmup
        Steps over which the rate rises to ``lr``. It falls on a cosine to ``floor`` times ``lr`` at the last step.
    betas, weight_decay
        Of AdamW, for all weights.
    clip
        The gradient's norm is cut to this.
    ema
        The average's decay at step s is min(ema, s / (s + 20)): early on it forgets the start quickly.
    """

    steps: int
    lr: float
    warmup: int = 100
    floor: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    ema: float = 0.995

    def __post_init__(self) -> None:
        if self.steps < 1 or self.lr <= 0 or self.warmup < 0:
            raise InputError(
                f"{self} is no plan: at least 1 step, a positive rate and no negative warm-up are expected"
            )

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        share = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return self.lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


class Training:
    """A model in training, its optimizer, and the running average of its weights.

    Parameters
    ----------
    model
        Trained in place.
    plan
        The schedule is laid over all of its steps, also where a run stops before.
    """

    def __init__(self, model: nn.Module, plan: TrainingPlan) -> None:
        self.model, self.plan, self.step = model, plan, 0
        self._weights = dict(model.named_parameters())
        self.average: dict[str, Tensor] = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self._optimizer = torch.optim.AdamW(
            list(self._weights.values()), lr=plan.lr, betas=plan.betas, weight_decay=plan.weight_decay
        )

    def advance(self, loss_at: Callable[[int], Tensor], until: int | None = None, label: str = "training") -> None:
        """Train up to a step, with a bar on a terminal.

        Parameters
        ----------
        loss_at
            The loss of a step, counted from 0. Its batch and its chance should depend on the step alone: a run that was
            stopped then goes on as if it had not been.
        until
            By default the plan's last step.
        label
            Stands beside the bar.

        Raises
        ------
        RuntimeError
            If the gradient is not finite: the weights stay as they were.
        """
        from tqdm import tqdm

        until = self.plan.steps if until is None else min(until, self.plan.steps)
        self.model.train()
        with tqdm(total=until, initial=self.step, desc=label, unit="step", disable=None, leave=False) as bar:
            while self.step < until:
                for group in self._optimizer.param_groups:
                    group["lr"] = self.plan.rate(self.step)
                self._optimizer.zero_grad()
                loss = loss_at(self.step)
                loss.backward()
                norm = nn.utils.clip_grad_norm_(list(self._weights.values()), self.plan.clip)
                if not torch.isfinite(norm):
                    raise RuntimeError(
                        f"{label}: the gradient of step {self.step} is not finite (loss {float(loss.detach()):.4g}): "
                        "lower the learning rate, or look for bad tokens in the batch"
                    )
                self._optimizer.step()
                self.step += 1
                decay = min(self.plan.ema, self.step / (self.step + 20))
                weights = [weight.detach() for weight in self._weights.values()]
                torch._foreach_lerp_(list(self.average.values()), weights, 1 - decay)
                bar.update()
                if self.step % 10 == 0:
                    bar.set_postfix(loss=f"{float(loss.detach()):.4f}", refresh=False)
        self.model.eval()

    @torch.no_grad()
    def use_average(self) -> None:
        """Put the averaged weights into the model."""
        for name, weight in self._weights.items():
            weight.copy_(self.average[name])

    def save(self, path: Path) -> None:
        """Write weights, average and optimizer state to one safetensors file."""
        kept = {f"average.{name}": tensor for name, tensor in self.average.items()}
        for name, weight in self._weights.items():
            kept[f"weight.{name}"] = weight.detach()
            for key, tensor in self._optimizer.state[weight].items():
                kept[f"{key}.{name}"] = tensor
        save_file({name: tensor.contiguous() for name, tensor in kept.items()}, path, {"step": str(self.step)})

    @torch.no_grad()
    def restore(self, path: Path) -> None:
        """Go on from what `save` wrote.

        Raises
        ------
        InputError
            If it is of another model.
        """
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            if {f"weight.{name}" for name in self._weights} != {n for n in names if n.startswith("weight.")}:
                raise InputError(f"{path} is the state of another model: give the one that was saved with this model")
            shapes = {name: tuple(file.get_slice(f"weight.{name}").get_shape()) for name in self._weights}
            if any(shapes[name] != tuple(weight.shape) for name, weight in self._weights.items()):
                raise InputError(
                    f"{path} is the state of a model of another size: give the one that was saved with this"
                )
            for name, weight in self._weights.items():
                weight.copy_(file.get_tensor(f"weight.{name}"))
                self.average[name].copy_(file.get_tensor(f"average.{name}"))
                keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in names]
                self._optimizer.state[weight] = {key: file.get_tensor(f"{key}.{name}") for key in keys}
            self.step = int(file.metadata()["step"])


def shortened(plan: TrainingPlan, steps: int) -> TrainingPlan:
    """The same plan over fewer steps, its warm-up shortened alike: for smoke tests of a recipe."""
    return replace(plan, steps=steps, warmup=min(plan.warmup, max(1, steps * plan.warmup // plan.steps)))
