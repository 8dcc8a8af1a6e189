"""Translating a corpus and scoring it: BLEU, chrF, and the BLEU of the literature on Multi30k (section 6.1)."""

from dataclasses import asdict, dataclass

import datasets
import evaluate
import numpy as np
import sacrebleu
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from tqdm import tqdm

from .pipeline_vanilla_transformer import TranslationPipeline


@dataclass(frozen=True)
class Scores:
    """What `score` found.

    Args:
        bleu, chrf: sacreBLEU's figures on the text as it is, 0 to 100.
        bleu_lowercased_tokenized: BLEU on lower-cased text, Moses-normalised and -tokenised; comparable with papers on
            Multi30k, and with nothing else.
        bleu_signature, chrf_signature: sacreBLEU's record of how the first two were computed.
        hypothesis_length, reference_length: tokens of either side behind the third.
        sentences: how many were scored.
    """

    bleu: float
    chrf: float
    bleu_lowercased_tokenized: float
    bleu_signature: str
    chrf_signature: str
    hypothesis_length: int
    reference_length: int
    sentences: int

    def __str__(self) -> str:
        return (
            f"{self.sentences} sentences: BLEU {self.bleu:.2f}, chrF {self.chrf:.2f}, "
            f"lower-cased tokenised BLEU {self.bleu_lowercased_tokenized:.2f} "
            f"(length {self.hypothesis_length} of {self.reference_length})\n"
            f"BLEU {self.bleu_signature}\nchrF {self.chrf_signature}"
        )

    def to_dict(self) -> dict:
        """All figures by name."""
        return asdict(self)


def score(hypotheses: list[str], references: list[str], tgt_lang: str) -> Scores:
    """Score translations against one reference each.

    Args:
        hypotheses: translations, as a user would read them.
        references: what they should be.
        tgt_lang: the target language, for the tokenisation of the third figure.

    Returns:
        `Scores`.

    Raises:
        ValueError: not as many hypotheses as references, or none.
    """
    if len(hypotheses) != len(references) or not references:
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references: there must be one for each")
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    tokenized = sacrebleu.BLEU(tokenize="none", force=True)
    bleu_score = bleu.corpus_score(hypotheses, [references])
    chrf_score = chrf.corpus_score(hypotheses, [references])
    tokenized_score = tokenized.corpus_score(
        lowercase_and_tokenize(hypotheses, tgt_lang), [lowercase_and_tokenize(references, tgt_lang)]
    )
    return Scores(
        bleu=bleu_score.score,
        chrf=chrf_score.score,
        bleu_lowercased_tokenized=tokenized_score.score,
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
        hypothesis_length=tokenized_score.sys_len,
        reference_length=tokenized_score.ref_len,
        sentences=len(references),
    )


def lowercase_and_tokenize(texts: list[str], lang: str) -> list[str]:
    """What papers on Multi30k do before BLEU: lower-case, normalise punctuation, tokenise, as Moses does.

    Args:
        texts: sentences.
        lang: their language.

    Returns:
        Tokens joined by spaces.
    """
    normalizer, tokenizer = MosesPunctNormalizer(lang=lang), MosesTokenizer(lang=lang)
    return [tokenizer.tokenize(normalizer.normalize(text.lower()), escape=False, return_str=True) for text in texts]


class TranslationMetric(evaluate.Metric):
    """`score` as `evaluate` wants a metric, for `evaluate.evaluator("translation")`; it needs no network.

    Args:
        tgt_lang: the target language.
    """

    def __init__(self, tgt_lang: str, **kwargs):
        self.tgt_lang = tgt_lang
        super().__init__(**kwargs)

    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="BLEU and chrF by sacreBLEU, and BLEU on lower-cased Moses tokens.",
            citation="",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions, references):
        return score(predictions, references, self.tgt_lang).to_dict()


def translate(
    model, tokenizer, texts: list[str], batch_size: int = 32, show_progress: bool = False, **generation
) -> list[str]:
    """Translate a corpus with the pipeline.

    Args:
        model: `VanillaTransformerForConditionalGeneration`; its generation config decides unless `generation` does.
        tokenizer: its tokenizer.
        texts: source sentences.
        batch_size: sentences translated together.
        show_progress: whether to draw a progress bar.
        generation: arguments of `generate`, such as `num_beams`.

    Returns:
        One translation a text, in the order of the texts; blank for blank text.
    """
    was_training = model.training
    pipe = TranslationPipeline(model=model.eval(), tokenizer=tokenizer, device=model.device, **generation)
    stream = pipe((text for text in texts), batch_size=batch_size)
    progress = tqdm(stream, total=len(texts), disable=not show_progress, desc="translating", unit="sentence")
    translations = [hypotheses[0]["translation_text"] for hypotheses in progress]
    model.train(was_training)
    return translations


def perplexity(nats: float, tokens: int) -> float:
    """exp of the mean negative log-likelihood a token, infinite where that overflows.

    Args:
        nats: summed negative log-likelihood.
        tokens: how many tokens it is summed over.

    Returns:
        At least 1.
    """
    with np.errstate(over="ignore"):
        return float(np.exp(nats / tokens))
