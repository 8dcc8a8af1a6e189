class TranslationPipeline: pass
