"""The shape of a masked-diffusion language model, in one vocabulary for every family."""

from typing import Any

from transformers import PreTrainedConfig

from assay._errors import InputError

QK_NORMS = (None, "head", "full")
ATTENTIONS = ("full", "block")


class MDLMConfig(PreTrainedConfig):
    """Configuration of `MaskedDiffusionLM`.

    Parameters
    ----------
    vocab_size
        Rows of the embedding, [MASK] included.
    hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, intermediate_size
        As in every LLaMA-like model. ``num_key_value_heads`` and ``head_dim`` may be None: the number of heads, and
        ``hidden_size // num_attention_heads``.
    rms_norm_eps, rope_theta
        Epsilon of the RMSNorms; base of the rotary angles.
    max_position_embeddings
        The longest canvas the model takes, in tokens.
    tie_word_embeddings
        The head is the embedding.
    qkv_bias, output_bias, mlp_bias, head_bias, norm_bias
        Whether q, k and v; the attention's output; the three MLP layers; the head; the RMSNorms have a bias.
    qk_norm
        RMSNorm on queries and keys before the rotation: per head (``"head"``, SDAR), over all heads together
        (``"full"``, LLaDA's ``attention_layer_norm``), or None.
    rope_full_precision
        Rotate in float32 and cast back (LLaDA), or in the dtype of the model (Dream, SDAR). Equal in float32.
    scale_logits
        Divide the logits by sqrt(hidden_size) (an option of LLaDA).
    attention
        ``"full"``: every position sees every other; ``"block"``: all of its own block and of the blocks before.
    block_size
        Tokens a block, for ``"block"``; counted from position 0 unless a mask of another origin is given.
    logit_shift
        The raw logits of position i predict token i + 1 (Dream, and models made from autoregressive ones). The model
        undoes it: what it returns is always aligned.
    mask_token_id, eos_token_id, pad_token_id
        Special tokens. A model cannot be built without a mask id.
    source_family
        Where the weights come from: ``"llada"``, ``"dream"``, ``"sdar"``, ``"llama"``, ``"qwen2"``, ``"qwen3"``, or
        ``"assay"``.
    initializer_range
        Standard deviation of untrained weights.

    Raises
    ------
    InputError
        If the sizes do not fit together, or a special id lies outside the vocabulary or collides with [MASK].
    """

    model_type = "assay_mdlm"
    # The constructor that transformers makes takes more than its signature tells: not for run-time type checks.
    __no_type_check__ = True

    vocab_size: int = 32000
    hidden_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 1376
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norm_bias: bool = False
    qk_norm: str | None = None
    rope_full_precision: bool = False
    scale_logits: bool = False
    attention: str = "full"
    block_size: int | None = None
    logit_shift: bool = False
    mask_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    source_family: str = "assay"
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise InputError(
                    f"hidden_size {self.hidden_size} is no multiple of num_attention_heads {self.num_attention_heads}: "
                    "change one, or give head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        self._check()
        super().__post_init__(**kwargs)

    def _check(self) -> None:
        assert self.num_key_value_heads is not None
        assert self.head_dim is not None
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads "
                f"{self.num_key_value_heads}: every key head serves equally many query heads"
            )
        if self.head_dim % 2:
            raise InputError(f"head_dim must be even, got {self.head_dim}: the rotation pairs its two halves")
        if self.qk_norm not in QK_NORMS:
            raise InputError(f"qk_norm must be None, 'head' or 'full', got {self.qk_norm!r}")
        if self.attention not in ATTENTIONS:
            raise InputError(f"attention must be 'full' or 'block', got {self.attention!r}")
        if self.attention == "block" and (self.block_size is None or self.block_size < 1):
            raise InputError(f"attention 'block' needs a block_size of at least 1, got {self.block_size}: SDAR uses 4")
        if self.head_bias and self.tie_word_embeddings:
            raise InputError(
                "a tied head is the embedding and has no bias: set head_bias or tie_word_embeddings to False"
            )
        for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < self.vocab_size:
                raise InputError(
                    f"{name} {token} lies outside the vocabulary of {self.vocab_size}: give an id from 0 to {self.vocab_size - 1}"
                )
        if self.mask_token_id is not None:
            for name in ("eos_token_id", "pad_token_id"):
                if getattr(self, name) == self.mask_token_id:
                    raise InputError(
                        f"{name} equals mask_token_id {self.mask_token_id}: a token that is committed must not read as [MASK], "
                        "give each an id of its own"
                    )
