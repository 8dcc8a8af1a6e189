"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017, arXiv:1706.03762) for the Hugging Face world."""

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerPreTrainedModel,
)
