"""Training: equal to a plain loop, however a batch is split, and resumed to the same numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoTokenizer

import vanilla_transformer
from vanilla_transformer import VanillaTransformerForConditionalGeneration, training
from vanilla_transformer.checkpoint import checkpoints, load_state
from vanilla_transformer.data import Collator, PairDataset, TokenBatchSampler, pair_lengths, tokenize
from vanilla_transformer.prepare import Corpus
from vanilla_transformer.recipe import Recipe
from vanilla_transformer.tokenizer import train_tokenizer
from vanilla_transformer.training import SummedLoss, train


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


def run_quietly(recipe, corpus, run, **arguments):
    return train(recipe, corpus, run, show_progress=False, **arguments)


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
        loss = training._accumulate_gradients(accelerator, module, batches, words, label_smoothing)
        return loss, {name: parameter.grad for name, parameter in model.named_parameters()}

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
    assert training._accumulate_gradients(Accelerator(), SummedLoss(model), [batch], 0, 0.1) == 0
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
    saved = run_quietly(make_recipe(steps=7, save_every=2, keep_last=2), corpus, tmp_path / "run")
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000006", "step-00000007"]
    assert saved == checkpoints(tmp_path / "run")[-1]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints", "log.jsonl", "recipe.json"]
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
        assert figures["words_per_second"] > 0


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
    (events,) = (tmp_path / "run").rglob("events.out.tfevents.*")
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


def test_a_restart_forgets_what_was_there(corpus, begun):
    run_quietly(make_recipe(steps=3, seed=4), corpus, begun, restart=True)
    assert [figures["step"] for figures in log_of(begun)] == [3]
    assert [path.name for path in checkpoints(begun)] == ["step-00000003"]
    run_quietly(make_recipe(steps=2, seed=4), corpus, begun, restart=True)  # finished, this time
    assert [path.name for path in checkpoints(begun)] == ["step-00000002"]


def test_a_finished_training_is_refused_and_left_as_it_is(corpus, finished):
    before = sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*"))
    with pytest.raises(FileExistsError, match="holds a finished training of 10 steps"):
        run_quietly(make_recipe(), corpus, finished)
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*")) == before


def test_a_loss_that_is_not_finite_stops_with_the_step_named(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "learning_rate", lambda step, *_: float("inf") if step >= 3 else 1e-3)
    with pytest.raises(FloatingPointError, match="the loss of step 4 is (nan|inf): .*last good checkpoint is .*00002$"):
        run_quietly(make_recipe(save_every=2), corpus, tmp_path / "run")
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000002"]
    weights = load_file(checkpoints(tmp_path / "run")[-1] / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_loss_that_is_not_finite_before_any_checkpoint_says_so(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "learning_rate", lambda *_: float("inf"))
    with pytest.raises(FloatingPointError, match="the loss of step 2 is .* none yet"):
        run_quietly(make_recipe(), corpus, tmp_path / "run")


# Several processes


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
    code = (
        f"import sys, pathlib, test_training; test_training.main_of_several_processes(pathlib.Path({str(tmp_path)!r}))"
    )
    (tmp_path / "main.py").write_text(code)
    paths = [str(Path(vanilla_transformer.__file__).parents[1]), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", tmp_path / "main.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
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
    with pytest.raises(ValueError, match="is no record of a training"):
        run_quietly(make_recipe(), corpus, tmp_path)
    assert (tmp_path / "recipe.json").read_text(encoding="utf-8") == content


def test_a_restart_leaves_what_no_training_wrote(corpus, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    run_quietly(make_recipe(steps=2), corpus, tmp_path)
    run_quietly(make_recipe(steps=1), corpus, tmp_path, restart=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
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
    torch.save({**state, "random": state["random"] * 2}, newest / "state" / "state.pt")
    with pytest.raises(ValueError, match="trained by 2 processes and cannot go on with 1"):
        run_quietly(make_recipe(), corpus, tmp_path)
