"""The model: a LLaMA-like transformer without a causal mask, whose logits are aligned and whose calls may be partial."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from assay._errors import InputError
from assay.mdlm._cache import RegionCache, Span, Visit, Write
from assay.mdlm._config import MDLMConfig
from assay.mdlm._masks import positions_from_padding


@dataclass
class MDLMOutput(ModelOutput):
    """What a forward returns.

    Attributes
    ----------
    logits : (B, n, V), or (n, V) where ``logits_for`` was a mask
        Aligned: the row of column j is the distribution of the token AT column j.
    last_hidden_state : (B, e - a, d)
        After the final norm, of the columns [a, e) of the region.
    cache : RegionCache or None
        The one that was given.
    """

    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    cache: Any = None


@dataclass
class Counters:
    """What a model computed since the last `reset`.

    Attributes
    ----------
    calls
        Forwards.
    token_forwards
        Sum over calls of the tokens whose queries were computed (rows times columns, padding included).
    kv_columns
        Sum over calls of the keys that were attended (rows times columns, padding included).
    """

    calls: int = 0
    token_forwards: int = 0
    kv_columns: int = 0

    def reset(self) -> None:
        """Back to zero."""
        self.calls = self.token_forwards = self.kv_columns = 0


class RMSNorm(nn.Module):
    """Normalised in float32, cast back, then multiplied by the weight."""

    def __init__(self, width: int, eps: float, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) in and out."""
        wide = x.to(_at_least_float32(x.dtype))
        scaled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return self.weight * scaled if self.bias is None else self.weight * scaled + self.bias


@dataclass(frozen=True)
class _Call:
    """What all layers of one forward share."""

    cos: Tensor  # (B or 1, 1, R, head_dim / 2)
    sin: Tensor
    mask: Tensor | None  # additive, (B or 1, 1, R or 1, K), in the model's dtype
    visit: Visit | None


class Attention(nn.Module):
    """Queries of the computed columns over the visible ones."""

    def __init__(self, config: MDLMConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads  # type: ignore[assignment]
        self.head_dim: int = config.head_dim  # type: ignore[assignment]
        self.full_precision = config.rope_full_precision
        self.norm_heads = config.qk_norm == "head"
        d, q, kv = config.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(d, q, bias=config.qkv_bias)
        self.k_proj = nn.Linear(d, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(d, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q, d, bias=config.output_bias)
        if config.qk_norm is not None:
            widths = (self.head_dim, self.head_dim) if self.norm_heads else (q, kv)
            self.q_norm = RMSNorm(widths[0], config.rms_norm_eps, config.norm_bias)
            self.k_norm = RMSNorm(widths[1], config.rms_norm_eps, config.norm_bias)
        else:
            self.q_norm = self.k_norm = None  # type: ignore[assignment]

    def forward(self, x: Tensor, call: _Call) -> Tensor:
        """(B, R, d) in and out."""
        q = self._rotated(self.q_proj(x), self.q_norm, self.heads, call)
        k = self._rotated(self.k_proj(x), self.k_norm, self.kv_heads, call)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        if call.visit is None:
            out = self._attend(q, k, v, call.mask)
        else:
            with call.visit.layer(self.layer, k, v) as (keys, values):
                out = self._attend(q, keys, values, call.mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.heads != self.kv_heads)

    def _rotated(self, x: Tensor, norm: RMSNorm | None, heads: int, call: _Call) -> Tensor:
        """(B, R, heads * head_dim) to (B, heads, R, head_dim), normalised and turned."""
        if norm is not None and not self.norm_heads:
            x = norm(x)
        x = x.unflatten(-1, (heads, self.head_dim))
        if norm is not None and self.norm_heads:
            x = norm(x)
        x = x.transpose(1, 2)
        dtype = x.dtype
        a, b = x.to(call.cos.dtype).chunk(2, dim=-1)
        return torch.cat((a * call.cos - b * call.sin, b * call.cos + a * call.sin), dim=-1).to(dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: MDLMConfig) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(d, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, d, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, R, d) in and out."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(GradientCheckpointingLayer):
    """A pre-norm residual block."""

    def __init__(self, config: MDLMConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, index)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_bias)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_bias)

    def forward(self, x: Tensor, call: _Call) -> Tensor:
        """(B, R, d) in and out."""
        x = x + self.self_attn(self.input_layernorm(x), call)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers and final norm, under the names that most families use."""

    def __init__(self, config: MDLMConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_bias)


class MaskedDiffusionLM(PreTrainedModel):
    """A masked-diffusion language model of any family: LLaDA, Dream, SDAR, one made from an autoregressive model, or new.

    Attributes
    ----------
    counters : Counters
        What was computed, over all calls.

    Raises
    ------
    InputError
        If the configuration has no mask id.
    """

    config: MDLMConfig
    config_class = MDLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Layer"]  # noqa: RUF012 - transformers' declaration
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - the same

    def __init__(self, config: MDLMConfig) -> None:
        super().__init__(config)
        if config.mask_token_id is None:
            raise InputError("mask_token_id is not set: a masked-diffusion model needs a token of its own for [MASK]")
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.counters = Counters()
        self.post_init()

    @property
    def mask_token_id(self) -> int:
        """The id of [MASK]."""
        assert self.config.mask_token_id is not None
        return self.config.mask_token_id

    def new_cache(self, batch: int, max_len: int) -> RegionCache:
        """An empty cache for a canvas of ``max_len`` columns, in the dtype and on the device of the weights."""
        config = self.config
        assert config.num_key_value_heads is not None
        assert config.head_dim is not None
        sizes = (config.num_hidden_layers, batch, max_len, config.num_key_value_heads, config.head_dim)
        return RegionCache(*sizes, dtype=self.dtype, device=self.device)

    def forward(
        self,
        input_ids: Int[Tensor, "batch canvas"] | None = None,
        inputs_embeds: Float[Tensor, "batch canvas d"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "_ _"] | None = None,
        cache: RegionCache | None = None,
        region: Span | None = None,
        see: Span | None = None,
        write: Write = "all",
        logits_for: Tensor | None = None,
    ) -> MDLMOutput:
        """Logits of a canvas, or of a region of it.

        All column numbers are those of the canvas. Counts in `counters`.

        Parameters
        ----------
        input_ids : (B, T)
            The whole canvas, also where only a region of it is computed. Exactly one of it and ``inputs_embeds``.
        inputs_embeds : (B, T, d)
            Embeddings in its place.
        attention_mask
            None: every column is visible. (B, T), 0 for padding. (B, 1, Q, T) bool, True where a query sees a key, with
            Q the canvas, the columns of the region, or 1 for all of them. The first two leave a block model its
            block-causal mask with blocks counted from position 0; the last is taken as it is. A query that would see
            nothing sees itself.
        position_ids : (B, T)
            Default: 0, 1, ..., or with a (B, T) mask those of `positions_from_padding`.
        cache
            Keys and values of the columns that are not computed. It is written in place, so it needs ``torch.no_grad()``.
        region : (a, e)
            Columns to compute; default (0, T). Anything else needs a cache.
        see : (lo, hi)
            Columns that may be attended; default all. Contains the region.
        write
            What to store of the region: ``"all"``, ``"none"`` (fresh keys and values serve this call only), or (lo, hi).
        logits_for
            Columns whose logits are wanted, all in the region: int64 (n,), the same for all rows, gives (B, n, V) in that
            order; bool (B, T) gives (number of True, V), row by row. None: all columns of the region.

        Returns
        -------
        MDLMOutput

        Raises
        ------
        InputError
            If shapes, spans or columns do not fit; if a masked token at position 0 is asked for in a model with shifted
            logits, which has none for it.
        FrozenRegionError
            If a frozen column would be written.

        Notes
        -----
        With shifted logits the row of column j comes from the output of column j - 1. Where logits of the region's first
        column a > 0 are wanted, column a - 1 is computed too: its keys and values serve this call and are not stored, and
        it counts in `counters`. Position 0 has no such output and gets the raw logits of itself.
        """
        batch, canvas = self._canvas(input_ids, inputs_embeds)
        a, e = region = self._region(region, canvas, cache)
        see = self._see(see, region, canvas)
        if attention_mask is not None:
            _check_mask(attention_mask, batch, canvas)
        shared = position_ids is None
        if position_ids is None and attention_mask is not None and attention_mask.ndim == 2:
            position_ids, shared = positions_from_padding(attention_mask), False
        if position_ids is None:
            position_ids = torch.arange(canvas, device=self.device)[None]
        self._check_length(batch, canvas, position_ids, shared)
        wanted = _Wanted.of(logits_for, region, (batch, canvas), self.device)
        first = a - 1 if self.config.logit_shift and a > 0 and wanted.include(a) else a
        if self.config.logit_shift and logits_for is not None and input_ids is not None:
            self._refuse_masked_start(input_ids, position_ids, wanted)

        visit = None if cache is None else self._visit(cache, batch, canvas, region, (first, e), see, write)
        window = (0, canvas) if visit is None else visit.window
        mask = self._mask(attention_mask, position_ids, region, (first, e), window, visit, canvas)
        call = _Call(*self._rotation(position_ids[:, first:e]), mask, visit)
        if inputs_embeds is None:
            assert input_ids is not None
            x = self.model.embed_tokens(input_ids[:, first:e])
        else:
            x = inputs_embeds[:, first:e]
        for layer in self.model.layers:
            x = layer(x, call)
        if visit is not None:
            visit.close()
        hidden = self.model.norm(x)

        self.counters.calls += 1
        self.counters.token_forwards += hidden.shape[0] * hidden.shape[1]
        self.counters.kv_columns += batch * (canvas if visit is None else int(visit.seen.sum()))
        logits = self.lm_head(wanted.rows(hidden, first, position_ids if self.config.logit_shift else None))
        if self.config.scale_logits:
            logits = logits / math.sqrt(self.config.hidden_size)
        return MDLMOutput(logits=logits, last_hidden_state=hidden[:, a - first :], cache=cache)

    def _canvas(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, int]:
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give exactly one of input_ids (B, T) and inputs_embeds (B, T, d): the whole canvas")
        given = input_ids if input_ids is not None else inputs_embeds
        assert given is not None
        if given.ndim != (2 if inputs_embeds is None else 3) or 0 in given.shape[:2]:
            raise InputError(
                f"the canvas must be (B, T) ids or (B, T, d) embeddings, got the shape {tuple(given.shape)}"
            )
        return given.shape[0], given.shape[1]

    def _region(self, region: Span | None, canvas: int, cache: RegionCache | None) -> Span:
        if region is None:
            return 0, canvas
        a, e = region
        if not 0 <= a < e <= canvas:
            raise InputError(f"region [{a}, {e}) must hold at least one column of the canvas of {canvas}")
        if cache is None and (a, e) != (0, canvas):
            raise InputError(
                f"region [{a}, {e}) of a canvas of {canvas} leaves columns out: give the cache that holds them"
            )
        return a, e

    def _see(self, see: Span | None, region: Span, canvas: int) -> Span:
        if see is None:
            return 0, canvas
        if not 0 <= see[0] <= region[0] < region[1] <= see[1] <= canvas:
            raise InputError(
                f"see [{see[0]}, {see[1]}) must contain the region [{region[0]}, {region[1]}) and lie in the canvas of {canvas}"
            )
        return see

    def _check_length(self, batch: int, canvas: int, position_ids: Tensor, shared: bool) -> None:
        limit = self.config.max_position_embeddings
        if position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != canvas:
            raise InputError(
                f"position_ids must cover the whole canvas of {canvas} columns, in 1 or {batch} rows, got the shape "
                f"{tuple(position_ids.shape)}"
            )
        if canvas > limit and (shared or int(position_ids.max()) >= limit):
            raise InputError(
                f"a canvas of {canvas} columns is longer than the {limit} positions of the model: shorten it"
            )

    def _refuse_masked_start(self, input_ids: Tensor, position_ids: Tensor, wanted: "_Wanted") -> None:
        starts = (position_ids == 0) & (input_ids == self.mask_token_id)
        if bool(wanted.of_canvas(starts).any()):
            raise InputError(
                "logits of a masked token at position 0 were asked for, which a model with shifted logits does not have: "
                "put a real token (the prompt's) there"
            )

    def _visit(
        self, cache: RegionCache, batch: int, canvas: int, region: Span, computed: Span, see: Span, write: Write
    ) -> Visit:
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters()):
            raise InputError(
                "a cache is written in place and carries no gradient: call the model under torch.no_grad()"
            )
        layers, _, heads, columns, width = cache.keys.shape
        config = self.config
        here = (config.num_hidden_layers, batch, config.num_key_value_heads, config.head_dim)
        if (layers, cache.batch, heads, width) != here or columns < canvas:
            sizes = (layers, cache.batch, heads, columns, width)
            raise InputError(
                f"the cache (layers, rows, key heads, columns, width = {sizes}) does not fit this model and "
                f"a canvas of {batch} x {canvas}: make it with new_cache(batch, max_len)"
            )
        if (cache.keys.dtype, cache.keys.device) != (self.dtype, self.device):
            raise InputError(
                f"the cache is {cache.keys.dtype} on {cache.keys.device}, the model {self.dtype} on {self.device}: make it "
                "with new_cache(batch, max_len)"
            )
        return cache.visit(region, computed, see, write)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of (B or 1, R) positions: angles in float32, tables in the dtype that the family rotates in."""
        width: int = self.config.head_dim  # type: ignore[assignment]
        powers = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
        angles = positions[:, None, :, None].float() * (1.0 / self.config.rope_theta**powers)
        dtype = _at_least_float32(self.dtype) if self.config.rope_full_precision else self.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _mask(
        self,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        region: Span,
        computed: Span,
        window: Span,
        visit: Visit | None,
        canvas: int,
    ) -> Tensor | None:
        """Additive mask (B or 1, 1, R or 1, K) of the computed columns over the window, None where all is visible."""
        (first, last), (lo, hi) = computed, window
        parts: list[Tensor] = []
        if attention_mask is not None and attention_mask.ndim == 4:
            parts.append(_query_rows(attention_mask, region, computed, canvas)[..., lo:hi])
        elif attention_mask is not None:
            parts.append((attention_mask != 0)[:, None, None, lo:hi])
        if self.config.attention == "block" and (attention_mask is None or attention_mask.ndim == 2):
            assert self.config.block_size is not None
            blocks = position_ids.div(self.config.block_size, rounding_mode="floor")
            parts.append(blocks[:, None, first:last, None] >= blocks[:, None, None, lo:hi])
        if visit is not None and not bool(visit.seen.all()):
            parts.append(visit.seen.to(position_ids.device)[None, None, None])
        if not parts:
            return None
        visible = parts[0]
        for part in parts[1:]:
            visible = visible & part
        # Both questions only save work. On a GPU they would cost more: the host would wait for it.
        free = visible.device.type == "cpu"
        if free and bool(visible.all()):
            return None
        blind = ~visible.any(-1, keepdim=True)
        if not free or bool(blind.any()):
            queries = torch.arange(first, last, device=visible.device)
            itself = queries[:, None] == torch.arange(lo, hi, device=visible.device)
            visible = visible | (blind & itself)
        return torch.zeros(visible.shape, dtype=self.dtype, device=visible.device).masked_fill_(~visible, -math.inf)

    @torch.no_grad()
    def first_nonfinite_layer(self, **inputs: Any) -> str | None:
        """The name of the first module whose output holds NaN or infinity, or None: to be asked once NaN logits were seen.

        Runs the forward of ``inputs`` again (``write`` is left out: nothing is stored) and counts nothing.
        """
        found: list[str] = []

        def look(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                if not found and not bool(output.isfinite().all()):
                    found.append(name)

            return hook

        watched = {
            "model.embed_tokens": self.model.embed_tokens,
            "model.norm": self.model.norm,
            "lm_head": self.lm_head,
        }
        watched |= {f"model.layers.{index}": layer for index, layer in enumerate(self.model.layers)}
        handles = [module.register_forward_hook(look(name)) for name, module in watched.items()]
        before, self.counters = self.counters, Counters()
        try:
            self(**{**inputs, "write": "none"})
        finally:
            self.counters = before
            for handle in handles:
                handle.remove()
        return found[0] if found else None

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        family: str | None = None,
        mask_token_id: int | None = None,
        block_size: int | None = None,
    ) -> "MaskedDiffusionLM":
        """A checkpoint of any family, by the names of its own weights; see `assay.mdlm.checkpoints.from_checkpoint`."""
        from assay.mdlm.checkpoints import from_checkpoint

        return from_checkpoint(path, dtype, device, family, mask_token_id, block_size)

    @classmethod
    def from_autoregressive(
        cls,
        model_or_path: Any,
        mask_token_id: int,
        logit_shift: bool = True,
        gguf_file: str | None = None,
        mask_init: str = "keep",
    ) -> "MaskedDiffusionLM":
        """An autoregressive model as a start for diffusion; see `assay.mdlm.checkpoints.from_autoregressive`."""
        from assay.mdlm.checkpoints import from_autoregressive

        return from_autoregressive(model_or_path, mask_token_id, logit_shift, gguf_file, mask_init)

    def export_family(self, family: str, folder: str | Path) -> None:
        """Write the weights under a family's own names; see `assay.mdlm.checkpoints.export_family`."""
        from assay.mdlm.checkpoints import export_family

        export_family(self, family, folder)


@dataclass(frozen=True)
class _Wanted:
    """The columns whose logits are asked for."""

    columns: Tensor | None  # int64 (n,), on the model's device
    chosen: Tensor | None  # bool (B, T), there too
    region: Span
    given: Tensor | None = None  # either of them where it came from: asking the CPU's costs no wait for the device

    @classmethod
    def of(cls, logits_for: Tensor | None, region: Span, shape: tuple[int, int], device: torch.device) -> "_Wanted":
        a, e = region
        if logits_for is None:
            return cls(None, None, region)
        if logits_for.dtype == torch.bool:
            if tuple(logits_for.shape) != shape:
                raise InputError(
                    f"a bool logits_for must be the canvas {shape}, got the shape {tuple(logits_for.shape)}"
                )
            if bool(logits_for[:, :a].any()) or bool(logits_for[:, e:].any()):
                raise InputError(f"logits_for asks for columns outside the region [{a}, {e}), which are not computed")
            return cls(None, logits_for.to(device), region, logits_for)
        if logits_for.ndim != 1 or logits_for.is_floating_point():
            raise InputError(
                f"logits_for must be int64 (n,) or bool (B, T), got {logits_for.dtype} of shape {tuple(logits_for.shape)}"
            )
        if logits_for.numel() and not a <= int(logits_for.min()) <= int(logits_for.max()) < e:
            raise InputError(f"logits_for asks for columns outside the region [{a}, {e}), which are not computed")
        return cls(logits_for.to(device), None, region, logits_for)

    def include(self, column: int) -> bool:
        """Whether any row wants the logits of a column."""
        if self.given is None:
            return True
        return bool((self.given == column if self.chosen is None else self.given[:, column]).any())

    def of_canvas(self, values: Tensor) -> Tensor:
        """The entries of (B or 1, T) values at the wanted places."""
        if self.chosen is not None:
            return values.expand(self.chosen.shape)[self.chosen]
        return values[:, slice(*self.region)] if self.columns is None else values[:, self.columns]

    def rows(self, hidden: Tensor, first: int, shifted: Tensor | None) -> Tensor:
        """The hidden states that the head needs: (B, n, d) or (n, d).

        Parameters
        ----------
        hidden : (B, R, d)
            Of the columns from ``first`` on.
        shifted : (B or 1, T) positions, or None
            With shifted logits: column j is fed by column j - 1, but by itself at position 0.
        """
        a, e = self.region
        if self.columns is None and self.chosen is None and shifted is None:
            return hidden[:, a - first :]
        columns = torch.arange(hidden.shape[1], device=hidden.device)[None]
        canvas = torch.arange(first, first + hidden.shape[1], device=hidden.device)
        source = columns if shifted is None else columns - (shifted[:, canvas] != 0).long()
        # Column `first` of a widened region is nobody's; clamped, it is never read.
        source = source.clamp(min=0).expand(hidden.shape[0], -1)
        if self.chosen is not None:
            row, column = self.chosen[:, a:e].nonzero(as_tuple=True)
            return hidden[row, source[row, column + (a - first)]]
        picked = source[:, a - first :] if self.columns is None else source[:, self.columns - first]
        return hidden.gather(1, picked[..., None].expand(-1, -1, hidden.shape[-1]))


def _check_mask(mask: Tensor, batch: int, canvas: int) -> None:
    padding = mask.ndim == 2
    visible = mask.ndim == 4 and mask.shape[1] == 1 and mask.dtype == torch.bool
    if not (padding or visible) or mask.shape[0] not in (1, batch) or mask.shape[-1] != canvas:
        raise InputError(
            f"attention_mask must be (B, T) = ({batch}, {canvas}), or bool (B, 1, Q, {canvas}) where True is visible, got "
            f"{mask.dtype} of shape {tuple(mask.shape)}"
        )


def _query_rows(mask: Tensor, region: Span, computed: Span, canvas: int) -> Tensor:
    """The rows of a (B, 1, Q, T) mask for the computed columns."""
    queries = mask.shape[2]
    if queries == canvas:
        return mask[:, :, computed[0] : computed[1]]
    if queries == 1 or (queries == region[1] - region[0] and computed == region):
        return mask
    raise InputError(
        f"attention_mask has {queries} query rows, but the canvas has {canvas} and the region {region[1] - region[0]}"
        + (", to which a model with shifted logits adds one" if computed != region else "")
        + f": give (B, 1, {canvas}, {canvas})"
    )


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
