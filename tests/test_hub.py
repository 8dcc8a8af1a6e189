"""Models laid out as Hub repositories."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_double import HubDouble
from huggingface_hub import ModelCard
from safetensors import safe_open
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.hub import FILES, build_repository, publish
from vanilla_transformer.tokenizer import train_tokenizer

CARDS = sorted(path for path in (Path(__file__).parents[1] / "model_cards").iterdir() if path.is_dir())


@pytest.fixture
def model(tmp_path):
    tokenizer = train_tokenizer(["a dog", "ein Hund"], vocab_size=270)
    tokenizer.save_pretrained(tmp_path / "model")
    config = VanillaTransformerConfig(
        vocab_size=len(tokenizer), d_model=8, d_ff=8, num_heads=2, encoder_layers=1, decoder_layers=1
    )
    VanillaTransformerForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def build(model, output, **changes):
    return build_repository(
        model,
        output,
        card="# A model",
        metadata={"language": ["en", "de"], "license": "apache-2.0"},
        results=[
            {"dataset_name": "Made", "dataset_type": "made", "dataset_split": "test", "metrics": {"bleu": 12.345}}
        ],
        example="a dog",
        **changes,
    )


def test_a_repository_holds_all_that_loading_needs_and_a_card_with_scores(model, tmp_path):
    repository = build(model, tmp_path / "repository")
    assert {path.name for path in repository.iterdir()} == {*FILES, "README.md"}
    card = ModelCard.load(repository / "README.md")
    assert card.data.pipeline_tag == "translation" and card.data.language == ["en", "de"]
    assert [(r.metric_type, r.metric_value) for r in card.data.eval_results] == [("bleu", 12.35)]
    settings = json.loads((repository / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and "is_local" not in settings
    assert AutoTokenizer.from_pretrained(repository)("a dog").input_ids[-1] == 2


def test_a_repository_is_not_overwritten_unless_asked(model, tmp_path):
    build(model, tmp_path / "repository")
    with pytest.raises(FileExistsError, match="exists already"):
        build(model, tmp_path / "repository")
    build(model, tmp_path / "repository", overwrite=True)


def test_an_incomplete_model_is_refused_by_name(model, tmp_path):
    (model / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        build(model, tmp_path / "repository")
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        publish(model, "user/name")


PUBLISH = """
import sys
from vanilla_transformer.hub import publish
print(publish(sys.argv[1], "user/name"))
"""
LOAD = """
import sys
sys.modules["vanilla_transformer"] = None  # as if it were not installed
from transformers import pipeline
translate = pipeline("translation", model="user/name", trust_remote_code=True, max_new_tokens=3)
print(type(translate).__module__, translate("a dog"))
"""


def test_a_published_model_loads_from_the_hub_without_the_package(model, tmp_path):
    repository = build(model, tmp_path / "repository")
    for unfinished in ("state", "checkpoint-3"):  # of our training and of Trainer's; they stay at home
        (repository / unfinished).mkdir()
        (repository / unfinished / "optimizer.pt").write_bytes(b"large")
    with HubDouble() as hub:
        # In processes of their own, as huggingface_hub takes the address at import.
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": "hf_made_up",
            "HF_HOME": str(tmp_path / "home"),
        }
        environment.pop("HF_HUB_OFFLINE", None)

        def python(code, *arguments):
            command = [sys.executable, "-c", code, *map(str, arguments)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            return done.stdout

        python(PUBLISH, repository)
        pushed = hub.repositories["user/name"]
        assert {name: data for name, data in pushed.items() if name != ".gitattributes"} == {
            path.name: path.read_bytes() for path in repository.iterdir() if path.is_file()
        }
        python(PUBLISH, repository)  # once more, into the repository that is there now
        loaded = python(LOAD)
    assert "transformers_modules.user.name." in loaded and "translation_text" in loaded


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.name)
def test_a_shipped_model_loads_and_holds_its_embedding_once(card):
    assert {path.name for path in card.iterdir()} == {*FILES, "README.md"}
    model = AutoModelForSeq2SeqLM.from_pretrained(card)
    with safe_open(card / "model.safetensors", framework="pt") as file:
        stored = sum(1 for name in file.keys() if "embed_tokens" in name or "lm_head" in name)  # noqa: SIM118
        assert sum(file.get_tensor(name).numel() for name in file.keys()) == model.num_parameters()  # noqa: SIM118
    assert stored == 1
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight is model.get_input_embeddings().weight
    assert (model.generation_config.num_beams, model.generation_config.gnmt_alpha) == (4, 0.6)


def test_the_shipped_translator_translates_captions():
    translate = pipeline("translation", model=str(CARDS[0]))
    first, second = translate(["A man is riding a bicycle.", "Two women are talking."])
    assert "Mann" in first["translation_text"] and "Fahrrad" in first["translation_text"]
    assert "Frauen" in second["translation_text"]
