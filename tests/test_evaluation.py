"""Scores against sacreBLEU and by hand, and corpora translated in order."""

import math

import pytest
import sacrebleu
import torch

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.evaluation import TranslationMetric, lowercase_and_tokenize, perplexity, score, translate
from vanilla_transformer.tokenizer import train_tokenizer

HYPOTHESES = ["the cat sat on the mat .", "a dog runs through the park"]
REFERENCES = ["the cat sat on a mat .", "a dog is running through the park"]
TEXTS = [
    "a dog",
    "two cats on a long green hill",
    " ",
    "",
    "a",
    "the </s> end",
    "\t\n",
    "some   more  spaces ",
    "a dog",
]


# Scoring


def test_the_score_of_identical_text_is_100():
    scores = score(REFERENCES, REFERENCES, "en")
    assert scores.bleu == pytest.approx(100) and scores.chrf == pytest.approx(100)
    assert scores.bleu_lowercased_tokenized == pytest.approx(100)
    assert scores.sentences == 2
    assert scores.hypothesis_length == scores.reference_length == 14


def test_bleu_equals_the_one_by_hand_and_sacrebleus():
    scores = score(HYPOTHESES, REFERENCES, "en")
    precisions = 11 / 13 * 7 / 11 * 3 / 9 * 1 / 7
    assert scores.bleu == pytest.approx(100 * math.exp(1 - 14 / 13) * precisions**0.25)
    assert scores.bleu == pytest.approx(37.0533, abs=1e-4)
    assert scores.bleu == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert scores.chrf == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert (scores.hypothesis_length, scores.reference_length) == (13, 14)


def test_scores_come_with_their_signatures():
    scores = score(HYPOTHESES, REFERENCES, "en")
    assert scores.bleu_signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert scores.chrf_signature.startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")
    assert scores.bleu_signature in str(scores) and "BLEU 37.05" in str(scores)
    assert scores.to_dict()["bleu"] == scores.bleu


def test_a_corpus_is_scored_as_one_and_not_by_the_mean_of_sentences():
    scores = score(["a b c d e", "x"], ["a b c d e", "v w x y z"], "en")
    assert scores.bleu == sacrebleu.corpus_bleu(["a b c d e", "x"], [["a b c d e", "v w x y z"]]).score


def test_case_and_quotes_count_in_bleu_and_not_in_the_lowercased_tokenised_one():
    scores = score(["EIN MANN RUFT „HALT“ UND LÄUFT."], ['ein Mann ruft "Halt" und läuft .'], "de")
    assert scores.bleu_lowercased_tokenized == pytest.approx(100)
    assert scores.bleu < 20
    assert scores.hypothesis_length == scores.reference_length == 9


def test_lowercased_tokens_are_not_tokenised_again():
    assert score(["Er hat z.B. Geld."] * 2, ["Er hat z.B. Geld."] * 2, "de").reference_length == 2 * 5


@pytest.mark.parametrize(
    ("lang", "text", "tokens"),
    [
        (
            "de",
            "Ein Mann in einem „blauen Hemd“, ca. 3.000 – so.",
            'ein mann in einem " blauen hemd " , ca. 3.000 - so .',
        ),
        ("de", "Größe & Übung (draußen)…", "größe & übung ( draußen ) ..."),
        ("de", "Peter's Hund", "peter ' s hund"),
        ("en", "Peter's dog doesn't <bark>.", "peter 's dog doesn 't < bark > ."),
    ],
)
def test_lowercased_tokens_are_those_of_moses(lang, text, tokens):
    assert lowercase_and_tokenize([text], lang) == [tokens]


@pytest.mark.parametrize(("hypotheses", "references"), [(1, 2), (3, 2), (0, 0), (1, 0)])
def test_other_than_one_hypothesis_for_each_reference_is_refused(hypotheses, references):
    with pytest.raises(ValueError, match=f"{hypotheses} hypotheses for {references} references"):
        score(["x"] * hypotheses, ["x"] * references, "de")


def test_the_metric_of_evaluate_gives_the_same_figures():
    computed = TranslationMetric("en").compute(predictions=HYPOTHESES, references=REFERENCES)
    assert computed == score(HYPOTHESES, REFERENCES, "en").to_dict()


def test_perplexity_is_the_exponential_of_the_mean():
    assert perplexity(10 * math.log(8), 10) == pytest.approx(8)
    assert perplexity(0.0, 5) == 1
    assert perplexity(1e6, 1) == math.inf


# Translating


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=270)


@pytest.fixture(scope="module")
def model(tokenizer):
    """A tiny model of large weights, so that the source matters and no two words are about as probable."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    config = VanillaTransformerConfig(vocab_size=len(tokenizer), tie_word_embeddings=False, **sizes)
    model = VanillaTransformerForConditionalGeneration(config)
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight)
    return model


@pytest.fixture
def calls(model, monkeypatch):
    """Make the model say what it reads, and gather what it is asked."""
    calls = []

    def echo(input_ids, attention_mask, **arguments):
        assert not model.training and not torch.is_grad_enabled()
        assert torch.equal(attention_mask, input_ids.ne(0).long())
        calls.append((tuple(input_ids.shape), arguments))
        start = torch.ones(len(input_ids), 1, dtype=torch.long)
        return torch.cat((start, input_ids, torch.zeros_like(start)), dim=1)

    monkeypatch.setattr(model, "generate", echo)
    return calls


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_translations_come_in_the_order_of_the_texts_and_blank_for_blank(model, tokenizer, calls, batch_size):
    texts = [text if text.strip() else "" for text in TEXTS]
    assert translate(model, tokenizer, TEXTS, batch_size) == texts
    assert sum(rows for (rows, _), _ in calls) == 6


def test_sentences_of_like_length_are_translated_together(model, tokenizer, calls):
    texts = [f"{'x' * (7 * i % 31 + 1)} {i}" for i in range(31)]
    assert translate(model, tokenizer, texts, batch_size=8) == texts
    assert [rows for (rows, _), _ in calls] == [8, 8, 8, 7]
    words = sum(len(tokenizer(text)["input_ids"]) for text in texts)
    assert sum(rows * width for (rows, width), _ in calls) < 1.3 * words


@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_in_the_mode_it_was_in(model, tokenizer, calls, training):
    model.train(training)
    translate(model, tokenizer, ["a dog"])
    assert len(calls) == 1 and model.training is training


def test_arguments_of_generate_are_passed_on(model, tokenizer, calls):
    translate(model, tokenizer, ["a dog"], num_beams=3, max_new_tokens=5)
    assert calls[0][1].items() >= {"num_beams": 3, "max_new_tokens": 5}.items()


@pytest.mark.parametrize("texts", [[], [""], ["", " \n", "\u3000"]])
def test_nothing_to_translate_asks_no_model(model, tokenizer, calls, texts):
    assert translate(model, tokenizer, texts) == [""] * len(texts)
    assert calls == []


@pytest.mark.parametrize("num_beams", [1, 3])
def test_batch_mates_do_not_change_a_translation(model, tokenizer, num_beams):
    unreadable = [i for i in range(len(tokenizer)) if not tokenizer.decode(i).isascii()]
    arguments = {"num_beams": num_beams, "max_new_tokens": 6, "suppress_tokens": [0, 1, 3, *unreadable]}
    alone = translate(model, tokenizer, TEXTS, batch_size=1, **arguments)
    together = translate(model, tokenizer, TEXTS, batch_size=100, **arguments)
    assert together == alone
    assert alone[0] == alone[8]
    assert len(set(alone)) > 4
    assert [bool(text) for text in alone] == [bool(text.strip()) for text in TEXTS]
