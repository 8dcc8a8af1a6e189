"""The model of "Attention Is All You Need" (Vaswani et al. 2017, arXiv:1706.03762), for transformers.

Leaf to root: positions (3.5), attention (3.2), feed-forward (3.3), layers and stacks (3.1), the model, its head (3.4).

Shapes: B batch, S source length, T target length, L either, P length of the cached prefix, D d_model, F d_ff, H heads,
K d_k (queries and keys of one head), V d_v (values of one head), W vocabulary.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .generation_vanilla_transformer import VanillaTransformerGenerationMixin
from .pipeline_vanilla_transformer import TranslationPipeline  # noqa: F401  (so that its file travels with saved models)

# transformers renamed the cache in its masks and outputs from `past_key_values` (below 5.24) to `cache`.
CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"
# `forward` takes both names; the warning about the older one comes only where it is the older one.
accepts_past_key_values = deprecate_kwarg(
    "past_key_values", version="6.0.0" if CACHE == "cache" else "5.0.0", new_name="cache"
)


def sinusoids(positions: torch.Tensor, d_model: int) -> torch.Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos of the same angle (section 3.5).

    Computed afresh rather than looked up, so there is no longest sentence. Angles are float64: float32 is off by 1e-4
    at position 5000.

    Args:
        positions: whole numbers of any shape (...).
        d_model: even width D.

    Returns:
        float32 tensor of shape (..., D), sines and cosines interleaved.
    """
    device = "cpu" if positions.device.type == "mps" else positions.device  # Apple's GPUs have no float64
    wavelengths = torch.pow(10000.0, torch.arange(0, d_model, 2, dtype=torch.float64, device=device) / d_model)
    angles = positions.to(device=device, dtype=torch.float64).unsqueeze(-1) / wavelengths  # (..., D/2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).to(positions.device, torch.float32)


def unmasked_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Number the tokens that are not padding from 0, so that padding on either side moves nothing.

    Args:
        attention_mask: (B, L), nonzero for tokens.

    Returns:
        (B, L) whole numbers; padding gets some number at or above 0, which nothing reads.
    """
    return (attention_mask.ne(0).long().cumsum(-1) - 1).clamp(min=0)


def shift_right(labels: torch.Tensor, start_token_id: int, pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The decoder's input for a target: offset by one position, from the start symbol on (section 3.1).

    Args:
        labels: (B, T) target ids, -100 on either side for padding.
        start_token_id: what every sentence begins with.
        pad_token_id: stands where labels are -100.

    Returns:
        Decoder input ids (B, T), and their mask (B, T): 0 on padding before the start symbol, 1 from there on.
    """
    started = labels.ne(-100).cumsum(-1).gt(0)  # (B, T)
    started = started | ~started.any(-1, keepdim=True)  # a row of padding alone starts at once
    previous = F.pad(labels, (1, 0), value=-100)[:, :-1]
    is_start = started & ~F.pad(started, (1, 0))[:, :-1]
    decoder_input_ids = previous.masked_fill(previous.eq(-100), pad_token_id).masked_fill(is_start, start_token_id)
    return decoder_input_ids, started.long()


def masked_cross_entropy(logits, labels, num_items_in_batch=None, **kwargs) -> torch.Tensor:
    """Cross-entropy over the labels that are not -100, with no smoothing: that belongs to the training recipe.

    Args:
        logits: (B, T, W).
        labels: (B, T), not shifted any further.
        num_items_in_batch: labels in all micro-batches of all processes; `None` means those in this batch.

    Returns:
        Scalar: the summed negative log-likelihoods over that number; 0 where every label is -100.
    """
    labels = labels.to(logits.device)
    total = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
    count = labels.ne(-100).sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
    return total / count.to(total.device).clamp(min=1)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Scaled dot-product attention, equation (1): softmax(Q K^T / sqrt(d_k)) V, in plain tensor operations.

    Args:
        module: the attention layer; only whether it trains is read.
        query: (B, H, T, K). key: (B, H, S, K). value: (B, H, S, V).
        attention_mask: (B, 1, T, S) to add to the scores, hugely negative where attention is forbidden, or `None`.
        scaling: 1 / sqrt(d_k).
        dropout: rate on the attention weights.

    Returns:
        Output (B, T, H, V) and weights (B, H, T, S). A query that may attend to nothing gets zeros for both.
    """
    scores = query @ key.transpose(2, 3) * scaling  # (B, H, T, S)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    if attention_mask is not None:
        # Where all is forbidden, softmax is uniform over forbidden places; fused kernels give zeros, and so do we.
        weights = weights.masked_fill(attention_mask < torch.finfo(attention_mask.dtype).min / 2, 0.0)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def in_float32(attend):
    """A fused attention, computed in float32 for operands in half precision.

    On a CPU their backward pass takes three times as long in half precision, and many times for short sentences.

    Args:
        attend: a function that is called as `eager_attention_forward` is.

    Returns:
        A function that is called the same way, and gives its output in the dtype of the queries.
    """

    def attend_in_float32(module, query, key, value, *args, **kwargs):
        with torch.autocast(query.device.type, enabled=False):
            output, weights = attend(module, query.float(), key.float(), value.float(), *args, **kwargs)
        return output.to(query.dtype), weights

    return attend_in_float32


class VanillaTransformerAttention(nn.Module):
    """Multi-head attention (section 3.2.2): MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O.

    Args:
        config: gives D, H, K, V, biases and dropout.
        layer_idx: place in the stack, which is the place in the cache.
        is_causal: whether position i is kept from what follows it (decoder self-attention, section 3.2.3).
    """

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int, is_causal: bool = False):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.d_k, self.d_v = config.resolved_d_k, config.resolved_d_v
        self.scaling = self.d_k**-0.5
        self.dropout = config.attention_dropout
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.d_model, config.num_heads * self.d_k, bias=bias)
        self.k_proj = nn.Linear(config.d_model, config.num_heads * self.d_k, bias=bias)
        self.v_proj = nn.Linear(config.d_model, config.num_heads * self.d_v, bias=bias)
        self.out_proj = nn.Linear(config.num_heads * self.d_v, config.d_model, bias=bias)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            projection.xavier_gain = 0.5**0.5  # for `_init_weights`, which sees one matrix at a time

    def forward(self, hidden_states, attention_mask=None, memory=None, cache=None, **kwargs):
        """Attend from `hidden_states` to `memory`, or to themselves where that is `None`.

        Args:
            hidden_states: (B, T, D), where the queries come from.
            attention_mask: as the attention implementation in use wants it, or `None`.
            memory: (B, S, D) encoder output, for encoder-decoder attention.
            cache: `EncoderDecoderCache` with the keys and values of earlier steps, or `None`.

        Returns:
            (B, T, D), and the attention weights (B, H, T, S) where the implementation gives them.
        """
        query = self._split_heads(self.q_proj(hidden_states), self.d_k)  # (B, H, T, K)
        key, value = self._keys_and_values(hidden_states, memory, cache)  # (B, H, S, K), (B, H, S, V)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        if query.numel() == 0 or key.numel() == 0:  # no sentences, or none to attend to: fused kernels fail on these
            attend, attention_mask = eager_attention_forward, None
        is_fused = attend is not eager_attention_forward
        if is_fused and query.device.type == "cpu" and query.dtype.itemsize == 2 and query.requires_grad:
            attend = in_float32(attend)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )  # (B, T, H, V)
        return self.out_proj(output.flatten(2)), weights

    def _split_heads(self, projected, width):
        """(B, L, H * width) -> (B, H, L, width)."""
        return projected.unflatten(-1, (-1, width)).transpose(1, 2)

    def _keys_and_values(self, hidden_states, memory, cache):
        """Project keys and values, or take from the cache those of earlier steps and of the unchanging memory."""
        is_cross = memory is not None
        if isinstance(cache, EncoderDecoderCache):
            if is_cross and cache.is_updated.get(self.layer_idx):
                layer = cache.cross_attention_cache.layers[self.layer_idx]
                return layer.keys, layer.values
            own_cache = cache.cross_attention_cache if is_cross else cache.self_attention_cache
        else:
            own_cache = None if is_cross else cache
        source = memory if is_cross else hidden_states
        key = self._split_heads(self.k_proj(source), self.d_k)
        value = self._split_heads(self.v_proj(source), self.d_v)
        if own_cache is not None:
            key, value = own_cache.update(key, value, self.layer_idx)
            if is_cross:
                cache.is_updated[self.layer_idx] = True
        return key, value


class Dropout(nn.Dropout):
    """torch's dropout, five times as fast on a CPU, where it draws a 64-bit random number an element.

    Here one serves four elements, 16 bits each, so that the rate is exact to 2^-17.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(...) -> (...), zeros with probability p and the rest divided by 1 - p; the same tensor unless training."""
        threshold = round(self.p * 2**16) - 2**15
        has_bits = -(2**15) < threshold < 2**15  # not so a rate of 0 or 1, or one too near to them for 16 bits
        if not (self.training and has_bits) or hidden_states.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(hidden_states)
        size = hidden_states.numel()
        bits = torch.empty(-(-size // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:size]
        kept = bits.view(hidden_states.shape) >= threshold
        return hidden_states * kept.to(hidden_states.dtype).mul_(1 / (1 - self.p))


class VanillaTransformerFeedForward(nn.Module):
    """Position-wise feed-forward network, equation (2): FFN(x) = max(0, x W_1 + b_1) W_2 + b_2.

    Args:
        config: gives D, F and dropout.
    """

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.w_1 = nn.Linear(config.d_model, config.d_ff)
        self.w_2 = nn.Linear(config.d_ff, config.d_model)
        self.dropout = Dropout(config.activation_dropout)

    def forward(self, hidden_states):
        """(B, L, D) -> (B, L, D), each position by itself."""
        return self.w_2(self.dropout(F.relu(self.w_1(hidden_states))))


class VanillaTransformerEncoderLayer(GradientCheckpointingLayer):
    """One of the N encoder layers (Figure 1, left): LayerNorm(x + Dropout(Sublayer(x))), twice.

    Args:
        config: the model's.
        layer_idx: place in the stack.
    """

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__()
        self.self_attn = VanillaTransformerAttention(config, layer_idx)
        self.self_attn_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.ffn = VanillaTransformerFeedForward(config)
        self.ffn_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        """(B, S, D) -> (B, S, D)."""
        attended, _ = self.self_attn(hidden_states, attention_mask, **kwargs)
        hidden_states = self.self_attn_norm(hidden_states + self.dropout(attended))
        return self.ffn_norm(hidden_states + self.dropout(self.ffn(hidden_states)))


class VanillaTransformerDecoderLayer(GradientCheckpointingLayer):
    """One of the N decoder layers (Figure 1, right): masked self-attention, attention to the memory, feed-forward.

    Args:
        config: the model's.
        layer_idx: place in the stack.
    """

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__()
        self.self_attn = VanillaTransformerAttention(config, layer_idx, is_causal=True)
        self.self_attn_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.cross_attn = VanillaTransformerAttention(config, layer_idx)
        self.cross_attn_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.ffn = VanillaTransformerFeedForward(config)
        self.ffn_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)

    def forward(self, hidden_states, attention_mask=None, memory=None, memory_mask=None, cache=None, **kwargs):
        """(B, T, D) and the memory (B, S, D) -> (B, T, D)."""
        attended, _ = self.self_attn(hidden_states, attention_mask, cache=cache, **kwargs)
        hidden_states = self.self_attn_norm(hidden_states + self.dropout(attended))
        attended, _ = self.cross_attn(hidden_states, memory_mask, memory=memory, cache=cache, **kwargs)
        hidden_states = self.cross_attn_norm(hidden_states + self.dropout(attended))
        return self.ffn_norm(hidden_states + self.dropout(self.ffn(hidden_states)))


class VanillaTransformerPreTrainedModel(PreTrainedModel):
    """What the encoder, the decoder, the model and its head have in common: loading, saving and initialisation."""

    config_class = VanillaTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VanillaTransformerEncoderLayer", "VanillaTransformerDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def _init_weights(self, module):
        """Fill one module's weights before training.

        | weights                             | values                 | why                                           |
        |-------------------------------------|------------------------|-----------------------------------------------|
        | token embeddings                    | N(0, 1/D)              | times sqrt(D) they are of the positions' size;|
        |                                     |                        | as output matrix, logits of variance near 1   |
        | embedding of the padding            | 0                      | it is nobody's word                           |
        | learned positions                   | N(0, 1/2)              | the variance of the sinusoids                 |
        | W^Q, W^K, W^V                       | Xavier uniform, gain   | Xavier for the three as one matrix, as in T2T |
        |                                     | 1/sqrt(2)              | and fairseq; with 1, attention's average      |
        |                                     |                        | drowns the words, layer by layer, and the     |
        |                                     |                        | decoder finds nothing to attend to            |
        | W^O, feed-forward W_1 and W_2       | Xavier uniform, gain 1 | keeps variance both ways                      |
        | biases                              | 0                      | no preference before training                 |
        | layer normalisation: gain, bias     | 1, 0                   | starts as the plain normalisation             |
        | output matrix, if not tied          | N(0, 1/D)              | as the embedding that it stands for           |
        """
        if isinstance(module, nn.Linear):
            if module is getattr(self, "lm_head", None):
                init.normal_(module.weight, mean=0.0, std=self.config.d_model**-0.5)
            else:
                init.xavier_uniform_(module.weight, gain=getattr(module, "xavier_gain", 1.0))
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, LearnedPositions):
            init.normal_(module.weight, mean=0.0, std=0.5**0.5)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.d_model**-0.5)
            # The row is a view, which has lost the mark that loaded weights carry.
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def _check_inputs(self, name, ids, embeds, attention_mask, cached=0):
        """Refuse neither or both of ids and embeddings, and a mask that does not fit them.

        Args:
            name: "" or "decoder_", as the arguments begin.
            ids: (B, L) or `None`. embeds: (B, L, D) or `None`.
            attention_mask: (B, P + L), or of four dimensions, or `None`.
            cached: P.

        Raises:
            ValueError: naming the argument, its value and what to do.
        """
        if (ids is None) == (embeds is None):
            given = "neither" if ids is None else "both"
            raise ValueError(f"give either {name}input_ids or {name}inputs_embeds, got {given}")
        batch_size, length = (embeds if ids is None else ids).shape[:2]
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() == 4:
            return  # made by transformers for the attention implementation in use
        if attention_mask.dim() != 2 or attention_mask.shape != (batch_size, cached + length):
            raise ValueError(
                f"{name}attention_mask must have shape {(batch_size, cached + length)} "
                f"(sentences, cached and new tokens), got {tuple(attention_mask.shape)}"
            )


class LearnedPositions(nn.Embedding):
    """A trained vector a position, in place of the sinusoids (Table 3, row E). (B, L) -> (B, L, D)."""


class VanillaTransformerEmbeddings(nn.Module):
    """Token embeddings times sqrt(D) (section 3.4), plus positions (3.5), with dropout on the sum (5.4).

    Args:
        config: the model's.
    """

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.config = config
        self.scale = math.sqrt(config.d_model)
        self.dropout = Dropout(config.dropout)
        if config.position_encoding == "learned":
            self.positions = LearnedPositions(config.max_position_embeddings, config.d_model)

    def forward(self, inputs_embeds, positions, longest):
        """Put token vectors in their places.

        Args:
            inputs_embeds: (B, L, D), not yet scaled.
            positions: (B, L) or (1, L) whole numbers below `longest`.
            longest: length of the longest sentence, padding and cached tokens counted.

        Returns:
            (B, L, D), in the dtype of `inputs_embeds`.

        Raises:
            ValueError: a position beyond a learned table.
        """
        hidden_states = inputs_embeds * self.scale
        if self.config.position_encoding == "sinusoidal":
            # Added in float32 whatever the model's dtype: half precision cannot tell positions far out apart.
            hidden_states = (hidden_states + sinusoids(positions, self.config.d_model)).to(inputs_embeds.dtype)
        elif self.config.position_encoding == "learned":
            rows = self.config.max_position_embeddings
            if longest > rows and positions.max() >= rows:
                raise ValueError(
                    f"a sentence of {int(positions.max()) + 1} tokens is longer than max_position_embeddings={rows}, "
                    "the model's table of learned positions: shorten it, or use a model with sinusoidal positions"
                )
            hidden_states = hidden_states + self.positions(positions)
        return self.dropout(hidden_states)


class VanillaTransformerEncoder(VanillaTransformerPreTrainedModel):
    """N encoder layers over the source sentence (Figure 1, left).

    Args:
        config: the model's.
    """

    _can_record_outputs = {
        "hidden_states": VanillaTransformerEncoderLayer,
        "attentions": OutputRecorder(VanillaTransformerAttention, index=1, layer_name="self_attn"),
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.embeddings = VanillaTransformerEmbeddings(config)
        self.layers = nn.ModuleList(VanillaTransformerEncoderLayer(config, i) for i in range(config.encoder_layers))
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, **kwargs) -> BaseModelOutput:
        """Encode source sentences.

        Args:
            input_ids: (B, S) source ids, or
            inputs_embeds: (B, S, D) their embeddings, not yet scaled.
            attention_mask: (B, S), 0 on padding; `None` means that there is none.

        Returns:
            `BaseModelOutput` with `last_hidden_state`, the memory (B, S, D).

        Raises:
            ValueError: not exactly one of ids and embeddings, or a mask of another shape.
        """
        self._check_inputs("", input_ids, inputs_embeds, attention_mask)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if _is_padding_mask(attention_mask):
            positions = unmasked_positions(attention_mask)  # (B, S)
        else:
            positions = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0)  # (1, S)
        hidden_states = self.embeddings(inputs_embeds, positions, longest=inputs_embeds.shape[1])
        mask = create_bidirectional_mask(self.config, inputs_embeds, attention_mask)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=hidden_states)


class VanillaTransformerDecoder(VanillaTransformerPreTrainedModel):
    """N decoder layers over the target so far and the memory (Figure 1, right).

    Args:
        config: the model's.
    """

    _can_record_outputs = {
        "hidden_states": VanillaTransformerDecoderLayer,
        "attentions": OutputRecorder(VanillaTransformerAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VanillaTransformerAttention, index=1, layer_name="cross_attn"),
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.embeddings = VanillaTransformerEmbeddings(config)
        self.layers = nn.ModuleList(VanillaTransformerDecoderLayer(config, i) for i in range(config.decoder_layers))
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @accepts_past_key_values
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        cache=None,
        inputs_embeds=None,
        position_ids=None,
        use_cache=None,
        **kwargs,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode target prefixes.

        Args:
            input_ids: (B, T) target ids, shifted right, or
            inputs_embeds: (B, T, D) their embeddings, not yet scaled.
            attention_mask: (B, P + T), 0 on padding; `None` means that there is none.
            encoder_hidden_states: (B, S, D), the memory.
            encoder_attention_mask: (B, S), 0 on the source's padding; `None` means that there is none.
            cache: keys and values of the P tokens before these; `past_key_values` is its older name.
            position_ids: (B, T) places in the sentence; `None` counts the unmasked tokens.
            use_cache: whether to return the cache, extended by these T tokens.

        Returns:
            `BaseModelOutputWithPastAndCrossAttentions` with `last_hidden_state` (B, T, D).

        Raises:
            ValueError: not exactly one of ids and embeddings, or a mask of another shape.
        """
        cached = 0 if cache is None else cache.get_seq_length()  # P
        self._check_inputs("decoder_", input_ids, inputs_embeds, attention_mask, cached)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        length = inputs_embeds.shape[1]
        if use_cache and cache is None:
            cache = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        if position_ids is None and _is_padding_mask(attention_mask):
            position_ids = unmasked_positions(attention_mask)[:, -length:]  # (B, T)
        elif position_ids is None:
            position_ids = (torch.arange(length, device=inputs_embeds.device) + cached).unsqueeze(0)  # (1, T)
        hidden_states = self.embeddings(inputs_embeds, position_ids, longest=cached + length)

        self_attention_cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        mask = create_causal_mask(self.config, inputs_embeds, attention_mask, **{CACHE: self_attention_cache})
        memory_mask = create_bidirectional_mask(
            self.config, inputs_embeds, encoder_attention_mask, encoder_hidden_states=encoder_hidden_states
        )
        for layer in self.layers:
            # Positional, as gradient checkpointing differentiates only those.
            hidden_states = layer(hidden_states, mask, encoder_hidden_states, memory_mask, cache=cache, **kwargs)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states, **{CACHE: cache})


class VanillaTransformerModel(VanillaTransformerPreTrainedModel):
    """Encoder and decoder (Figure 1 without its last two boxes).

    Args:
        config: the model's.
    """

    _tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.encoder = VanillaTransformerEncoder(config)
        self.decoder = VanillaTransformerDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The encoder's token embeddings, which are the decoder's too where embeddings are tied."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding):
        """Replace the encoder's token embeddings, and the decoder's where embeddings are tied."""
        self.encoder.embed_tokens = value
        if self.config.tie_word_embeddings:
            self.decoder.embed_tokens = value

    def _resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of=None, mean_resizing=True):
        return _resize_all_embeddings(
            self, super()._resize_token_embeddings, new_num_tokens, pad_to_multiple_of, mean_resizing
        )

    @can_return_tuple
    @accepts_past_key_values
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        encoder_outputs=None,
        cache=None,
        inputs_embeds=None,
        decoder_inputs_embeds=None,
        decoder_position_ids=None,
        use_cache=None,
        **kwargs,
    ) -> Seq2SeqModelOutput:
        """Encode the source, unless that was done before, and decode the target so far.

        Args:
            input_ids: (B, S) source ids, or
            inputs_embeds: (B, S, D) their embeddings, not yet scaled, or
            encoder_outputs: what the encoder returned; a tuple serves, too.
            attention_mask: (B, S), 0 on the source's padding; `None` means that there is none.
            decoder_input_ids: (B, T) target ids, shifted right, or
            decoder_inputs_embeds: (B, T, D) their embeddings, not yet scaled.
            decoder_attention_mask: (B, P + T), 0 on padding; `None` means that there is none.
            decoder_position_ids: (B, T) places in the sentence; `None` counts the unmasked tokens.
            cache: keys and values of the P target tokens before these; `past_key_values` is its older name.
            use_cache: whether to return the cache.

        Returns:
            `Seq2SeqModelOutput` with `last_hidden_state` (B, T, D) and the encoder's.

        Raises:
            ValueError: not exactly one of ids and embeddings on either side, or a mask of another shape.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, **kwargs)
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        memory = encoder_outputs.last_hidden_state
        if _is_padding_mask(attention_mask) and attention_mask.shape != memory.shape[:2]:
            raise ValueError(
                f"attention_mask must have shape {tuple(memory.shape[:2])}, as the encoder's output has sentences "
                f"and tokens, got {tuple(attention_mask.shape)}"
            )
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=memory,
            encoder_attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            position_ids=decoder_position_ids,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=memory,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            **{CACHE: decoder_outputs.get(CACHE)},
        )


class VanillaTransformerForConditionalGeneration(VanillaTransformerPreTrainedModel, VanillaTransformerGenerationMixin):
    """The whole Transformer: the model and the projection onto the vocabulary, which is the embedding matrix (3.4).

    Args:
        config: the model's.
    """

    _tied_weights_keys = {
        "model.decoder.embed_tokens.weight": "model.encoder.embed_tokens.weight",
        "lm_head.weight": "model.encoder.embed_tokens.weight",
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.model = VanillaTransformerModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        # transformers would guess from this class's name a loss that shifts the labels once more.
        self.loss_function = masked_cross_entropy
        self.post_init()
        self._set_generation_defaults()

    def get_input_embeddings(self) -> nn.Embedding:
        """The encoder's token embeddings, which are the decoder's and the output's too where embeddings are tied."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding):
        """Replace the encoder's token embeddings, and the decoder's where embeddings are tied."""
        self.model.set_input_embeddings(value)

    def _resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of=None, mean_resizing=True):
        return _resize_all_embeddings(
            self, super()._resize_token_embeddings, new_num_tokens, pad_to_multiple_of, mean_resizing
        )

    def save_pretrained(self, *args, **kwargs):
        """As transformers has it, with the paper's decoding in the generation config whatever was run before."""
        self._set_generation_defaults()
        super().save_pretrained(*args, **kwargs)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Shift labels right; `DataCollatorForSeq2Seq` asks for it, which `Trainer`'s label smoothing needs.

        Args:
            labels: (B, T), -100 for padding.

        Returns:
            (B, T) decoder input ids.
        """
        return shift_right(labels, self.config.decoder_start_token_id, self.config.pad_token_id)[0]

    def prepare_inputs_for_generation(self, input_ids, *args, decoder_attention_mask=None, **kwargs) -> dict:
        """As transformers has it; a padded decoder prefix gets its positions here, since its mask does not reach
        `forward` in two dimensions with a static cache."""
        if decoder_attention_mask is not None:
            kwargs["decoder_attention_mask"] = decoder_attention_mask
            kwargs["decoder_position_ids"] = unmasked_positions(decoder_attention_mask)
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)

    @can_return_tuple
    @accepts_past_key_values
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        encoder_outputs=None,
        cache=None,
        inputs_embeds=None,
        decoder_inputs_embeds=None,
        decoder_position_ids=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        num_items_in_batch=None,
        **kwargs,
    ) -> Seq2SeqLMOutput:
        """Predict the next word after every target prefix, and with labels their cross-entropy.

        Args:
            labels: (B, T) target ids, -100 where nothing is to be predicted. They are shifted right to make the
                decoder's input unless that is given.
            num_items_in_batch: what the summed loss is divided by; `None` means the labels of this batch that are not
                -100. `Trainer` gives the labels of all micro-batches, so that accumulation changes nothing.
            logits_to_keep: give logits for the last so many positions only; 0 for all.
            input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs, cache,
                inputs_embeds, decoder_inputs_embeds, decoder_position_ids, use_cache: as in
                `VanillaTransformerModel.forward`. With labels, no cache is made.

        Returns:
            `Seq2SeqLMOutput` with `logits` (B, T, W) and, with labels, the scalar `loss`.

        Raises:
            ValueError: as `VanillaTransformerModel.forward`, or labels of another shape than the decoder's input.
        """
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids, started = shift_right(
                    labels, self.config.decoder_start_token_id, self.config.pad_token_id
                )
                decoder_attention_mask = started if decoder_attention_mask is None else decoder_attention_mask
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            decoder_position_ids=decoder_position_ids,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state  # (B, T, D)
        if labels is not None and labels.shape != hidden_states.shape[:2]:
            raise ValueError(
                f"labels must have the shape of the decoder's input, {tuple(hidden_states.shape[:2])}, "
                f"got {tuple(labels.shape)}"
            )
        if labels is None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            hidden_states = hidden_states[:, kept]
        logits = self.lm_head(hidden_states)  # (B, T, W)
        loss = None if labels is None else self.loss_function(logits, labels, num_items_in_batch)
        outputs = dict(outputs)
        del outputs["last_hidden_state"]
        return Seq2SeqLMOutput(loss=loss, logits=logits, **outputs)


def _is_padding_mask(mask):
    """Whether a mask says which tokens are padding, (B, L), and not already who may attend to whom."""
    return isinstance(mask, torch.Tensor) and mask.dim() == 2


def _resize_all_embeddings(model, resize, new_num_tokens, pad_to_multiple_of, mean_resizing):
    """Resize as transformers does, and the decoder's embeddings too where they are a matrix of their own."""
    resized = resize(new_num_tokens, pad_to_multiple_of, mean_resizing)
    if not model.config.tie_word_embeddings:
        decoder = model.get_decoder()
        decoder.embed_tokens = model._get_resized_embeddings(
            decoder.embed_tokens, resized.num_embeddings, None, mean_resizing
        )
    return resized


__all__ = [
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
]
