"""Training: equal to a plain loop, however a batch is split, and resumed to the same numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoTokenizer

import vanilla_transformer
from vanilla_transformer import VanillaTransformerForConditionalGeneration, journal, training
from vanilla_transformer.checkpoint import best_checkpoints, checkpoints, load_state, step_of
from vanilla_transformer.data import Collator, PairDataset, TokenBatchSampler, pair_lengths, tokenize
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerFeedForward
from vanilla_transformer.prepare import Corpus
from vanilla_transformer.recipe import Recipe
from vanilla_transformer.tokenizer import train_tokenizer
from vanilla_transformer.training import SummedLoss, accumulate_gradients, train


def make_corpus(pairs=40, seed=0, validation=True):
    """Sentences of 1 to 6 made words, and the same backwards."""
    random = np.random.default_rng(seed)
    sentences = [random.choice(["ab", "cd", "ef", "gh", "ij"], random.integers(1, 7)) for _ in range(pairs)]
    text = {"source": [" ".join(s) for s in sentences], "target": [" ".join(s[::-1]) for s in sentences]}
    bitext = datasets.Dataset.from_dict(text)
    tokenizer = train_tokenizer(text["source"], vocab_size=270)
    held_out = tokenize(bitext.select(range(7)), tokenizer, keep_text=True) if validation else None
    return Corpus(tokenizer, tokenize(bitext, tokenizer), held_out, fingerprint=f"{pairs} {seed}")


def make_recipe(dropout=0.1, **changes):
    sizes = {"d_model": 16, "d_ff": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "dropout": dropout}
    small = {"vocab_size": 270, "batch_tokens": 27, "steps": 10, "warmup_steps": 4, "save_every": 5, "keep_last": 3}
    return Recipe(src_lang="en", tgt_lang="de", **{**small, "model": sizes, **changes})


# Adam divides by the size of the gradient: with a larger epsilon, rounding in a tiny one does not become a step.
WELL_CONDITIONED = {"adam_epsilon": 1e-4, "learning_rate_factor": 0.1}


def run_quietly(recipe, corpus, run, trackers=(), **arguments):
    return train(recipe, corpus, run, trackers, show_progress=False, **arguments)


def interrupt_at(monkeypatch, step):
    """Let training be killed as it begins this step, once."""
    true = training.learning_rate

    def killed(at, *arguments):
        if at == step:
            monkeypatch.setattr(training, "learning_rate", true)
            raise KeyboardInterrupt
        return true(at, *arguments)

    monkeypatch.setattr(training, "learning_rate", killed)


def log_of(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def assert_same_checkpoint(one, other):
    """Bit for bit: the model's file, the optimizer, the sampler and the random numbers."""
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    state, other_state = load_state(one), load_state(other)
    for part in ("identity", "versions", "best", "scaler"):
        assert state.pop(part) == other_state.pop(part)
    groups = [s["optimizer"].pop("param_groups") for s in (state, other_state)]
    assert [{**group, "betas": tuple(group["betas"])} for group in groups[0]] == [
        {**group, "betas": tuple(group["betas"])} for group in groups[1]
    ]
    del state["totals"]["seconds"], other_state["totals"]["seconds"]
    torch.testing.assert_close(state, other_state, rtol=0, atol=0)


@pytest.fixture(scope="module")
def corpus():
    return make_corpus()


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A run of ten steps, undisturbed."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    run_quietly(make_recipe(), corpus, run)
    return run


# The loop


def test_training_equals_a_plain_loop(corpus, tmp_path):
    recipe = make_recipe(dropout=0.0, gradient_accumulation=2, steps=3, seed=5, **WELL_CONDITIONED)
    trained = load_file(run_quietly(recipe, corpus, tmp_path / "run") / "model.safetensors")

    torch.manual_seed(5)
    model = VanillaTransformerForConditionalGeneration(recipe.model_config(vocab_size=len(corpus.tokenizer)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0, betas=(0.9, 0.98), eps=1e-4)
    plan = TokenBatchSampler(*pair_lengths(corpus.train), 27, seed=5).plan(0)
    for step in (1, 2, 3):
        total, words = 0, 0
        for batch in plan[2 * step - 2 : 2 * step]:
            batch = Collator(270, 0)(PairDataset(corpus.train).__getitems__(batch.tolist()))
            logits, labels = model(**batch).logits.flatten(0, 1), batch["labels"].flatten()
            total = total + F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
            words += int(labels.ne(-100).sum())
        optimizer.param_groups[0]["lr"] = 0.1 * 16**-0.5 * step * 4**-1.5
        (total / words).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: tensor for name, tensor in model.state_dict().items() if name in trained}
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_ragged_micro_batches_give_the_gradient_of_one_batch(corpus, label_smoothing):
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(make_recipe(dropout=0.0).model_config(vocab_size=270))
    accelerator, module = Accelerator(), SummedLoss(model)
    gather, collate = PairDataset(corpus.train).__getitems__, Collator(270, 0)

    def gradients(*batches):
        batches = [collate(gather(batch)) for batch in batches]
        words = sum(int(batch["labels"].ne(-100).sum()) for batch in batches)
        model.zero_grad()
        losses = accumulate_gradients(accelerator, module, batches, words, label_smoothing)
        return losses.sum(), {name: parameter.grad for name, parameter in model.named_parameters()}

    loss, whole = gradients([*range(12)])
    split_loss, split = gradients([3], [*range(4, 12)], [0, 2, 1])
    torch.testing.assert_close(split_loss, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-6)
    if not label_smoothing:
        model.zero_grad()
        model(**collate(gather([*range(12)]))).loss.backward()
        torch.testing.assert_close(whole, {n: p.grad for n, p in model.named_parameters()}, rtol=1e-5, atol=1e-6)


def test_labels_of_minus_100_alone_leave_gradients_finite():
    model = VanillaTransformerForConditionalGeneration(make_recipe().model_config(vocab_size=270))
    batch = {"input_ids": torch.tensor([[5, 2]]), "attention_mask": torch.ones(1, 2), "labels": torch.tensor([[-100]])}
    assert accumulate_gradients(Accelerator(), SummedLoss(model), [batch], 0, 0.1).tolist() == [0]
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_every_step_has_the_rate_of_equation_3(corpus, tmp_path):
    saved = run_quietly(make_recipe(steps=7, learning_rate_factor=0.5), corpus, tmp_path / "run")
    rate = 0.5 * 16**-0.5 * 7**-0.5
    assert load_state(saved)["optimizer"]["param_groups"][0]["lr"] == pytest.approx(rate, rel=1e-12)
    assert log_of(tmp_path / "run")[-1]["learning_rate"] == pytest.approx(rate, rel=1e-12)


def test_the_optimizer_is_the_recipes(corpus, tmp_path):
    recipe = make_recipe(steps=1, adam_betas=[0.8, 0.95], adam_epsilon=1e-7)
    group = load_state(run_quietly(recipe, corpus, tmp_path / "run"))["optimizer"]["param_groups"][0]
    assert (tuple(group["betas"]), group["eps"], group["weight_decay"]) == ((0.8, 0.95), 1e-7, 0)


def test_clipped_gradients_move_the_weights_less(corpus, tmp_path):
    torch.manual_seed(0)
    start = VanillaTransformerForConditionalGeneration(make_recipe().model_config(vocab_size=270)).lm_head.weight

    loaded = [
        VanillaTransformerForConditionalGeneration.from_pretrained(run_quietly(recipe, corpus, tmp_path / name))
        for name, recipe in (("free", make_recipe(steps=1)), ("clipped", make_recipe(steps=1, max_gradient_norm=1e-20)))
    ]
    free, clipped = ((model.lm_head.weight - start).abs().max().item() for model in loaded)
    assert free > 0.01 and clipped < 1e-9


def test_the_loss_falls(corpus, tmp_path):
    run_quietly(make_recipe(steps=30, save_every=10, learning_rate_factor=0.1), corpus, tmp_path / "run")
    losses = [figures["validation_loss"] for figures in log_of(tmp_path / "run")]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]


@pytest.fixture
def fresh_accelerator_state():
    """Another precision in one process needs Accelerate's state forgotten."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def test_bfloat16_trains_to_about_the_same_and_saves_float32(corpus, tmp_path, fresh_accelerator_state):
    run_quietly(make_recipe(dropout=0.0, mixed_precision="bf16", steps=5), corpus, tmp_path / "bf16")
    AcceleratorState._reset_state()
    run_quietly(make_recipe(dropout=0.0, steps=5), corpus, tmp_path / "float32")
    losses = [log_of(tmp_path / run)[-1]["validation_loss"] for run in ("bf16", "float32")]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.02)
    weights = load_file(checkpoints(tmp_path / "bf16")[-1] / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


# The seed and the checkpoints


def test_a_seed_gives_the_same_training_and_another_seed_another(corpus, finished, tmp_path):
    torch.manual_seed(99)
    assert_same_checkpoint(run_quietly(make_recipe(), corpus, tmp_path / "again"), checkpoints(finished)[-1])
    other = run_quietly(make_recipe(seed=1), corpus, tmp_path / "other")
    assert (other / "model.safetensors").read_bytes() != (checkpoints(finished)[-1] / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("killed_at", "workers", "accumulation"), [([3], 0, 1), ([8], 0, 1), ([6, 7, 10], 0, 1), ([8], 1, 1), ([8], 0, 2)]
)
def test_a_killed_training_goes_on_to_the_same_numbers(corpus, tmp_path, monkeypatch, killed_at, workers, accumulation):
    sampler = TokenBatchSampler(*pair_lengths(corpus.train), 27, accumulation=accumulation)
    steps = len(sampler.plan(0)) // accumulation
    assert 5 % steps and steps < 10  # cut inside an epoch, through to the next
    recipe = make_recipe(gradient_accumulation=accumulation)
    straight = run_quietly(recipe, corpus, tmp_path / "straight")
    for step in killed_at:
        interrupt_at(monkeypatch, step)
        with pytest.raises(KeyboardInterrupt):
            run_quietly(recipe, corpus, tmp_path / "killed", workers=workers)
    resumed = run_quietly(recipe, corpus, tmp_path / "killed", workers=workers)
    assert resumed.name == straight.name == "step-00000010"
    assert_same_checkpoint(resumed, straight)
    figures = [
        [
            {name: line[name] for name in ("step", "epoch", "training_loss", "validation_loss", "padding")}
            for line in log
        ]
        for log in (log_of(tmp_path / "killed"), log_of(tmp_path / "straight"))
    ]
    assert figures[0] == figures[1]


@pytest.mark.parametrize("every", [1, 2])
def test_a_training_killed_at_the_end_of_an_epoch_goes_on_with_the_next(corpus, tmp_path, monkeypatch, every):
    epoch = len(TokenBatchSampler(*pair_lengths(corpus.train), 27).plan(0))
    recipe = make_recipe(save_every=epoch // every, steps=epoch + 2)
    straight = run_quietly(recipe, corpus, tmp_path / "straight")
    interrupt_at(monkeypatch, epoch + 1)
    with pytest.raises(KeyboardInterrupt):
        run_quietly(recipe, corpus, tmp_path / "killed")
    assert_same_checkpoint(run_quietly(recipe, corpus, tmp_path / "killed"), straight)
    assert load_state(straight)["sampler"] == {"epoch": 1, "batches_done": 2}


def test_checkpoints_are_models_and_the_last_ones_are_kept(corpus, tmp_path):
    saved = run_quietly(make_recipe(steps=7, save_every=2, keep_last=2, keep_best=0), corpus, tmp_path / "run")
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000006", "step-00000007"]
    assert saved == checkpoints(tmp_path / "run")[-1]
    written = ["checkpoints", "curves.png", "log.jsonl", "recipe.json", "report.json"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.name != ".lock") == written
    model = VanillaTransformerForConditionalGeneration.from_pretrained(saved)
    assert model.config.src_lang == "en" and model.config.tgt_lang == "de"
    assert (model.generation_config.num_beams, model.generation_config.gnmt_alpha) == (4, 0.6)
    assert AutoTokenizer.from_pretrained(saved)("ab cd")["input_ids"] == corpus.tokenizer("ab cd")["input_ids"]


def test_the_log_has_a_line_an_evaluation(corpus, tmp_path):
    recipe = make_recipe(steps=7, save_every=3, validation_bleu_sentences=2)
    run_quietly(recipe, corpus, tmp_path / "run")
    log = log_of(tmp_path / "run")
    assert [figures["step"] for figures in log] == [3, 6, 7]
    for figures in log:
        assert figures["validation_perplexity"] == pytest.approx(np.exp(figures["validation_loss"]))
        assert 0 <= figures["validation_bleu"] <= 100 and 0 <= figures["padding"] < 1
        assert figures["target_tokens_per_second"] > 0


def test_without_a_validation_split_nothing_is_validated(tmp_path):
    run_quietly(make_recipe(steps=2), make_corpus(validation=False), tmp_path / "run")
    (figures,) = log_of(tmp_path / "run")
    assert figures["step"] == 2 and not [name for name in figures if name.startswith("validation")]


def test_the_validation_loss_is_the_cross_entropy_a_word_without_smoothing(corpus, finished):
    model = VanillaTransformerForConditionalGeneration.from_pretrained(checkpoints(finished)[-1]).eval()
    nats, words = 0.0, 0
    for row in corpus.validation:
        labels = torch.tensor(row["labels"])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels[None]).logits[0]
        nats, words = nats + F.cross_entropy(logits, labels, reduction="sum").item(), words + len(labels)
    assert log_of(finished)[-1]["validation_loss"] == pytest.approx(nats / words, rel=1e-5)


def test_tensorboard_gets_the_figures(corpus, tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_quietly(make_recipe(steps=4, save_every=2), corpus, tmp_path / "run", trackers=["tensorboard"])
    (events,) = (tmp_path / "run" / "tracking" / "run").glob("events.out.tfevents.*")
    reader = event_accumulator.EventAccumulator(str(events))
    reader.Reload()
    values = [(event.step, event.value) for event in reader.Scalars("validation_loss")]
    expected = [(figures["step"], figures["validation_loss"]) for figures in log_of(tmp_path / "run")]
    assert values == [(step, pytest.approx(value)) for step, value in expected] and len(values) == 2


# Refusing


@pytest.fixture
def begun(corpus, tmp_path, monkeypatch):
    """A run that was killed after its checkpoint of step 5."""
    interrupt_at(monkeypatch, 6)
    with pytest.raises(KeyboardInterrupt):
        run_quietly(make_recipe(), corpus, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_smoothing": 0.2}, "another recipe .label_smoothing was 0.1 and is now 0.2"),
        ({"steps": 20}, "another recipe .steps was 10 and is now 20"),
        ({"dropout": 0.3}, "another recipe .model was .*'dropout': 0.1.* and is now .*'dropout': 0.3"),
    ],
)
def test_a_training_by_another_recipe_is_refused(corpus, begun, changes, message):
    before = (begun / "recipe.json").read_text()
    with pytest.raises(ValueError, match=message):
        run_quietly(make_recipe(**changes), corpus, begun)
    assert (begun / "recipe.json").read_text() == before
    assert [path.name for path in checkpoints(begun)] == ["step-00000005"]


def test_a_training_on_another_corpus_is_refused(begun):
    with pytest.raises(ValueError, match="holds a training on another corpus or tokenizer"):
        run_quietly(make_recipe(), make_corpus(seed=1), begun)


def test_a_longer_training_goes_on_where_changes_are_accepted(corpus, begun, tmp_path):
    straight = run_quietly(make_recipe(steps=12), corpus, tmp_path / "straight")
    resumed = run_quietly(make_recipe(steps=12), corpus, begun, accept_changes=True)
    assert (resumed / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="a finished training of 12 steps"):
        run_quietly(make_recipe(steps=12, seed=3), corpus, begun, accept_changes=True)
    run_quietly(make_recipe(steps=13), corpus, begun, accept_changes=True)
    assert json.loads((begun / "report.json").read_text())["steps"] == 13
    assert json.loads((begun / "recipe.json").read_text())["recipe"]["steps"] == 13


def test_on_another_corpus_an_accepted_training_begins_with_the_next_epoch_and_no_best(corpus, begun):
    other = Corpus(corpus.tokenizer, corpus.train.select(range(30)), None, "other")
    run_quietly(make_recipe(steps=6), other, begun, accept_changes=True)
    state = load_state(checkpoints(begun)[-1])
    assert state["sampler"] == {"epoch": 1, "batches_done": 1}
    assert state["best"]["value"] is None


@pytest.mark.parametrize(
    "changes", [{"dropout": 0.5}, {"adam_betas": [0.1, 0.2]}, {"adam_epsilon": 0.5}, {"label_smoothing": 0.5}]
)
def test_an_accepted_change_has_its_effect(corpus, begun, finished, changes):
    resumed = run_quietly(make_recipe(**changes), corpus, begun, accept_changes=True)
    unchanged = checkpoints(finished)[-1]
    assert (resumed / "model.safetensors").read_bytes() != (unchanged / "model.safetensors").read_bytes()


def test_a_best_by_another_measure_is_forgotten(corpus, begun):
    recipe = make_recipe(best_by="validation_bleu", steps=6)
    run_quietly(recipe, corpus, begun, accept_changes=True)
    report = json.loads((begun / "report.json").read_text())
    assert report["best_step"] == 6 and report["best_value"] == log_of(begun)[-1]["validation_bleu"]


def test_a_checkpoint_does_not_go_on_as_another_model(corpus, begun):
    with pytest.raises(ValueError, match="a model with encoder_layers=1 and cannot go on with 2"):
        recipe = make_recipe()
        recipe.model["encoder_layers"] = 2
        run_quietly(recipe, corpus, begun, accept_changes=True)
    with pytest.raises(ValueError, match="has another vocabulary than the corpus"):
        tokenizer = train_tokenizer(["xy zw"] * 9, vocab_size=270)
        other = Corpus(tokenizer, corpus.train, corpus.validation, "other")
        run_quietly(make_recipe(), other, begun, accept_changes=True)


def content_of(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize("how", ["restart", "accept_changes"])
@pytest.mark.parametrize(
    "changes", [{"batch_tokens": 5}, {"gradient_accumulation": 99}, {"mixed_precision": "fp16"}], ids=str
)
def test_what_is_refused_leaves_the_folder_as_it_was(corpus, begun, how, changes, fresh_accelerator_state):
    before = content_of(begun)
    with pytest.raises(ValueError):
        run_quietly(make_recipe(**changes), corpus, begun, **{how: True})
    assert content_of(begun) == before


def test_trackers_that_are_not_there_are_refused(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("accelerate.tracking.is_wandb_available", lambda: False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="trackers .'wandb'. are not installed"):
        run_quietly(make_recipe(), corpus, tmp_path / "run", trackers=["tensorboard", "wandb"])
    assert not (tmp_path / "run").exists()


def test_a_corpus_beyond_the_learned_positions_is_refused_at_the_start(corpus, tmp_path):
    recipe = make_recipe()
    recipe.model |= {"position_encoding": "learned", "max_position_embeddings": 6}
    longest = max(int(side.max()) for side in pair_lengths(corpus.train))
    with pytest.raises(ValueError, match=f"a sentence of {longest} tokens and the model max_position_embeddings=6"):
        run_quietly(recipe, corpus, tmp_path)


def test_a_restart_forgets_what_was_there(corpus, begun):
    run_quietly(make_recipe(steps=3, seed=4), corpus, begun, restart=True)
    assert [figures["step"] for figures in log_of(begun)] == [3]
    assert [path.name for path in checkpoints(begun)] == ["step-00000003"]
    run_quietly(make_recipe(steps=2, seed=4), corpus, begun, restart=True)  # finished, this time
    assert [path.name for path in checkpoints(begun)] == ["step-00000002"]


def test_a_finished_training_is_refused_and_left_as_it_is(corpus, finished):
    before = sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("[!.]*"))
    with pytest.raises(FileExistsError, match="holds a finished training of 10 steps"):
        run_quietly(make_recipe(), corpus, finished)
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("[!.]*")) == before


def test_a_loss_that_is_not_finite_stops_with_the_step_named(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "learning_rate", lambda step, *_: float("inf") if step >= 3 else 1e-3)
    with pytest.raises(FloatingPointError, match="the loss of step 4 is (nan|inf); .*last good checkpoint is .*00002$"):
        run_quietly(make_recipe(save_every=2), corpus, tmp_path / "run")
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000002"]
    weights = load_file(checkpoints(tmp_path / "run")[-1] / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_loss_that_is_not_finite_before_any_checkpoint_says_so(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "learning_rate", lambda *_: float("inf"))
    with pytest.raises(FloatingPointError, match="the loss of step 2 is .* none yet"):
        run_quietly(make_recipe(), corpus, tmp_path / "run")


def test_the_pairs_of_a_batch_that_is_not_finite_are_named(corpus, tmp_path, monkeypatch):
    true = training.label_smoothed_loss

    def poisoned(hidden_states, weight, labels, label_smoothing=0.0):
        total, tokens = true(hidden_states, weight, labels, label_smoothing)
        return total * (float("nan") if len(labels) == 6 else 1), tokens

    monkeypatch.setattr(training, "label_smoothed_loss", poisoned)
    recipe = make_recipe(gradient_accumulation=2)
    plan = TokenBatchSampler(*pair_lengths(corpus.train), 27).plan(0)
    at = next(i for i, batch in enumerate(plan) if len(batch) == 6)
    pairs = plan[at].tolist()
    first = ", ".join(map(str, pairs[:5]))
    with pytest.raises(FloatingPointError, match=f"step {at // 2 + 1} is nan; its sentences are the pairs {first}, …"):
        run_quietly(recipe, corpus, tmp_path)
    assert json.loads((tmp_path / "not_finite.json").read_text()) == {"step": at // 2 + 1, "pairs": pairs}


def test_a_gradient_that_is_not_finite_stops_before_it_reaches_the_weights(corpus, tmp_path, monkeypatch):
    true = training.get_total_norm
    norms = iter([1.0, 1.0, float("inf")])
    monkeypatch.setattr(training, "get_total_norm", lambda gradients: true(gradients) * next(norms))
    with pytest.raises(FloatingPointError, match="the gradient of step 3 has the norm inf; .*good checkpoint is .*02$"):
        run_quietly(make_recipe(save_every=2), corpus, tmp_path)


class AcceleratorWithScaler(Accelerator):
    """A CPU has no float16 training: its scaler alone."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)

    def unscale_gradients(self, optimizer=None):
        for prepared in self._optimizers:
            self.scaler.unscale_(prepared.optimizer)


def test_steps_that_a_scaler_skips_are_counted_and_its_scale_is_gone_on_with(corpus, tmp_path, monkeypatch):
    true, batches = training.label_smoothed_loss, []

    def overflowing(hidden_states, *arguments):
        total, tokens = true(hidden_states, *arguments)
        if torch.is_grad_enabled():
            batches.append(tokens)
            if len(batches) in (1, 4):
                total = total + (hidden_states - hidden_states.detach()).sqrt().sum()  # 0, and its slope infinite
        return total, tokens

    monkeypatch.setattr(training, "label_smoothed_loss", overflowing)
    monkeypatch.setattr(training, "Accelerator", AcceleratorWithScaler)
    recipe = make_recipe(log_every=1)
    straight = run_quietly(recipe, corpus, tmp_path / "straight")
    assert [line["skipped_steps"] for line in log_of(tmp_path / "straight")] == [1, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    assert json.loads((tmp_path / "straight" / "report.json").read_text())["skipped_steps"] == 2
    assert load_state(straight)["scaler"]["scale"] == 2.0**16  # halved twice, doubled after steps 7 and 10
    batches.clear()
    interrupt_at(monkeypatch, 8)
    with pytest.raises(KeyboardInterrupt):
        run_quietly(recipe, corpus, tmp_path / "killed")
    assert_same_checkpoint(run_quietly(recipe, corpus, tmp_path / "killed"), straight)


# Best, last, and no further


def set_validation_losses(monkeypatch, losses):
    losses = iter(losses)
    monkeypatch.setattr(training.Training, "_validation_loss", lambda self: (next(losses), 1.0))


def test_the_best_checkpoints_are_kept_beside_the_last(corpus, tmp_path, monkeypatch):
    set_validation_losses(monkeypatch, [3.0, 1.0, 2.0, 4.0, 5.0, 6.0])
    recipe = make_recipe(steps=6, save_every=1, keep_last=1, keep_best=2, validation_bleu_sentences=0)
    run_quietly(recipe, corpus, tmp_path)
    assert [step_of(path) for path in checkpoints(tmp_path)] == [2, 3, 6]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["best_by"], report["best_value"], report["best_step"]) == ("validation_loss", 1.0, 2)
    assert best_checkpoints(tmp_path, 1) == checkpoints(tmp_path)[:1]


def test_training_stops_when_patience_is_over_also_across_a_kill(corpus, tmp_path, monkeypatch):
    recipe = make_recipe(steps=90, save_every=1, patience=3, validation_bleu_sentences=0)
    set_validation_losses(monkeypatch, [3.0, 1.0, 2.0])
    interrupt_at(monkeypatch, 4)
    with pytest.raises(KeyboardInterrupt):
        run_quietly(recipe, corpus, tmp_path)
    set_validation_losses(monkeypatch, [2.0, 2.0, 2.0, 0.5])
    assert step_of(run_quietly(recipe, corpus, tmp_path)) == 5
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["stopped_early"] and report["steps"] == 5 and report["best_step"] == 2
    with pytest.raises(FileExistsError, match="holds a finished training of 5 steps"):
        run_quietly(recipe, corpus, tmp_path)


def test_patience_without_a_validation_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match="patience=3 needs a validation split"):
        run_quietly(make_recipe(patience=3), make_corpus(validation=False), tmp_path)


def test_the_best_by_bleu_is_the_one_with_the_highest(corpus, tmp_path, monkeypatch):
    bleus = iter([2.0, 7.0, 7.0, 3.0])
    monkeypatch.setattr(training, "score", lambda *_: SimpleNamespace(bleu=next(bleus)))
    recipe = make_recipe(steps=4, save_every=1, keep_last=1, best_by="validation_bleu")
    run_quietly(recipe, corpus, tmp_path)
    assert [step_of(path) for path in checkpoints(tmp_path)] == [2, 4]
    assert json.loads((tmp_path / "report.json").read_text())["best_value"] == 7.0


def test_a_training_killed_before_its_report_writes_it_when_started_again(corpus, tmp_path, monkeypatch):
    true = journal.write_report
    monkeypatch.setattr(journal, "write_report", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_quietly(make_recipe(), corpus, tmp_path)
    monkeypatch.setattr(journal, "write_report", true)
    saved = run_quietly(make_recipe(), corpus, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"] == 10 and not report["stopped_early"] and report["checkpoints"][-1] == str(saved)
    tokens = [row["labels"] for row in corpus.train]
    assert report["target_tokens"] > sum(map(len, tokens)) and report["training_seconds"] > 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_padding_is_the_share_of_places_without_a_token_on_both_sides(corpus, tmp_path):
    run_quietly(make_recipe(steps=1, gradient_accumulation=3), corpus, tmp_path)
    source, target = pair_lengths(corpus.train)
    plan = TokenBatchSampler(source, target, 27).plan(0)[:3]
    tokens = sum(source[batch].sum() + target[batch].sum() for batch in plan)
    places = sum(len(batch) * (source[batch].max() + target[batch].max()) for batch in plan)
    assert log_of(tmp_path)[0]["padding"] == pytest.approx(1 - tokens / places, abs=1e-12)


def test_the_gradient_norm_is_that_of_all_gradients_together(corpus, tmp_path):
    recipe = make_recipe(dropout=0.0, steps=1, label_smoothing=0.0)
    run_quietly(recipe, corpus, tmp_path)
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(recipe.model_config(vocab_size=len(corpus.tokenizer)))
    batch = TokenBatchSampler(*pair_lengths(corpus.train), 27).plan(0)[0]
    model(**Collator(270, 0)(PairDataset(corpus.train).__getitems__(batch.tolist()))).loss.backward()
    norm = sum(parameter.grad.square().sum() for parameter in model.parameters()).sqrt()
    assert log_of(tmp_path)[0]["gradient_norm"] == pytest.approx(norm.item(), rel=1e-5)


# What a GPU needs


def test_activation_checkpointing_changes_no_number(corpus, tmp_path, monkeypatch):
    passes = []
    true = VanillaTransformerFeedForward.forward
    monkeypatch.setattr(VanillaTransformerFeedForward, "forward", lambda *a: (passes.append(1), true(*a))[1])
    plain = run_quietly(make_recipe(steps=5), make_corpus(validation=False), tmp_path / "plain")
    assert len(passes) == 5 * 2
    recipe = make_recipe(steps=5, activation_checkpointing=True)
    saved = run_quietly(recipe, make_corpus(validation=False), tmp_path / "again")
    assert len(passes) == 5 * 2 + 5 * 4
    assert (saved / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_compiled_training_gives_the_same_weights_to_rounding(corpus, tmp_path):
    settings = {"dropout": 0.0, "steps": 4, **WELL_CONDITIONED}
    plain = load_file(run_quietly(make_recipe(**settings), corpus, tmp_path / "plain") / "model.safetensors")
    compiled = run_quietly(make_recipe(compile=True, **settings), corpus, tmp_path / "compiled")
    torch.testing.assert_close(load_file(compiled / "model.safetensors"), plain, rtol=0, atol=1e-5)


# Several processes


# One global batch of 12 pairs: by process, by micro-batch. The last has one of padding alone.
SPLITS = {
    "2 x 1": [[[*range(5)]], [[*range(5, 12)]]],
    "2 x 2": [[[0], [2, 1, 3]], [[*range(6, 12)], [4, 5]]],
    "2 x 2, one empty": [[[*range(7)], [*range(7, 11)]], [[11], []]],
}


def gradients_of(split, module, accelerator, corpus, label_smoothing):
    """The gradient that this process has of a split, by name."""
    collate, gather = Collator(270, 0), PairDataset(corpus.train).__getitems__
    own = [collate(gather(pairs or [0])) for pairs in split[accelerator.process_index]]
    for batch, pairs in zip(own, split[accelerator.process_index], strict=True):
        if not pairs:
            batch["labels"].fill_(-100)
    _, target = pair_lengths(corpus.train)
    tokens = sum(int(target[pairs].sum()) for micro_batches in split for pairs in micro_batches if pairs)
    module.zero_grad()
    accumulate_gradients(accelerator, module, own, tokens, label_smoothing)
    return {name: parameter.grad.clone() for name, parameter in accelerator.unwrap_model(module).named_parameters()}


def fresh_module(accelerator):
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(make_recipe(dropout=0.0).model_config(vocab_size=270))
    return accelerator.prepare(SummedLoss(model))


def main_of_splits(folder):
    """What `torchrun` runs in each of two processes: the gradient of every split."""
    accelerator, corpus = Accelerator(cpu=True), make_corpus()
    module = fresh_module(accelerator)
    for name, split in SPLITS.items():
        for label_smoothing in (0.0, 0.1):
            gradients = gradients_of(split, module, accelerator, corpus, label_smoothing)
            if accelerator.is_main_process:
                save_file(gradients, folder / f"{name}, {label_smoothing}.safetensors")
    accelerator.wait_for_everyone()


@pytest.mark.slow
def test_two_processes_and_any_micro_batches_give_the_gradient_of_one_batch(corpus, tmp_path):
    torchrun("main_of_splits", tmp_path)
    accelerator = Accelerator()
    module = fresh_module(accelerator)
    for label_smoothing in (0.0, 0.1):
        whole = gradients_of([[[*range(12)]]], module, accelerator, corpus, label_smoothing)
        four = gradients_of([[[3], [*range(4, 12)], [], [0, 2, 1]]], module, accelerator, corpus, label_smoothing)
        splits = {name: load_file(tmp_path / f"{name}, {label_smoothing}.safetensors") for name in SPLITS}
        for name, gradients in {"1 x 4": four, **splits}.items():
            for parameter, gradient in gradients.items():
                difference = (gradient - whole[parameter]).norm()
                assert difference <= 1e-5 * whole[parameter].norm(), (name, label_smoothing, parameter)


def torchrun(call, folder):
    """Run a function of this module in two processes, and see them end well."""
    (folder / "main.py").write_text(
        f"import pathlib, test_training; test_training.{call}(pathlib.Path({str(folder)!r}))"
    )
    paths = [str(Path(vanilla_transformer.__file__).parents[1]), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", folder / "main.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def main_of_several_processes(folder):
    """What `torchrun` runs in each of two processes: a straight training, a killed one, and one without dropout."""
    corpus, monkeypatch = make_corpus(), pytest.MonkeyPatch()
    monkeypatch.setattr(Accelerator, "end_training", lambda self: None)  # it would end the process group for good
    run_quietly(make_recipe(), corpus, folder / "straight")
    interrupt_at(monkeypatch, 8)
    with pytest.raises(KeyboardInterrupt):
        run_quietly(make_recipe(), corpus, folder / "killed")
    run_quietly(make_recipe(), corpus, folder / "killed")
    run_quietly(make_recipe(dropout=0.0, max_gradient_norm=0.5, **WELL_CONDITIONED), corpus, folder / "two")


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_resume_to_the_same_numbers(corpus, tmp_path):
    torchrun("main_of_several_processes", tmp_path)
    assert_same_checkpoint(checkpoints(tmp_path / "killed")[-1], checkpoints(tmp_path / "straight")[-1])

    recipe = make_recipe(dropout=0.0, max_gradient_norm=0.5, gradient_accumulation=2, **WELL_CONDITIONED)
    one = load_file(run_quietly(recipe, corpus, tmp_path / "one") / "model.safetensors")
    two = load_file(checkpoints(tmp_path / "two")[-1] / "model.safetensors")
    torch.testing.assert_close(two, one, rtol=0, atol=1e-5)
    logs = log_of(tmp_path / "one"), log_of(tmp_path / "two")
    for name in ("step", "training_loss", "validation_loss"):
        assert [line[name] for line in logs[0]] == pytest.approx([line[name] for line in logs[1]], rel=1e-5)


@pytest.mark.parametrize("content", ["{not json", "[]", '{"flour": 500}'])
def test_a_recipe_of_somebody_elses_is_not_overwritten(corpus, tmp_path, content):
    (tmp_path / "recipe.json").write_text(content, encoding="utf-8")
    for restart in (False, True):
        with pytest.raises(ValueError, match="is no record of a training"):
            run_quietly(make_recipe(), corpus, tmp_path, restart=restart)
    assert (tmp_path / "recipe.json").read_text(encoding="utf-8") == content


def test_a_restart_leaves_what_no_training_wrote(corpus, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "checkpoints" / "of-mine").mkdir(parents=True)
    run_quietly(make_recipe(steps=2), corpus, tmp_path)
    run_quietly(make_recipe(steps=1), corpus, tmp_path, restart=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine" and (tmp_path / "checkpoints" / "of-mine").exists()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001"]


def test_checkpoints_without_a_record_are_not_gone_on_from(corpus, tmp_path):
    run_quietly(make_recipe(steps=2), corpus, tmp_path)
    (tmp_path / "recipe.json").unlink()
    with pytest.raises(ValueError, match="holds checkpoints but no recipe.json"):
        run_quietly(make_recipe(), corpus, tmp_path)


def test_another_number_of_processes_is_refused(corpus, tmp_path, monkeypatch):
    interrupt_at(monkeypatch, 8)
    with pytest.raises(KeyboardInterrupt):
        run_quietly(make_recipe(), corpus, tmp_path)
    newest = checkpoints(tmp_path)[-1]
    state = load_state(newest)
    torch.save({**state, "identity": {**state["identity"], "processes": 2}}, newest / "state" / "state.pt")
    with pytest.raises(ValueError, match="a training by 2 processes, and this one has 1: launch as many again"):
        run_quietly(make_recipe(), corpus, tmp_path)
