"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017, arXiv:1706.03762) for the Hugging Face world.

Importing this makes `AutoConfig`, `AutoModel`, `AutoModelForSeq2SeqLM` and `pipeline("translation")` know the model.
"""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM
from transformers import pipelines as _pipelines

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerPreTrainedModel,
)
from .pipeline_vanilla_transformer import TASK, TranslationPipeline

AutoConfig.register(VanillaTransformerConfig.model_type, VanillaTransformerConfig, exist_ok=True)
AutoModel.register(VanillaTransformerConfig, VanillaTransformerModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, exist_ok=True)

# Every `save_pretrained` now puts the code beside the weights, for `trust_remote_code=True` where we are not installed.
VanillaTransformerConfig.register_for_auto_class()
VanillaTransformerModel.register_for_auto_class("AutoModel")
VanillaTransformerForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")


class _TaskAliases(dict):
    """transformers' aliases of tasks, and "translation_en_to_de" for any two languages."""

    def __contains__(self, task):
        return super().__contains__(task) or (isinstance(task, str) and TASK.fullmatch(task) is not None)

    def __missing__(self, task):
        if task in self:
            return "translation"
        raise KeyError(task)


# From 5.19 on transformers refuses by name the tasks that it dropped, before it looks at what is registered.
getattr(_pipelines, "REMOVED_TASKS", {}).pop("translation", None)
if "translation" not in _pipelines.PIPELINE_REGISTRY.supported_tasks:
    _pipelines.PIPELINE_REGISTRY.register_pipeline(
        "translation", pipeline_class=TranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
    )
    _pipelines.PIPELINE_REGISTRY.task_aliases = _TaskAliases(_pipelines.PIPELINE_REGISTRY.task_aliases)

__all__ = [
    "TranslationPipeline",
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
]
