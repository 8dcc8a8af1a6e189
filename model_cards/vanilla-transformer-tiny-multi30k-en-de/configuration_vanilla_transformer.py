"""The hyper-parameters of "Attention Is All You Need" (Vaswani et al. 2017, arXiv:1706.03762).

The field names are the paper's symbols and the defaults are the `base` row of its Table 3. This file travels with every
saved model, so it imports nothing but the standard library, huggingface_hub and transformers.
"""

from difflib import get_close_matches

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

POSITION_ENCODINGS = ("sinusoidal", "learned", "none")

# Where the code that travels with a saved model is found, for `trust_remote_code=True`.
AUTO_MAP = {
    "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
    "AutoModel": "modeling_vanilla_transformer.VanillaTransformerModel",
    "AutoModelForSeq2SeqLM": "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration",
}
CUSTOM_PIPELINES = {
    "translation": {
        "impl": "pipeline_vanilla_transformer.TranslationPipeline",
        "pt": ["AutoModelForSeq2SeqLM"],
        "type": "text",
    }
}

# Keys that other libraries write into a config and that look like ours without being a misspelling of them.
FOREIGN_KEYS = (
    "sep_token_id",
    "cls_token_id",
    "mask_token_id",
    "unk_token_id",
    "num_labels",
    "num_layers",
    "layer_norm_epsilon",
)


@strict
class VanillaTransformerConfig(PreTrainedConfig):
    """Everything that fixes the shape and the regularisation of the model; Table 3 of the paper names the symbols.

    Args:
        vocab_size (`int`): words in the shared source-target vocabulary (section 5.1: about 37,000).
        d_model (`int`): width of every layer's input and output (section 3.1).
        d_ff (`int`): inner width of the feed-forward networks (section 3.3).
        num_heads (`int`): h, the number of attention heads (section 3.2.2).
        d_k (`int`, *optional*): width of one head's queries and keys. `None` means d_model / num_heads.
        d_v (`int`, *optional*): width of one head's values. `None` means d_model / num_heads.
        encoder_layers, decoder_layers (`int`): N, the depth of each stack (section 3.1).
        dropout (`float`): P_drop, on sublayer outputs and on the sums of embeddings and positions (section 5.4).
        attention_dropout (`float`): dropout on the attention weights; the paper's text has none, Tensor2Tensor had 0.1.
        activation_dropout (`float`): dropout after the ReLU; likewise.
        position_encoding (`str`): "sinusoidal" (section 3.5), "learned" (Table 3, row E), or "none" (no order at all).
        max_position_embeddings (`int`, *optional*): rows of the learned position table; only for "learned", where
            `None` becomes 1024. Sinusoids have no limit.
        tie_word_embeddings (`bool`): encoder input, decoder input and output projection share one matrix (section 3.4).
            False gives three.
        attention_bias (`bool`): biases in the four attention projections. The paper's equations have none; True holds
            the weights of MarianMT and fairseq.
        layer_norm_eps (`float`): added to the variance in every layer normalisation (Tensor2Tensor's 1e-6).
        src_lang, tgt_lang (`str`, *optional*): the languages that the model translates between, "en" and "de" say.
            Where they are set, the translation pipeline refuses any other pair.
        use_cache (`bool`): whether the decoder returns its keys and values for the next step.
        pad_token_id, bos_token_id, eos_token_id (`int`): `<pad>`, `<s>` and `</s>` in the vocabulary.
        decoder_start_token_id (`int`, *optional*): what the shifted-right outputs begin with; `None` means bos.

    Raises:
        StrictDataclassError: a value of the wrong type or out of range; the message names the field and the value.
        ValueError: an unknown key that is nearly a field's name.
    """

    model_type = "vanilla_transformer"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_attention_heads": "num_heads",
        "encoder_attention_heads": "num_heads",
        "decoder_attention_heads": "num_heads",
        "num_hidden_layers": "encoder_layers",
    }

    vocab_size: int = 37000
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    d_k: int | None = None
    d_v: int | None = None
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    position_encoding: str = "sinusoidal"
    max_position_embeddings: int | None = None
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    layer_norm_eps: float | int = 1e-6
    src_lang: str | None = None
    tgt_lang: str | None = None
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = None

    def __post_init__(self, **kwargs):
        # `to_dict` writes both afresh. They are for the copy of this file that travels with a model; while the package
        # is installed its own classes serve, and a `custom_pipelines` would make transformers insist on
        # `trust_remote_code` all the same.
        travelling = type(self).__module__.startswith("transformers_modules.")
        for key in ("auto_map", "custom_pipelines"):
            value = kwargs.pop(key, None)
            if travelling and value is not None:
                setattr(self, key, value)
        _refuse_misspelt_fields(kwargs, list(VanillaTransformerConfig.__annotations__))
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.bos_token_id
        if self.position_encoding == "learned" and self.max_position_embeddings is None:
            self.max_position_embeddings = 1024
        super().__post_init__(**kwargs)

    @property
    def resolved_d_k(self) -> int:
        """Width of one head's queries and keys: `d_k`, or d_model / num_heads where that is None (section 3.2.2)."""
        return self.d_model // self.num_heads if self.d_k is None else self.d_k

    @property
    def resolved_d_v(self) -> int:
        """Width of one head's values: `d_v`, or d_model / num_heads where that is None (section 3.2.2)."""
        return self.d_model // self.num_heads if self.d_v is None else self.d_v

    @classmethod
    def base(cls, **changes) -> "VanillaTransformerConfig":
        """The `base` row of Table 3.

        Args:
            changes: fields that differ from it.

        Returns:
            `VanillaTransformerConfig`: 63,045,632 parameters at the default vocabulary of 37,000.
        """
        return cls(**changes)

    @classmethod
    def big(cls, **changes) -> "VanillaTransformerConfig":
        """The `big` row of Table 3: twice the width and heads, dropout 0.3.

        Args:
            changes: fields that differ from it.

        Returns:
            `VanillaTransformerConfig`: 214,171,648 parameters at the default vocabulary of 37,000.
        """
        return cls(**{"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3, **changes})

    def to_dict(self) -> dict:
        """Serialise to a dictionary.

        Returns:
            `dict`: all fields, and where transformers finds the model's and the pipeline's code beside the weights.
        """
        return {**super().to_dict(), "auto_map": dict(AUTO_MAP), "custom_pipelines": CUSTOM_PIPELINES}

    def validate_sizes(self):
        """Sizes are positive whole numbers; heads divide d_model unless d_k and d_v are given; sinusoids halve it.

        Raises:
            ValueError: naming the field, its value and what to do.
        """
        sizes = ("vocab_size", "d_model", "d_ff", "num_heads", "encoder_layers", "decoder_layers")
        for name in (*sizes, "d_k", "d_v", "max_position_embeddings"):
            value = getattr(self, name)
            if (value is not None or name in sizes) and (isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.d_model % self.num_heads and (self.d_k is None or self.d_v is None):
            raise ValueError(
                f"d_model ({self.d_model}) is not divisible by num_heads ({self.num_heads}): "
                "change one of them, or give both d_k and d_v"
            )
        if self.position_encoding == "sinusoidal" and self.d_model % 2:
            raise ValueError(
                f"d_model must be even with position_encoding='sinusoidal' (sines and cosines alternate), "
                f"got {self.d_model}"
            )

    def validate_positions(self):
        """The position encoding is a known one.

        Raises:
            ValueError: naming the value and the choices.
        """
        if self.position_encoding not in POSITION_ENCODINGS:
            raise ValueError(f"position_encoding must be one of {POSITION_ENCODINGS}, got {self.position_encoding!r}")

    def validate_rates(self):
        """Dropout rates lie in [0, 1) and the normalisation's epsilon is positive.

        Raises:
            ValueError: naming the field and its value.
        """
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
        if not self.layer_norm_eps > 0:
            raise ValueError(f"layer_norm_eps must be positive, got {self.layer_norm_eps!r}")

    def validate_token_ids(self):
        """Every special token is there and within the vocabulary.

        Raises:
            ValueError: naming the field, its value and the vocabulary's size.
        """
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            value = getattr(self, name)
            ids = value if isinstance(value, list) else [value]
            if not ids or any(i is None for i in ids):
                raise ValueError(f"{name} is missing: give the token's index in the vocabulary, got {value!r}")
            if any(isinstance(i, bool) or not 0 <= i < self.vocab_size for i in ids):
                raise ValueError(f"{name} must lie within the vocabulary of {self.vocab_size} tokens, got {value!r}")


def _refuse_misspelt_fields(keys, fields):
    """Refuse a key that is nearly a field's name: kept, it would leave the field at its default without a word."""
    for key in keys:
        if key in FOREIGN_KEYS or key in VanillaTransformerConfig.attribute_map:
            continue
        nearest = get_close_matches(key, fields, n=1, cutoff=0.84)
        if nearest:
            raise ValueError(f"unknown configuration field {key!r}: did you mean {nearest[0]!r}?")


__all__ = ["VanillaTransformerConfig"]
