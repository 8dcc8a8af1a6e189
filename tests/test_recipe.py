"""Recipes: all that are shipped parse, and a wrong one is refused with what is wrong in it."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub.errors import StrictDataclassError

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.recipe import Recipe, load_recipe
from vanilla_transformer.schedule import learning_rate

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "train" / "recipes").glob("*.yaml"))
LANGUAGES = "src_lang: en\ntgt_lang: de\n"


@pytest.fixture
def load(tmp_path):
    """Load a recipe from its text."""

    def load_text(text):
        (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
        return load_recipe(tmp_path / "x.yaml")

    return load_text


def test_recipes_are_shipped():
    papers = {"wmt14_en_de_base", "wmt14_en_de_big", "wmt14_en_fr_big"}
    small = {"iwslt14_de_en", "multi30k_en_de_tiny", "multi30k_en_fr_tiny", "reverse_toy"}
    assert {path.stem for path in SHIPPED} == papers | small


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_parse(path):
    recipe = load_recipe(path)
    assert recipe.model_config().vocab_size == recipe.vocab_size


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_open_with_command_hardware_time_and_score(path):
    opening = re.match(r"(#.*\n)*", path.read_text(encoding="utf-8"))[0]
    for wanted in (rf"train.*{path.name}", "CPU|GPU|core", "second|minute|hour|day", "BLEU"):
        assert re.search(wanted, opening), wanted


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_say_only_where_they_differ(path):
    knobs = yaml.safe_load(path.read_text(encoding="utf-8"))
    defaults = Recipe(src_lang="", tgt_lang="").to_dict()
    assert [name for name, value in knobs.items() if value == defaults[name]] == []
    base = VanillaTransformerConfig()
    assert [name for name, value in knobs.get("model", {}).items() if value == getattr(base, name)] == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_peak_that_a_recipe_tells_is_its_peak(path):
    told = re.findall(
        r"^learning_rate_factor:.*# a peak of (\S+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    for peak in told:
        recipe = load_recipe(path)
        reached = learning_rate(
            recipe.warmup_steps, recipe.model_config().d_model, recipe.warmup_steps, recipe.learning_rate_factor
        )
        assert reached == pytest.approx(float(peak), rel=0.01)


@pytest.mark.parametrize(
    ("name", "languages", "vocab_size", "sizes", "steps", "minutes", "keep_last"),
    [
        ("wmt14_en_de_base", ("en", "de"), 37000, (512, 2048, 8, 0.1), 100_000, 12 * 60, 5),
        ("wmt14_en_de_big", ("en", "de"), 37000, (1024, 4096, 16, 0.3), 300_000, 3.5 * 24 * 60, 20),
        ("wmt14_en_fr_big", ("en", "fr"), 32000, (1024, 4096, 16, 0.1), 300_000, 3.5 * 24 * 60, 20),
    ],
)
def test_the_papers_recipes_are_the_papers(name, languages, vocab_size, sizes, steps, minutes, keep_last):
    recipe = load_recipe(ROOT / "train" / "recipes" / f"{name}.yaml")
    config = recipe.model_config()
    assert ((recipe.src_lang, recipe.tgt_lang), recipe.vocab_size, recipe.steps) == (languages, vocab_size, steps)
    assert (config.d_model, config.d_ff, config.num_heads, config.dropout) == sizes
    assert (config.encoder_layers, config.decoder_layers, recipe.label_smoothing) == (6, 6, 0.1)
    assert (recipe.warmup_steps, recipe.learning_rate_factor, recipe.keep_last) == (4000, 1, keep_last)
    assert 8 * recipe.batch_tokens * recipe.gradient_accumulation == 25_000
    # About every ten minutes of the paper's training, and evenly up to its end.
    assert recipe.save_every / steps * minutes == pytest.approx(10, rel=0.11) and steps % recipe.save_every == 0


def test_the_papers_score_is_not_claimed_before_it_is_reached():
    for path in SHIPPED:
        opening = re.match(r"(#.*\n)*", path.read_text(encoding="utf-8"))[0].replace("\n# ", " ")
        if "Should give" in opening:
            assert re.search("[Nn]ot reached here", opening) and re.search(r"\(Table 2\)|\(arXiv:\S+\)", opening), path


def test_the_defaults_are_the_papers_base_model(load):
    recipe = load(LANGUAGES)
    config = recipe.model_config()
    assert (config.d_model, config.d_ff, config.num_heads, config.encoder_layers, config.dropout) == (
        512,
        2048,
        8,
        6,
        0.1,
    )
    assert (recipe.vocab_size, recipe.batch_tokens, recipe.steps, recipe.keep_last) == (37000, 25000, 100_000, 5)
    assert (recipe.warmup_steps, recipe.learning_rate_factor, recipe.label_smoothing) == (4000, 1, 0.1)
    assert (recipe.adam_betas, recipe.adam_epsilon) == ([0.9, 0.98], 1e-9)


def test_a_recipe_says_where_it_differs(load):
    recipe = load(LANGUAGES + "steps: 7\nlearning_rate_factor: 2\nlabel_smoothing: 0\nmodel:\n  d_model: 64\n")
    assert (recipe.steps, recipe.learning_rate_factor, recipe.label_smoothing) == (7, 2, 0)
    config = recipe.model_config(vocab_size=300)
    assert (config.vocab_size, config.d_model, config.src_lang, config.tgt_lang) == (300, 64, "en", "de")
    assert recipe == Recipe(**recipe.to_dict())


def test_every_knob_is_documented():
    for knob in dataclasses.fields(Recipe):
        assert re.search(rf"^        (\w+, )*{knob.name}(, \w+)*:", Recipe.__doc__, flags=re.MULTILINE), knob.name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("warmup_step: 5", r"x.yaml: unknown knob 'warmup_step': did you mean 'warmup_steps'\?"),
        ("lable_smoothing: 0.1", "unknown knob 'lable_smoothing': did you mean 'label_smoothing'"),
        ("Steps: 5", "unknown knob 'Steps': did you mean 'steps'"),
        ("zzz: 5", "unknown knob 'zzz', known are .*'batch_tokens'"),
        ("3: 5", "unknown knob 3"),
        ("model:\n  num_head: 4", r"unknown field under model 'num_head': did you mean 'num_heads'\?"),
        ("model:\n  zzz: 4", "unknown field under model 'zzz'"),
        ("model:\n  steps: 4", "unknown field under model 'steps'"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest(load, text, message):
    with pytest.raises(ValueError, match=message):
        load(LANGUAGES + text)


@pytest.mark.parametrize("key", ["vocab_size: 300", "src_lang: en", "tgt_lang: fr"])
def test_a_field_of_the_model_that_the_recipe_sets_itself_is_refused_under_model(load, key):
    with pytest.raises(ValueError, match=key.split(":")[0]):
        load(LANGUAGES + f"model:\n  {key}")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("steps: many", "steps"),
        ("steps: 10.5", "steps"),
        ("steps: true", "steps"),
        ("steps: null", "steps"),
        ("label_smoothing: true", "label_smoothing"),
        ("learning_rate_factor: '2'", "learning_rate_factor"),
        ("adam_betas: 0.9", "adam_betas"),
        ("model: base", "model"),
        ("model:", "model"),
        ("mixed_precision: 16", "mixed_precision"),
        ("model:\n  d_model: wide", "d_model"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(load, text, name):
    with pytest.raises((ValueError, StrictDataclassError), match=name):
        load(LANGUAGES + text)


def test_a_number_that_yaml_takes_for_text_is_refused_with_both(load):
    assert load(LANGUAGES + "adam_epsilon: 1.0e-9").adam_epsilon == 1e-9
    with pytest.raises(StrictDataclassError, match="(?s)adam_epsilon.*float.*str.*1e-9"):
        load(LANGUAGES + "adam_epsilon: 1e-9")


def test_norwegian_is_not_false(load):
    assert load("src_lang: en\ntgt_lang: 'no'").tgt_lang == "no"
    with pytest.raises(StrictDataclassError, match="(?s)tgt_lang.*str.*bool"):
        load("src_lang: en\ntgt_lang: no")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in ("vocab_size", "max_length", "batch_tokens", "gradient_accumulation", "steps")),
        *((name, -3) for name in ("warmup_steps", "save_every", "keep_last", "validation_bleu_sentences")),
        *(("label_smoothing", value) for value in (-0.1, 1, 1.5)),
        *(("learning_rate_factor", value) for value in (0, -1.0)),
        *(("adam_betas", value) for value in ([0.9], [0.9, 0.98, 0.99], [0.9, 1.0], [-0.1, 0.98])),
        *(("adam_epsilon", value) for value in (-1e-9,)),
        *(("max_gradient_norm", value) for value in (0, -1.0)),
        *(("mixed_precision", value) for value in ("bf8", "float16")),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises((ValueError, StrictDataclassError), match=re.escape(name)) as caught:
        Recipe(src_lang="en", tgt_lang="de", **{name: value})
    assert str(value).strip("'") in str(caught.value)


@pytest.mark.parametrize(("text", "name"), [("d_model: 10\n  num_heads: 4", "d_model"), ("dropout: 1.5", "dropout")])
def test_a_model_that_cannot_be_is_refused_when_the_recipe_is_read(load, text, name):
    with pytest.raises((ValueError, StrictDataclassError), match=name):
        load(LANGUAGES + f"model:\n  {text}")


@pytest.mark.parametrize(
    ("text", "missing"),
    [("steps: 1", "src_lang and tgt_lang"), ("src_lang: en", "tgt_lang"), ("tgt_lang: de", "src_lang")],
)
def test_a_recipe_without_languages_is_refused(load, text, missing):
    with pytest.raises(ValueError, match=f"x.yaml: the recipe does not say {missing}$"):
        load(text)


@pytest.mark.parametrize(("text", "kind"), [("", "NoneType"), ("- steps", "list"), ("steps", "str")])
def test_a_file_that_is_no_mapping_is_refused(load, text, kind):
    with pytest.raises(ValueError, match=f"x.yaml: a recipe is a mapping of knobs to values, got {kind}"):
        load(text)


def test_a_recipe_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent.yaml"):
        load_recipe(tmp_path / "absent.yaml")


def test_a_file_that_is_no_yaml_is_refused_by_its_name(tmp_path):
    (tmp_path / "broken.yaml").write_text("steps: [1, 2", encoding="utf-8")
    with pytest.raises(ValueError, match="broken.yaml is no YAML"):
        load_recipe(tmp_path / "broken.yaml")
