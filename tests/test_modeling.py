"""The model: masks, positions, tying, loss, initialisation, and what every model of transformers can do."""

import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models
from torch.nn import functional as F
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.modeling_outputs import BaseModelOutput

from vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel
from vanilla_transformer.modeling_vanilla_transformer import Dropout, sinusoids

ATTENTIONS = ["eager", "sdpa"]


def assert_near(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def gradients(model, **inputs):
    """The gradient of the loss by every parameter's name."""
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_gradients(actual, expected, tolerance=1e-5):
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def pad(tensor, columns, side, value):
    return F.pad(tensor, (columns, 0) if side == "left" else (0, columns), value=value)


def three_embeddings(model):
    return [
        model.get_input_embeddings().weight,
        model.get_decoder().embed_tokens.weight,
        model.get_output_embeddings().weight,
    ]


def are_one_tensor(tensors):
    return len({id(tensor) for tensor in tensors}) == 1 and len({tensor.data_ptr() for tensor in tensors}) == 1


# Order: who sees whom.


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_future_is_invisible_to_the_past(model, attention):
    model.set_attn_implementation(attention)
    source, target = torch.tensor([[5, 6, 7, 2]]), torch.tensor([[1, 4, 9, 3, 8]])
    logits = model(input_ids=source, decoder_input_ids=target).logits
    for place in range(1, 5):
        other = target.clone()
        other[:, place:] = 11
        changed = model(input_ids=source, decoder_input_ids=other).logits
        assert_near(changed[:, :place], logits[:, :place], 1e-6)
        assert (changed[:, place] - logits[:, place]).abs().max() > 1e-3


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_whole_source_is_visible_from_everywhere(model, attention):
    model.set_attn_implementation(attention)
    memory = model.get_encoder()(torch.tensor([[5, 6, 7, 2]])).last_hidden_state
    for place in range(4):
        source = torch.tensor([[5, 6, 7, 2]])
        source[:, place] = 11
        changed = model.get_encoder()(source).last_hidden_state
        assert ((changed - memory).abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("encoding", ["sinusoidal", "learned", "none"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_left_or_right(make_model, side, encoding, attention):
    model = make_model(position_encoding=encoding)
    model.set_attn_implementation(attention)
    source, target = torch.tensor([[5, 6, 7, 2], [9, 4, 3, 2]]), torch.tensor([[1, 4, 9], [1, 8, 8]])
    logits = model(input_ids=source, decoder_input_ids=target).logits
    padded = model(
        input_ids=pad(source, 3, side, 0),
        attention_mask=pad(torch.ones_like(source), 3, side, 0),
        decoder_input_ids=pad(target, 2, side, 0),
        decoder_attention_mask=pad(torch.ones_like(target), 2, side, 0),
    ).logits
    assert_near(padded[:, 2:] if side == "left" else padded[:, :3], logits)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_what_stands_under_a_mask_changes_nothing(model, batch, attention):
    model.set_attn_implementation(attention)
    logits = model(**batch).logits
    ids = batch["input_ids"].masked_fill(batch["attention_mask"].eq(0), 12)
    assert_near(model(**{**batch, "input_ids": ids}).logits, logits)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
def test_a_mask_may_be_of_any_type(model, batch, attention, dtype):
    model.set_attn_implementation(attention)
    logits = model(**batch).logits
    assert torch.equal(model(**{**batch, "attention_mask": batch["attention_mask"].to(dtype)}).logits, logits)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_batch_mates_change_nothing(model, batch, attention):
    model.set_attn_implementation(attention)
    together = model(**batch).logits
    for i in range(3):
        alone = model(**{name: tensor[i : i + 1] for name, tensor in batch.items()}).logits
        assert_near(alone, together[i : i + 1])


def test_order_matters_unless_there_are_no_positions(make_model):
    there, back = torch.tensor([[5, 6, 7]]), torch.tensor([[7, 6, 5]])
    for encoding, ordered in (("sinusoidal", True), ("learned", True), ("none", False)):
        encoder = make_model(position_encoding=encoding).get_encoder()
        difference = (encoder(there).last_hidden_state - encoder(back).last_hidden_state.flip(1)).abs().max()
        assert (difference > 1e-2) == ordered


# Masks that leave nothing, and batches that hold nothing.


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_source_row_fully_masked_is_finite_and_leaves_the_others_alone(model, batch, attention):
    model.set_attn_implementation(attention)
    expected = model(**batch).logits
    mask = batch["attention_mask"].clone()
    mask[1] = 0
    output = model(**{**batch, "attention_mask": mask})
    assert output.logits.isfinite().all()
    assert_near(output.logits[[0, 2]], expected[[0, 2]])
    output.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_source_row_fully_masked_is_the_same_with_eager_and_sdpa(model, batch):
    batch["attention_mask"][1] = 0
    model.set_attn_implementation("eager")
    eager = model(**batch).logits
    model.set_attn_implementation("sdpa")
    assert_near(model(**batch).logits, eager)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_an_empty_batch_gives_empty_outputs(model, batch, attention):
    model.set_attn_implementation(attention)
    output = model(**{name: tensor[:0] for name, tensor in batch.items()})
    assert output.logits.shape == (0, 5, 13)
    assert output.encoder_last_hidden_state.shape == (0, 6, 16)
    assert output.loss == 0
    output.loss.backward()
    assert all(parameter.grad.eq(0).all() for parameter in model.parameters())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_source_without_tokens_is_one_that_is_fully_masked(model, attention):
    model.set_attn_implementation(attention)
    source, target = torch.tensor([[5, 6], [7, 2]]), torch.tensor([[1, 4], [1, 5]])
    masked = model(input_ids=source, attention_mask=torch.zeros_like(source), decoder_input_ids=target).logits
    assert_near(model(input_ids=source[:, :0], decoder_input_ids=target).logits, masked)


# Positions.


def formula(positions, d_model):
    """Section 3.5 in float64: PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d))."""
    table = np.empty((len(positions), d_model))
    for i in range(d_model // 2):
        angle = np.asarray(positions, dtype=np.float64) / 10000 ** (2 * i / d_model)
        table[:, 2 * i], table[:, 2 * i + 1] = np.sin(angle), np.cos(angle)
    return torch.from_numpy(table)


def positions_added(model, positions):
    """What a model adds to embeddings at (B, T) positions: the decoder's first hidden states for embeddings of 0."""
    zeros = torch.zeros(*positions.shape, model.config.d_model, dtype=model.dtype)
    output = model(
        encoder_outputs=(zeros[:, :1],),
        decoder_inputs_embeds=zeros,
        decoder_position_ids=positions,
        output_hidden_states=True,
    )
    return output.decoder_hidden_states[0].detach()


@pytest.mark.parametrize("d_model", [2, 16, 512])
def test_sinusoids_match_the_formula(d_model):
    table = sinusoids(torch.arange(5001), d_model)
    assert table.dtype == torch.float32
    assert (table.double() - formula(range(5001), d_model)).abs().max() < 1e-6


@pytest.mark.parametrize("loaded", [False, True], ids=["fresh", "loaded"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)], ids=str
)
def test_a_model_adds_sinusoids_that_match_the_formula(make_model, tmp_path, dtype, tolerance, loaded):
    model = make_model().to(dtype)
    if loaded:
        model.save_pretrained(tmp_path)
        model = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
    added = positions_added(model.eval(), torch.arange(5000).view(50, 100)).flatten(0, 1)
    assert added.dtype == dtype
    assert (added.double() - formula(range(5000), 16)).abs().max() <= tolerance  # one rounding to the model's dtype


@pytest.mark.slow
def test_a_model_loaded_in_a_new_process_adds_the_same_sinusoids_and_gives_the_same_logits(model, batch, tmp_path):
    model.save_pretrained(tmp_path / "model")
    torch.save(batch, tmp_path / "batch.pt")
    script = """if True:
        import sys, torch
        from vanilla_transformer import VanillaTransformerForConditionalGeneration
        folder = sys.argv[1]
        model = VanillaTransformerForConditionalGeneration.from_pretrained(folder + "/model").eval()
        zeros = torch.zeros(1, 200, 16)
        states = model.get_encoder()(inputs_embeds=zeros, output_hidden_states=True).hidden_states
        logits = model(**torch.load(folder + "/batch.pt")).logits
        torch.save({"positions": states[0][0], "logits": logits}, folder + "/output.pt")
    """
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=os.environ)
    output = torch.load(tmp_path / "output.pt")
    assert (output["positions"].double() - formula(range(200), 16)).abs().max() < 1e-6
    assert_near(output["logits"], model(**batch).logits, 1e-6)


def test_sinusoids_have_no_longest_sentence(make_model):
    model = make_model(encoder_layers=1, decoder_layers=1)
    assert model(input_ids=torch.full((1, 1500), 5), decoder_input_ids=torch.full((1, 1500), 5)).logits.isfinite().all()
    assert (positions_added(model, torch.tensor([[10**6]]))[0].double() - formula([10**6], 16)).abs().max() < 1e-6


def test_embeddings_are_scaled_by_the_root_of_the_width(make_model):
    model = make_model(position_encoding="none")
    states = model.get_encoder()(torch.tensor([[5, 6]]), output_hidden_states=True).hidden_states
    assert_near(states[0][0], 4.0 * model.get_input_embeddings().weight[[5, 6]])  # sqrt(16)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_sentence_beyond_the_learned_positions_is_refused(make_model, side):
    model = make_model(position_encoding="learned", max_position_embeddings=6)
    source = torch.full((1, 7 if side == "source" else 6), 5)
    target = torch.full((1, 7 if side == "target" else 6), 5)
    with pytest.raises(ValueError, match="7 tokens.*max_position_embeddings=6"):
        model(input_ids=source, decoder_input_ids=target)


def test_padding_does_not_count_against_the_learned_positions(make_model):
    model = make_model(position_encoding="learned", max_position_embeddings=4)
    source, target = torch.tensor([[5, 6, 7, 2]]), torch.tensor([[1, 4]])
    logits = model(input_ids=source, decoder_input_ids=target).logits
    padded, mask = pad(source, 3, "left", 0), pad(torch.ones_like(source), 3, "left", 0)
    assert_near(model(input_ids=padded, attention_mask=mask, decoder_input_ids=target).logits, logits)


# Tying, saving, resizing.


@pytest.mark.parametrize("tied", [True, False])
def test_the_three_embeddings_are_one_tensor_through_save_load_and_resize(make_model, tmp_path, tied):
    model = make_model(tie_word_embeddings=tied)
    assert are_one_tensor(three_embeddings(model)) == tied
    model.save_pretrained(tmp_path)
    assert are_one_tensor(three_embeddings(model)) == tied
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert are_one_tensor(three_embeddings(loaded)) == tied
    assert len({tensor.data_ptr() for tensor in three_embeddings(loaded)}) == (1 if tied else 3)
    loaded.resize_token_embeddings(20)
    assert are_one_tensor(three_embeddings(loaded)) == tied
    assert [tensor.shape for tensor in three_embeddings(loaded)] == [(20, 16)] * 3


@pytest.mark.parametrize(("tied", "copies"), [(True, 1), (False, 3)])
def test_the_file_holds_tied_embeddings_once(make_model, tmp_path, tied, copies):
    make_model(tie_word_embeddings=tied).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    assert sum(shape == [13, 16] for shape in shapes) == copies


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"position_encoding": "learned", "max_position_embeddings": 8},
        {"num_heads": 3, "d_k": 5, "d_v": 7, "attention_bias": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("shard", ["50GB", "8KB"])
def test_a_model_saved_and_loaded_has_every_weight_and_gives_equal_logits(make_model, batch, tmp_path, changes, shard):
    model = make_model(**changes)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors").exists() == (shard == "50GB")
    loaded, info = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    weights = dict(model.named_parameters())
    assert dict(loaded.named_parameters()).keys() == weights.keys()
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights[name]), name  # the padding's row too, which is not 0 here
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    assert not loaded.training


def test_a_model_without_head_is_loaded_from_one_with_and_back(model, batch, tmp_path):
    model.save_pretrained(tmp_path / "with")
    labels = batch.pop("labels").clamp(min=0)
    bare = VanillaTransformerModel.from_pretrained(tmp_path / "with")
    states = bare(**batch, decoder_input_ids=labels).last_hidden_state
    logits = model(**batch, decoder_input_ids=labels).logits
    assert_near(states @ bare.get_input_embeddings().weight.T, logits)
    assert bare.get_input_embeddings().weight is bare.get_decoder().embed_tokens.weight
    bare.save_pretrained(tmp_path / "without")
    again = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "without")
    assert_near(again(**batch, decoder_input_ids=labels).logits, logits)


def test_weights_that_a_file_lacks_are_initialised_and_the_others_kept(make_model, tmp_path):
    bare = make_model(tie_word_embeddings=False).model
    bare.save_pretrained(tmp_path)
    loaded, info = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {"lm_head.weight"}
    assert 0.1 < loaded.lm_head.weight.std() < 0.4  # 1/sqrt(16)
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, bare.get_parameter(name)), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("tokens", "multiple", "rows"), [(20, None, 20), (14, 8, 16), (None, 8, 16), (9, None, 9), (13, None, 13)]
)
def test_resizing_keeps_the_logits_of_the_old_words_and_the_scale(make_model, tmp_path, tied, tokens, multiple, rows):
    model = make_model(tie_word_embeddings=tied)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 2]]), "decoder_input_ids": torch.tensor([[1, 4, 8]])}
    logits = model(**inputs).logits
    model.resize_token_embeddings(tokens, pad_to_multiple_of=multiple)
    assert model.config.vocab_size == rows
    resized = model(**inputs).logits
    assert resized.shape == (1, 3, rows)
    kept = min(rows, 13)
    assert_near(resized[..., :kept], logits[..., :kept])
    assert model(**inputs, labels=torch.full((1, 3), rows - 1)).loss.isfinite()
    model.save_pretrained(tmp_path)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(loaded(**inputs).logits, resized)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_set_from_outside_replace_all_that_are_tied(make_model, tied):
    model, new = make_model(tie_word_embeddings=tied), torch.nn.Embedding(13, 16)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is new
    assert (model.get_decoder().embed_tokens is new) == tied
    model.tie_weights()
    assert are_one_tensor([*three_embeddings(model), new.weight]) == tied


# Attention implementations, precision, graphs.


@pytest.mark.parametrize("side", ["left", "right", "none", "blank row"])
@pytest.mark.parametrize("changes", [{}, {"num_heads": 3, "d_k": 5, "d_v": 7}, {"num_heads": 1}], ids=str)
def test_eager_and_sdpa_agree_forward_and_backward(make_model, batch, side, changes):
    model = make_model(**changes)
    if side == "left":
        batch = {name: tensor.flip(1) for name, tensor in batch.items()}
    elif side == "none":
        batch["attention_mask"] = None
    elif side == "blank row":
        batch["attention_mask"][2] = 0
    results = []
    for attention in ATTENTIONS:
        model.set_attn_implementation(attention)
        results.append((model(**batch).logits, gradients(model, **batch)))
    (eager_logits, eager_gradients), (sdpa_logits, sdpa_gradients) = results
    assert_near(sdpa_logits, eager_logits)
    assert_same_gradients(sdpa_gradients, eager_gradients)


@pytest.mark.slow
def test_flex_attention_agrees_forward(make_model, batch):
    model = make_model(encoder_layers=1, decoder_layers=1)
    with torch.no_grad():
        expected = model(**batch).logits
        model.set_attn_implementation("flex_attention")
        assert_near(model(**batch).logits, expected)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.02), (torch.bfloat16, 0.15)], ids=str)
def test_half_precision_is_finite_and_near(model, batch, attention, dtype, tolerance):
    model.set_attn_implementation(attention)
    batch["attention_mask"][1] = 0
    expected = model(**batch)
    half = model.to(dtype)(**batch)
    assert half.logits.dtype == dtype
    assert_near(half.logits.float(), expected.logits, tolerance)
    assert_near(half.loss.float(), expected.loss, tolerance)
    half.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(make_model, batch, use_reentrant):
    model = make_model(dropout=0.3, activation_dropout=0.2, attention_dropout=0.1).train()
    torch.manual_seed(1)
    expected = gradients(model, **batch)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    torch.manual_seed(1)
    assert_same_gradients(gradients(model, **batch), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "backend"), [("eager", "aot_eager"), ("sdpa", "aot_eager"), ("sdpa", "inductor")]
)
def test_the_forward_compiles_into_one_graph(make_model, batch, attention, backend):
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("inductor needs a C++ compiler")
    model = make_model(dropout=0.0, encoder_layers=1, decoder_layers=1).train()
    model.set_attn_implementation(attention)
    expected, expected_gradients = model(**batch), gradients(model, **batch)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_near(compiled(**batch).logits, expected.logits)
    assert_near(compiled(**batch).loss, expected.loss)
    model.zero_grad()
    compiled(**batch).loss.backward()
    assert_same_gradients({name: parameter.grad for name, parameter in model.named_parameters()}, expected_gradients)


@pytest.mark.slow
def test_the_forward_compiles_into_one_graph_with_dropout(make_model, batch):
    model = make_model(dropout=0.5).train()
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch).loss
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert abs(loss - model.eval()(**batch).loss) > 1e-3


@pytest.mark.slow
def test_an_exported_model_takes_sentences_of_any_length(model):
    names = ("input_ids", "attention_mask", "decoder_input_ids")

    def inputs(batch_size, source_length, target_length):
        source = torch.randint(3, 13, (batch_size, source_length))
        mask = torch.ones_like(source)
        mask[0, -1] = 0
        return dict(zip(names, (source, mask, torch.randint(3, 13, (batch_size, target_length))), strict=True))

    b, s, t = torch.export.Dim("b"), torch.export.Dim("s"), torch.export.Dim("t")
    exported = torch.export.export(
        model,
        (),
        {**inputs(2, 5, 4), "use_cache": False},
        dynamic_shapes={
            **dict(zip(names, ({0: b, 1: s}, {0: b, 1: s}, {0: b, 1: t}), strict=True)),
            "use_cache": None,
        },
        strict=False,
    ).module()
    for sizes in ((2, 5, 4), (3, 9, 7), (4, 700, 600)):
        example = inputs(*sizes)
        assert_near(exported(**example, use_cache=False).logits, model(**example).logits)


def test_device_map_auto_loads_on_a_cpu(model, batch, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path, device_map="auto")
    on_cpu = {name: tensor.to(loaded.device) for name, tensor in batch.items()}
    assert_near(loaded(**on_cpu).logits.cpu(), model(**batch).logits)
    assert are_one_tensor(three_embeddings(loaded))


def test_layers_are_not_split_over_devices(model):
    layers = {type(module).__name__ for stack in (model.get_encoder(), model.get_decoder()) for module in stack.layers}
    assert layers == set(model._no_split_modules)


# Loss.


def test_the_loss_is_the_mean_cross_entropy_of_the_labels_not_shifted_twice(model):
    source = torch.tensor([[5, 6, 2]])
    labels, shifted = torch.tensor([[7, 9, 2, -100]]), torch.tensor([[1, 7, 9, 2]])
    output = model(input_ids=source, labels=labels)
    logits = model(input_ids=source, decoder_input_ids=shifted).logits
    assert_near(output.logits[:, :3], logits[:, :3])
    log_p = logits[0].log_softmax(-1)
    assert_near(output.loss, -(log_p[0, 7] + log_p[1, 9] + log_p[2, 2]) / 3)
    assert_near(model(input_ids=source, decoder_input_ids=shifted, labels=labels).loss, output.loss)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("num_items", [None, 7, 0, torch.tensor(7), torch.tensor(0)], ids=repr)
def test_labels_of_minus_100_only_give_loss_0_and_finite_gradients(model, batch, attention, num_items):
    model.set_attn_implementation(attention)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    output = model(**batch, num_items_in_batch=num_items)
    assert output.loss == 0
    output.loss.backward()
    assert all(parameter.grad.eq(0).all() for parameter in model.parameters())


def test_a_row_without_labels_leaves_the_loss_of_the_others_alone(model, batch):
    without = {name: tensor[[0, 2]] for name, tensor in batch.items()}
    batch["labels"][1] = -100
    assert_near(model(**batch).loss, model(**without).loss)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_the_summed_loss_is_divided_by_num_items_in_batch(model, batch, as_tensor):
    count = 10
    assert batch["labels"].ne(-100).sum() == count
    expected, expected_gradients = model(**batch).loss, gradients(model, **batch)
    model.zero_grad()
    losses = [
        model(
            **{name: tensor[part] for name, tensor in batch.items()},
            num_items_in_batch=torch.tensor(count) if as_tensor else count,
        ).loss
        for part in (slice(0, 1), slice(1, 3))
    ]
    sum(losses).backward()
    assert_near(sum(losses), expected)
    assert_same_gradients({name: parameter.grad for name, parameter in model.named_parameters()}, expected_gradients)


def test_trainer_takes_the_same_step_however_a_batch_is_accumulated(make_model, batch, tmp_path):
    weights = []
    for size, accumulated in ((3, 1), (1, 3)):
        model = make_model(dropout=0.0)
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulated,
            max_steps=1,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
        )
        rows = [{name: tensor[i] for name, tensor in batch.items()} for i in range(3)]
        Trainer(model=model, args=arguments, train_dataset=rows).train()
        weights.append(dict(model.named_parameters()))
    expected = make_model(dropout=0.0)
    for name, gradient in gradients(expected, **batch).items():
        stepped = expected.get_parameter(name) - 0.1 * gradient
        assert_near(weights[0][name], stepped)
        assert_near(weights[1][name], stepped)


def test_labels_need_not_be_contiguous(model, batch):
    expected = model(**batch).loss
    strided = batch["labels"].T.contiguous().T
    assert not strided.is_contiguous()
    assert_near(model(**{**batch, "labels": strided}).loss, expected)


def test_labels_padded_left_give_the_loss_of_labels_padded_right(model, batch):
    expected = gradients(model, **batch)
    loss = model(**batch).loss
    left = torch.stack([row[row.ne(-100).int().argsort(stable=True)] for row in batch["labels"]])
    assert left[0].tolist() == [-100, -100, 7, 4, 2]
    assert_near(model(**{**batch, "labels": left}).loss, loss)
    assert_same_gradients(gradients(model, **{**batch, "labels": left}), expected)


def test_labels_of_another_shape_are_refused(model, batch):
    with pytest.raises(ValueError, match=r"labels.*\(3, 2\).*\(3, 5\)"):
        model(**batch, decoder_input_ids=torch.ones(3, 2, dtype=torch.long))


def test_labels_make_no_cache(model, batch):
    output = model(**batch)
    assert output.get("cache") is None and output.get("past_key_values") is None


def test_the_collator_of_transformers_shifts_labels_right_with_the_models_help(model, batch):
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 13)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w3")),
        **{"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"},
    )
    features = [
        {"input_ids": ids[mask.bool()].tolist(), "labels": labels[labels.ne(-100)].tolist()}
        for ids, mask, labels in zip(*(batch[k] for k in ("input_ids", "attention_mask", "labels")), strict=True)
    ]
    collated = DataCollatorForSeq2Seq(tokenizer, model=model)(features)
    assert collated["decoder_input_ids"].tolist() == [[1, 7, 4, 2, 0], [1, 11, 5, 8, 6], [1, 9, 2, 0, 0]]
    assert torch.equal(collated["labels"], batch["labels"])
    assert_near(model(**collated).loss, model(**batch).loss)


def test_logits_are_kept_for_the_last_positions_when_asked(model, batch):
    target = batch.pop("labels").clamp(min=0)
    logits = model(**batch, decoder_input_ids=target).logits
    assert_near(model(**batch, decoder_input_ids=target, logits_to_keep=2).logits, logits[:, -2:])


# Other ways in and out.


def test_embeddings_passed_in_equal_ids(model, batch):
    labels = batch.pop("labels")
    target = labels.clamp(min=0)
    embed = model.get_input_embeddings()
    expected = model(**batch, decoder_input_ids=target)
    output = model(
        inputs_embeds=embed(batch["input_ids"]),
        attention_mask=batch["attention_mask"],
        decoder_inputs_embeds=embed(target),
        labels=labels,
    )
    assert_near(output.logits, expected.logits)
    assert output.loss > 0


@pytest.mark.parametrize("form", ["output", "tuple", "of another call"])
def test_encoder_outputs_passed_in_equal_ids(model, batch, form):
    expected = model(**batch).logits
    ids = batch.pop("input_ids")
    if form == "of another call":
        encoded = model.get_encoder()(input_ids=ids, attention_mask=batch["attention_mask"])
    else:
        memory = model.get_encoder()(ids, batch["attention_mask"], return_dict=False)[0]
        encoded = (memory,) if form == "tuple" else BaseModelOutput(last_hidden_state=memory)
    assert_near(model(**batch, encoder_outputs=encoded).logits, expected)


def test_the_stacks_are_given_by_their_getters(model):
    assert model.get_encoder() is model.model.encoder
    assert model.get_decoder() is model.model.decoder
    assert model.model.get_encoder() is model.model.encoder


def test_attention_weights_are_given_for_every_layer_and_sum_to_1(make_model, batch):
    model = make_model(encoder_layers=3, decoder_layers=2)
    model.set_attn_implementation("eager")
    output = model(**batch, output_attentions=True)
    assert [weights.shape for weights in output.encoder_attentions] == [(3, 2, 6, 6)] * 3
    assert [weights.shape for weights in output.decoder_attentions] == [(3, 2, 5, 5)] * 2
    assert [weights.shape for weights in output.cross_attentions] == [(3, 2, 5, 6)] * 2
    for weights in (*output.encoder_attentions, *output.decoder_attentions, *output.cross_attentions):
        assert_near(weights.sum(-1), torch.ones(weights.shape[:3]))
    hidden = batch["attention_mask"].eq(0)[:, None, None, :]
    for weights in (*output.encoder_attentions, *output.cross_attentions):
        assert weights.masked_select(hidden).eq(0).all()
    for weights in output.decoder_attentions:
        assert weights.triu(1).eq(0).all()
        assert weights.tril().gt(0).sum() == 3 * 2 * 15


def test_attention_weights_are_asked_of_eager_alone(model, batch):
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="output_attentions.*eager"):
        model.config.output_attentions = True


def test_hidden_states_are_given_before_and_after_every_layer(make_model, batch):
    model = make_model(encoder_layers=3, decoder_layers=2)
    output = model(**batch, output_hidden_states=True)
    assert [states.shape for states in output.encoder_hidden_states] == [(3, 6, 16)] * 4
    assert [states.shape for states in output.decoder_hidden_states] == [(3, 5, 16)] * 3
    assert torch.equal(output.encoder_hidden_states[-1], output.encoder_last_hidden_state)
    assert_near(model.lm_head(output.decoder_hidden_states[-1]), output.logits)
    assert "encoder_hidden_states" not in model(**batch)


def test_a_tuple_is_given_when_asked(model, batch):
    loss, logits, *_ = model(**batch, return_dict=False)
    assert_near(loss, model(**batch).loss)
    assert logits.shape == (3, 5, 13)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "either input_ids or inputs_embeds, got neither"),
        ({"input_ids": (2, 4), "inputs_embeds": (2, 4, 16)}, "either input_ids or inputs_embeds, got both"),
        ({"input_ids": (2, 4), "attention_mask": (2, 5)}, r"attention_mask.*\(2, 4\).*\(2, 5\)"),
        ({"input_ids": (2, 4), "attention_mask": (1, 4)}, r"attention_mask.*\(2, 4\).*\(1, 4\)"),
        ({"input_ids": (2, 4), "attention_mask": (2,)}, r"attention_mask.*\(2, 4\).*\(2,\)"),
        ({"inputs_embeds": (2, 4, 16), "attention_mask": (2, 3)}, r"attention_mask.*\(2, 4\).*\(2, 3\)"),
        ({"encoder_outputs": (2, 4, 16), "attention_mask": (2, 3)}, r"attention_mask.*\(2, 4\).*\(2, 3\)"),
        ({"input_ids": (2, 4), "decoder_attention_mask": (2, 4)}, r"decoder_attention_mask.*\(2, 3\).*\(2, 4\)"),
        ({"input_ids": (2, 4), "decoder_input_ids": None}, "either decoder_input_ids or decoder_inputs_embeds"),
        ({"input_ids": (2, 4), "decoder_inputs_embeds": (2, 3, 16)}, "decoder_inputs_embeds, got both"),
    ],
    ids=str,
)
def test_inputs_that_do_not_fit_are_refused(model, given, words):
    inputs = {"decoder_input_ids": torch.ones(2, 3, dtype=torch.long)}
    for name, shape in given.items():
        inputs[name] = None if shape is None else torch.ones(shape, dtype=None if len(shape) == 3 else torch.long)
    if "encoder_outputs" in inputs:
        inputs["encoder_outputs"] = (inputs["encoder_outputs"],)
    with pytest.raises(ValueError, match=words):
        model(**inputs)


# Initialisation.


@pytest.mark.parametrize("tied", [True, False])
def test_initial_weights_are_as_the_table_says(make_config, tied):
    torch.manual_seed(0)
    config = make_config(
        vocab_size=2000,
        d_model=64,
        d_ff=256,
        num_heads=4,
        tie_word_embeddings=tied,
        position_encoding="learned",
        attention_bias=True,
    )
    seen = set()
    for name, weight in VanillaTransformerForConditionalGeneration(config).named_parameters():
        kind = "position" if "positions" in name else "word" if "embed" in name or "lm_head" in name else "layer"
        if kind == "position":
            expected = 1 / 2
        elif kind == "word":
            is_output = "lm_head" in name
            assert weight[0].eq(0).all() != is_output
            expected, weight = 1 / 64, weight[1:]
        elif "norm" in name:
            assert weight.eq(0 if "bias" in name else 1).all()
            continue
        elif "bias" in name:
            assert weight.eq(0).all()
            continue
        else:
            gain = math.sqrt(0.5) if any(f"{letter}_proj" in name for letter in "qkv") else 1.0
            expected = gain**2 * 2 / sum(weight.shape)
            assert 0.98 < weight.abs().max() / (gain * math.sqrt(6 / sum(weight.shape))) <= 1
        seen.add(kind)
        assert abs(weight.mean().item()) < 4 * math.sqrt(expected / weight.numel()), name
        assert weight.var().item() == pytest.approx(expected, rel=0.06), name
    assert seen == {"position", "word", "layer"}


def test_initial_logits_have_a_variance_near_1(make_config):
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(make_config(vocab_size=2000, d_model=64, num_heads=4)).eval()
    logits = model(input_ids=torch.arange(5, 105)[None], decoder_input_ids=torch.arange(200, 300)[None]).logits
    assert 0.7 < logits.var() < 1.4


# Dropout.


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_dropout_zeroes_its_share_and_keeps_the_mean(p):
    torch.manual_seed(0)
    size = 1_000_003
    dropped = Dropout(p)(torch.ones(size))
    zeros = dropped.eq(0).sum().item()
    assert abs(zeros - p * size) < 4 * math.sqrt(size * p * (1 - p))
    assert_near(dropped[dropped.ne(0)], torch.full((size - zeros,), 1 / (1 - p)), 1e-6)
    assert abs(dropped.mean().item() - 1) < 4 * math.sqrt(p / (1 - p) / size)


def test_dropout_treats_neighbours_apart():
    torch.manual_seed(0)
    kept = Dropout(0.5)(torch.ones(400_000)).ne(0).float() - 0.5
    for distance in (1, 2, 3, 4, 8):
        assert abs((kept[distance:] * kept[:-distance]).mean().item()) < 4 * 0.25 / math.sqrt(400_000)


def test_dropout_does_nothing_in_evaluation_or_at_0():
    x = torch.randn(5, 7)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0).train()(x), x)


@pytest.mark.parametrize(("p", "kept"), [(1.0, 0), (1 - 1e-9, 0), (1e-9, 10_000)])
def test_dropout_takes_rates_at_and_near_0_and_1(p, kept):
    torch.manual_seed(0)
    dropped = Dropout(p)(torch.ones(10_000))
    assert dropped.isfinite().all() and dropped.ne(0).sum() == kept


def test_the_gradient_of_dropout_is_its_mask():
    x = torch.randn(33, 7).add(3).requires_grad_()
    dropped = Dropout(0.4)(x)
    dropped.sum().backward()
    assert_near(x.grad, dropped.detach() / x.detach(), 1e-6)
    assert 0 < x.grad.eq(0).sum() < x.numel()


def test_dropout_repeats_with_its_seed():
    x, dropout = torch.ones(1000), Dropout(0.5)
    torch.manual_seed(3)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(3)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (2, 0, 5), (5, 3, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dropout_takes_any_shape_and_dtype(shape, dtype):
    x = torch.ones(shape, dtype=dtype)
    dropped = Dropout(0.5)(x)
    assert (dropped.shape, dropped.dtype) == (x.shape, dtype)
    assert ((dropped == 0) | (dropped == 2)).all()
    assert Dropout(0.5)(x.transpose(0, -1)).shape == x.transpose(0, -1).shape


def test_the_sums_of_embeddings_and_positions_are_dropped_out_in_training(make_model):
    model = make_model(dropout=0.3, d_model=64).train()
    torch.manual_seed(0)
    ids = torch.randint(3, 13, (10, 50))
    output = model(input_ids=ids, decoder_input_ids=ids, output_hidden_states=True)
    for states in (output.encoder_hidden_states[0], output.decoder_hidden_states[0]):
        assert states.eq(0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    assert model.eval()(input_ids=ids, decoder_input_ids=ids, output_hidden_states=True).encoder_hidden_states[0].all()


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout", "activation_dropout"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_kind_of_dropout_works_in_training_alone(make_model, batch, kind, attention):
    none = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    without, model = make_model(**none), make_model(**{**none, kind: 0.5})
    for one in (without, model):
        one.set_attn_implementation(attention)
    expected = without(**batch).logits
    assert_near(without.train()(**batch).logits, expected)
    assert_near(model(**batch).logits, expected)
    assert (model.train()(**batch).logits - expected).abs().max() > 0.05
