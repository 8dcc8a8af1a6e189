"""The configuration: Table 3's sizes, round trips, HF's names, and what it refuses."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

REFUSALS = (ValueError, StrictDataclassError)


def parameters(config):
    """How many parameters a model built from a configuration has, tied ones once."""
    with torch.device("meta"):
        return sum(p.numel() for p in VanillaTransformerForConditionalGeneration(config).parameters())


def parameters_by_formula(vocabulary, d, d_ff, heads, layers, d_k, d_v):
    """The same from the paper's equations: one matrix of embeddings, and N layers of each stack."""
    attention = heads * (2 * d_k + d_v) * d + heads * d_v * d
    feed_forward = d * d_ff + d_ff + d_ff * d + d
    norm = 2 * d
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    return vocabulary * d + layers * (encoder_layer + decoder_layer)


def test_base_has_the_parameters_that_the_formula_counts():
    assert parameters_by_formula(37000, 512, 2048, 8, 6, 64, 64) == 63_045_632
    assert parameters(VanillaTransformerConfig.base()) == 63_045_632


def test_big_has_the_parameters_that_the_formula_counts():
    assert parameters_by_formula(37000, 1024, 4096, 16, 6, 64, 64) == 214_171_648
    assert parameters(VanillaTransformerConfig.big()) == 214_171_648


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"num_heads": 1}, 0),  # rows (A): d_k and d_v follow, and a single head keeps its W^O
        ({"num_heads": 4}, 0),
        ({"num_heads": 16}, 0),
        ({"num_heads": 32}, 0),
        ({"d_k": 16}, -7_077_888),  # rows (B)
        ({"d_k": 32}, -4_718_592),
        ({"encoder_layers": 2, "decoder_layers": 2}, -29_401_088),  # rows (C)
        ({"encoder_layers": 4, "decoder_layers": 4}, -14_700_544),
        ({"encoder_layers": 8, "decoder_layers": 8}, 14_700_544),
        ({"d_ff": 1024}, -12_595_200),
        ({"d_ff": 4096}, 25_190_400),
        ({"dropout": 0.0}, 0),  # rows (D)
        ({"position_encoding": "learned"}, 2 * 1024 * 512),  # row (E)
        ({"position_encoding": "none"}, 0),
        ({"tie_word_embeddings": False}, 2 * 37000 * 512),
        ({"attention_bias": True}, 18 * 4 * 512),
    ],
    ids=str,
)
def test_rows_of_table_3_differ_from_base_by_what_their_sizes_say(changes, difference):
    assert parameters(VanillaTransformerConfig.base(**changes)) - 63_045_632 == difference


def test_defaults_are_the_base_row_of_table_3():
    config = VanillaTransformerConfig()
    assert config == VanillaTransformerConfig.base()
    assert (config.encoder_layers, config.decoder_layers, config.d_model, config.d_ff) == (6, 6, 512, 2048)
    assert (config.num_heads, config.resolved_d_k, config.resolved_d_v, config.dropout) == (8, 64, 64, 0.1)
    assert (config.vocab_size, config.position_encoding, config.tie_word_embeddings) == (37000, "sinusoidal", True)
    assert (config.attention_bias, config.attention_dropout, config.activation_dropout) == (False, 0.0, 0.0)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert config.decoder_start_token_id == 1
    assert config.layer_norm_eps == 1e-6


def test_big_is_the_big_row_of_table_3_and_takes_changes():
    config = VanillaTransformerConfig.big()
    assert (config.d_model, config.d_ff, config.num_heads, config.dropout) == (1024, 4096, 16, 0.3)
    assert (config.encoder_layers, config.resolved_d_k, config.resolved_d_v) == (6, 64, 64)
    assert VanillaTransformerConfig.big(dropout=0.1, vocab_size=32000).dropout == 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"d_k": 5, "d_v": 3, "num_heads": 3, "dropout": 0, "src_lang": "en", "tgt_lang": "de"},
        {"position_encoding": "learned", "max_position_embeddings": 9, "tie_word_embeddings": False},
        {"pad_token_id": 7, "eos_token_id": [2, 3], "decoder_start_token_id": 4, "attention_bias": True},
        {"unk_token_id": 3, "num_labels": 5, "trained_on": "captions"},
    ],
    ids=str,
)
def test_a_configuration_saved_and_loaded_is_the_same(make_config, tmp_path, changes):
    config = make_config(**changes)
    config.save_pretrained(tmp_path)
    loaded = VanillaTransformerConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert VanillaTransformerConfig(**config.to_dict()).to_dict() == config.to_dict()
    for name, value in changes.items():
        assert getattr(loaded, name) == value


def test_widths_of_heads_that_were_not_given_stay_open_in_the_file(make_config, tmp_path):
    make_config().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.get("d_k") is None and saved.get("d_v") is None
    loaded = VanillaTransformerConfig.from_pretrained(tmp_path, d_model=32, num_heads=8)
    assert (loaded.resolved_d_k, loaded.resolved_d_v) == (4, 4)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("hidden_size", "d_model"),
        ("intermediate_size", "d_ff"),
        ("num_attention_heads", "num_heads"),
        ("encoder_attention_heads", "num_heads"),
        ("decoder_attention_heads", "num_heads"),
        ("num_hidden_layers", "encoder_layers"),
    ],
)
def test_the_names_of_transformers_read_and_write_ours(make_config, name, ours):
    config = make_config()
    assert getattr(config, name) == getattr(config, ours)
    setattr(config, name, 16)
    assert getattr(config, ours) == 16
    assert getattr(VanillaTransformerConfig(**{name: 16}), ours) == 16


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("d_modle", "d_model"),
        ("vocab_sise", "vocab_size"),
        ("num_head", "num_heads"),
        ("encoder_layer", "encoder_layers"),
        ("decoders_layers", "decoder_layers"),
        ("droput", "dropout"),
        ("attention_droput", "attention_dropout"),
        ("position_encodings", "position_encoding"),
        ("tie_word_embedding", "tie_word_embeddings"),
        ("max_positions_embeddings", "max_position_embeddings"),
        ("layer_norm_esp", "layer_norm_eps"),
        ("pad_token_ids", "pad_token_id"),
        ("decoder_start_tokens_id", "decoder_start_token_id"),
    ],
)
def test_a_misspelt_field_is_refused_with_the_right_name(make_config, misspelt, meant):
    with pytest.raises(REFUSALS, match=f"{misspelt}.*did you mean '{meant}'"):
        make_config(**{misspelt: 1})


def test_a_misspelt_field_in_a_file_is_refused(make_config, tmp_path):
    make_config().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_head": 4}))
    with pytest.raises(REFUSALS, match="num_heads"):
        VanillaTransformerConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name", ["unk_token_id", "sep_token_id", "cls_token_id", "num_labels", "num_layers", "architectures", "my_note"]
)
def test_a_key_of_somebody_else_is_kept(make_config, name):
    value = ["SomeModel"] if name == "architectures" else 3
    config = make_config(**{name: value})
    assert getattr(config, name) == value
    assert config.num_heads == 2


@pytest.mark.parametrize("value", [0, -4, 2.5, "8", True, [8]], ids=repr)
@pytest.mark.parametrize(
    "name", ["vocab_size", "d_model", "d_ff", "num_heads", "encoder_layers", "decoder_layers", "d_k", "d_v"]
)
def test_a_size_that_is_no_positive_whole_number_is_refused(make_config, name, value):
    with pytest.raises(REFUSALS, match=rf"\b{name}\b"):
        make_config(**{name: value})


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "activation_dropout"])
@pytest.mark.parametrize("value", [-0.1, 1, 1.5, "0.1", None, True, float("nan")], ids=repr)
def test_a_rate_outside_0_to_1_is_refused(make_config, name, value):
    with pytest.raises(REFUSALS, match=rf"\b{name}\b"):
        make_config(**{name: value})


@pytest.mark.parametrize("value", [13, -1, None, "0", 1.0, True], ids=repr)
@pytest.mark.parametrize("name", ["pad_token_id", "bos_token_id", "eos_token_id"])
def test_a_special_token_outside_the_vocabulary_is_refused(make_config, name, value):
    with pytest.raises(REFUSALS, match=rf"\b{name}\b"):
        make_config(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("d_model", 15, "d_model.*divisible.*num_heads"),
        ("num_heads", 3, "divisible.*num_heads"),
        ("position_encoding", "rotary", "position_encoding.*sinusoidal.*learned.*none.*'rotary'"),
        ("position_encoding", None, "position_encoding"),
        ("eos_token_id", [2, 13], "eos_token_id.*13"),
        ("eos_token_id", [], "eos_token_id"),
        ("decoder_start_token_id", 13, "decoder_start_token_id.*13"),
        ("layer_norm_eps", 0.0, "layer_norm_eps"),
        ("layer_norm_eps", -1e-6, "layer_norm_eps"),
        ("tie_word_embeddings", "yes", "tie_word_embeddings"),
        ("attention_bias", 1, "attention_bias"),
        ("src_lang", 3, "src_lang"),
        ("use_cache", "no", "use_cache"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(make_config, name, value, words):
    with pytest.raises(REFUSALS, match=f"(?s){words}"):
        make_config(**{name: value})


@pytest.mark.parametrize("value", [0, -1, 2.5], ids=repr)
def test_a_table_of_learned_positions_needs_rows(make_config, value):
    with pytest.raises(REFUSALS, match="max_position_embeddings"):
        make_config(position_encoding="learned", max_position_embeddings=value)


def test_an_odd_width_is_refused_with_sinusoids_alone(make_config):
    with pytest.raises(REFUSALS, match="d_model must be even"):
        make_config(d_model=15, num_heads=3)
    assert make_config(d_model=15, num_heads=3, position_encoding="none").d_model == 15
    assert make_config(d_model=15, num_heads=3, position_encoding="learned").d_model == 15


def test_heads_need_not_divide_the_width_where_theirs_are_given(make_config):
    config = make_config(num_heads=3, d_k=4, d_v=6)
    assert (config.resolved_d_k, config.resolved_d_v) == (4, 6)
    with pytest.raises(REFUSALS, match="num_heads"):
        make_config(num_heads=3, d_k=4)


def test_the_start_symbol_is_bos_unless_given(make_config):
    assert make_config(bos_token_id=5).decoder_start_token_id == 5
    assert make_config(decoder_start_token_id=0).decoder_start_token_id == 0


def test_a_field_of_another_type_is_refused_when_it_is_set_later(make_config):
    config = make_config()
    with pytest.raises(REFUSALS, match="d_model"):
        config.d_model = "wide"
