"""The translation pipeline, with the package installed and without."""

import json
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from evaluate import evaluator
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, pipeline

from vanilla_transformer import (
    TranslationPipeline,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.evaluation import TranslationMetric
from vanilla_transformer.tokenizer import train_tokenizer

TEXTS = ["a dog runs", "a man", "two women talk in the long green park", "", "dogs", "   "]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that has learned nothing, and a tokenizer, as `save_pretrained` leaves them."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        vocab_size=len(tokenizer),
        d_model=16,
        d_ff=32,
        num_heads=4,
        encoder_layers=1,
        decoder_layers=1,
        src_lang="en",
        tgt_lang="de",
    )
    model = VanillaTransformerForConditionalGeneration(config)
    # Fresh weights repeat themselves without end; larger ones give every text a translation of its own.
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def translate(folder):
    return pipeline("translation", model=folder, max_new_tokens=6)


def test_the_task_is_ours_under_every_name(folder):
    for task in ("translation", "translation_en_to_de"):
        assert isinstance(pipeline(task, model=folder), TranslationPipeline)


def test_a_task_that_names_no_two_languages_stays_unknown(folder):
    with pytest.raises(KeyError, match="translation_en_de"):
        pipeline("translation_en_de", model=folder)


def test_one_text_a_list_a_column_and_a_stream_give_the_same(translate):
    expected = [translate(text) for text in TEXTS]
    assert all(len(result) == 1 and list(result[0]) == ["translation_text"] for result in expected)
    flat = [result[0] for result in expected]
    assert translate(TEXTS) == flat
    assert translate(tuple(TEXTS)) == flat
    assert translate(datasets.Dataset.from_dict({"en": TEXTS})["en"]) == flat
    assert list(translate(text for text in TEXTS)) == expected
    assert len({result["translation_text"] for result in flat}) > 2  # the comparison above is of something


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_batches_sorted_by_length_come_back_in_order(translate, batch_size):
    assert translate(TEXTS, batch_size=batch_size) == translate(TEXTS)


def test_a_stream_is_read_as_it_is_asked_for(translate):
    read = []

    def texts():
        for number in range(100):
            read.append(number)
            yield "a dog"

    stream = translate(texts(), batch_size=1)
    assert not read
    next(stream)
    assert 0 < len(read) < 100


def test_no_texts_give_no_translations(translate):
    assert translate([]) == []
    assert list(translate(text for text in [])) == []


def test_blank_text_gives_blank_text(translate):
    assert translate(["", " \t\n"]) == [{"translation_text": ""}] * 2
    assert translate("", num_return_sequences=2) == [{"translation_text": "", "score": 0.0}] * 2


@pytest.mark.parametrize("generation", [{"num_beams": 3}, {"num_beams": 1, "do_sample": True}])
def test_n_best_is_a_list_a_text_with_scores(translate, generation):
    results = translate(["a dog", "a man runs"], num_return_sequences=3, **generation)
    assert [len(result) for result in results] == [3, 3]
    for result in results:
        assert all(set(hypothesis) == {"translation_text", "score"} for hypothesis in result)
        assert all(hypothesis["score"] < 0 for hypothesis in result)
    if "do_sample" not in generation:
        assert [h["score"] for h in results[0]] == sorted((h["score"] for h in results[0]), reverse=True)
    assert len(translate("a dog", num_return_sequences=3, **generation)) == 3


def test_a_literal_end_symbol_in_a_text_is_text(translate):
    ids = translate.preprocess("a </s> dog <pad>")
    assert ids.count(2) == 1 and ids[-1] == 2 and 0 not in ids
    assert translate.tokenizer.decode(ids[:-1]) == "a </s> dog <pad>"


@pytest.mark.parametrize("languages", [{"tgt_lang": "fr"}, {"src_lang": "de"}])
def test_other_languages_than_the_models_are_refused(translate, languages):
    with pytest.raises(ValueError, match="this model translates from 'en' to 'de'"):
        translate("a dog", **languages)
    assert translate("a dog", src_lang="en", tgt_lang="de") == translate("a dog")


def test_a_task_of_other_languages_is_refused(folder):
    with pytest.raises(ValueError, match="tgt_lang='fr'"):
        pipeline("translation_en_to_fr", model=folder)


@pytest.mark.parametrize("wrong", [["a dog", None], [3], [["a dog"]], {"en": "a dog"}])
def test_what_is_no_text_is_refused(translate, wrong):
    with pytest.raises(ValueError, match="text"):
        translate(wrong)


def test_text_longer_than_any_in_training_is_translated_whole(translate):
    long = "a dog runs and " * 300
    ids = translate.preprocess(long)
    assert translate.tokenizer.decode(ids[:-1]) == long
    assert len(translate(long)) == 1


def test_text_beyond_learned_positions_is_refused_unless_cutting_is_asked_for(folder, tmp_path):
    config = VanillaTransformerConfig.from_pretrained(folder, position_encoding="learned", max_position_embeddings=8)
    VanillaTransformerForConditionalGeneration(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    translate = pipeline("translation", model=str(tmp_path), max_new_tokens=3)
    with pytest.raises(ValueError, match="max_position_embeddings=8"):
        translate(["a", "a dog runs and runs and runs and runs"])
    ids = translate.preprocess("a dog runs and runs and runs and runs", truncation=True)
    assert len(ids) == 8 and ids[-1] == 2


def test_sinusoidal_positions_cut_nothing_whatever_the_configuration_says(folder, tmp_path):
    config = VanillaTransformerConfig.from_pretrained(folder, max_position_embeddings=8)
    VanillaTransformerForConditionalGeneration(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    translate = pipeline("translation", model=str(tmp_path))
    assert len(translate.preprocess("a dog runs and runs and runs and runs", truncation=True)) > 8


def test_device_and_dtype_are_heeded(folder):
    translate = pipeline("translation", model=folder, device="cpu", dtype=torch.bfloat16, max_new_tokens=2)
    assert translate.model.dtype == torch.bfloat16 and translate.device.type == "cpu"
    assert isinstance(translate("a dog")[0]["translation_text"], str)


def test_evaluate_knows_the_task(folder):
    data = datasets.Dataset.from_dict({"en": ["a dog", "a man"], "de": ["ein Hund", "ein Mann"]})
    result = evaluator("translation").compute(
        model_or_pipeline=folder, data=data, metric=TranslationMetric("de"), input_column="en", label_column="de"
    )
    assert result["sentences"] == 2 and 0 <= result["bleu"] <= 100


WITHOUT_THE_PACKAGE = """
import importlib.util, json, sys
assert importlib.util.find_spec("vanilla_transformer") is None
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
folder, saved_again = sys.argv[1:]
translate = pipeline("translation", model=folder, trust_remote_code=True, max_new_tokens=6)
AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).save_pretrained(saved_again)
AutoTokenizer.from_pretrained(folder).save_pretrained(saved_again)
again = pipeline("translation", model=saved_again, trust_remote_code=True, max_new_tokens=6)
name = type(AutoModel.from_pretrained(saved_again, trust_remote_code=True)).__name__
print("\\n" + json.dumps([translate(["a dog", ""]), again(["a dog", ""]), name]))
"""


def in_a_process_without_the_package(code, *arguments, home):
    # -S leaves out site's path files, by which an editable installation is found; the libraries are put back by hand.
    libraries = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path += {libraries!r}\n{code}", *map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=home,
        env={"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
    )


def test_a_saved_folder_translates_where_the_package_is_not_installed(folder, tmp_path, translate):
    done = in_a_process_without_the_package(WITHOUT_THE_PACKAGE, folder, tmp_path / "again", home=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, name = json.loads(done.stdout.splitlines()[-1])
    assert first == second == translate(["a dog", ""])
    assert name == "VanillaTransformerModel"


def test_no_code_of_a_folder_runs_without_consent(folder, tmp_path):
    code = f"from transformers import pipeline\npipeline('translation', model={folder!r})"
    done = in_a_process_without_the_package(code, home=tmp_path)
    assert done.returncode != 0 and "trust_remote_code=True" in done.stderr


def test_a_folders_code_is_not_used_while_the_package_is_installed(folder):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert type(model) is VanillaTransformerForConditionalGeneration
    assert {path.name for path in Path(folder).glob("*.py")} == {
        f"{part}_vanilla_transformer.py" for part in ("configuration", "generation", "modeling", "pipeline")
    }


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_a_batch_size_that_is_none_is_refused(translate, size):
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1"):
        translate(["a dog"], batch_size=size)


@pytest.mark.parametrize("number", [0, -1, 1.5])
def test_a_number_of_hypotheses_that_is_none_is_refused(translate, number):
    with pytest.raises(ValueError, match="num_return_sequences must be a whole number"):
        translate("a dog", num_return_sequences=number)


@pytest.mark.parametrize("wrong", [None, 5, b"a dog"])
def test_what_holds_no_texts_is_refused_at_once(translate, wrong):
    with pytest.raises(ValueError, match="inputs must be a text"):
        translate(wrong)


def test_a_generation_config_of_the_call_may_ask_for_n_best(translate):
    config = GenerationConfig(num_beams=3, num_return_sequences=2, max_new_tokens=6)
    assert translate("a dog", generation_config=config) == translate("a dog", num_beams=3, num_return_sequences=2)
    assert translate("a dog", return_dict_in_generate=True) == translate("a dog")
