"""The value model: what a policy of the same shape expects at each position, given what was visible there."""

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from assay._errors import InputError
from assay.mdlm import MaskedDiffusionLM, MDLMConfig


class DiffusionValueModel(PreTrainedModel):
    """A masked-diffusion transformer with one number a position in place of logits.

    V_j is read at position j of the row in which j is a target, so given exactly what was visible when j was decoded. The
    head has no bias and starts at zero: the first advantages are the rewards.

    Parameters
    ----------
    config
        Of the transformer; any family.

    Source: arXiv:2509.06949, section 4.3.
    """

    config: MDLMConfig
    config_class = MDLMConfig
    base_model_prefix = "body"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Layer"]  # noqa: RUF012 - transformers' declaration

    def __init__(self, config: MDLMConfig) -> None:
        config = copy.deepcopy(config)
        config.tie_word_embeddings = config.head_bias = False  # there is no language head
        super().__init__(config)
        self.body = MaskedDiffusionLM(config)
        self.body.lm_head = nn.Identity()
        self.value_head = nn.Linear(config.hidden_size, 1, bias=False)
        self.post_init()
        nn.init.zeros_(self.value_head.weight)

    @classmethod
    def from_policy(cls, model: MaskedDiffusionLM) -> "DiffusionValueModel":
        """A value model with the weights of a policy (its own copy) and a head of zeros.

        Parameters
        ----------
        model
            A `MaskedDiffusionLM` of any family.
        """
        if not isinstance(model, MaskedDiffusionLM):
            raise InputError(
                f"a value model is made from a MaskedDiffusionLM, got {type(model).__name__}: load the policy with "
                "MaskedDiffusionLM.from_checkpoint"
            )
        value: DiffusionValueModel = cls(model.config)
        value.body.model.load_state_dict(model.model.state_dict())
        value.to(device=model.device, dtype=model.dtype)  # type: ignore[call-arg]
        return value.train(model.training)

    def forward(self, input_ids: Tensor, **inputs: Any) -> Float[Tensor, "batch canvas"]:
        """Values of every column of the canvas.

        Parameters
        ----------
        input_ids : (B, T)
        **inputs
            ``attention_mask`` and ``position_ids``, as `MaskedDiffusionLM` takes them.
        """
        nothing = torch.zeros(0, dtype=torch.long, device=input_ids.device)
        hidden = self.body(input_ids=input_ids, logits_for=nothing, **inputs).last_hidden_state
        return self.value_head(hidden)[..., 0]
