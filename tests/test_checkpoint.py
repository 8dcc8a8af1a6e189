"""Checkpoints are whole or absent, the right ones are kept, and their average is the mean."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.checkpoint import (
    average,
    checkpoints,
    choose,
    load_state,
    save_checkpoint,
    step_of,
    write_folder,
    write_text,
)


def names(folder):
    """Everything under a folder, hidden files as well."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def weights(folder, words=("a", "b"), **tensors):
    """A checkpoint by hand: weights, and a tokenizer of these words."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    return folder


# Writing


def test_a_folder_is_not_seen_before_it_is_whole(tmp_path):
    def write(aside):
        (aside / "file").write_text("x")
        assert not (tmp_path / "new").exists()

    write_folder(tmp_path / "new", write)
    assert names(tmp_path) == ["new", "new/file"]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("interruption", [ValueError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_the_old_folder_and_nothing_else(tmp_path, existing, interruption):
    if existing:
        write_folder(tmp_path / "run", lambda aside: (aside / "old").write_text("old"))

    def write(aside):
        (aside / "new").write_text("half")
        raise interruption

    before = names(tmp_path)
    with pytest.raises(interruption):
        write_folder(tmp_path / "run", write, overwrite=True)
    assert names(tmp_path) == before == ["run", "run/old"] * existing
    write_folder(tmp_path / "run", lambda aside: (aside / "new").write_text("whole"), overwrite=True)
    assert names(tmp_path) == ["run", "run/new"]


@pytest.mark.parametrize("failing", [1, 2])
def test_an_interrupted_replacement_leaves_the_old_folder(tmp_path, monkeypatch, failing):
    write_folder(tmp_path / "run", lambda aside: (aside / "old").write_text("old"))
    renames, rename = [], Path.rename

    def interrupted(self, target):
        renames.append(target)
        if len(renames) == failing:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "run", lambda aside: (aside / "new").write_text("new"), overwrite=True)
    assert names(tmp_path) == ["run", "run/old"]


def test_what_a_killed_process_left_behind_does_not_get_into_the_next_folder(tmp_path):
    for stale in (".run.tmp", ".run.old"):
        (tmp_path / stale).mkdir()
        (tmp_path / stale / "stale").write_text("x")
    (tmp_path / "run").mkdir()
    write_folder(tmp_path / "run", lambda aside: (aside / "new").write_text("x"), overwrite=True)
    assert names(tmp_path) == ["run", "run/new"]


def test_an_existing_folder_is_refused_unless_asked(tmp_path):
    write_folder(tmp_path / "run", lambda aside: (aside / "old").write_text("x"))
    with pytest.raises(FileExistsError, match="run exists already: choose another name"):
        write_folder(tmp_path / "run", lambda aside: (aside / "new").write_text("x"))
    assert names(tmp_path) == ["run", "run/old"]


# Keeping


def save(run, at, keep_last=2, **state):
    return save_checkpoint(run, at, lambda folder: save_file({}, folder / "model.safetensors"), state, {}, keep_last)


def test_the_last_checkpoints_are_kept_and_only_the_newest_can_be_resumed_from(tmp_path):
    for step in (5, 10, 100_000_000, 15):
        saved = save(tmp_path, step, keep_last=3, step=step)
        assert load_state(saved) == {"step": step}
        assert step_of(saved) == step
    assert [step_of(path) for path in checkpoints(tmp_path)] == [10, 15, 100_000_000]
    assert [path for path in checkpoints(tmp_path) if (path / "state").exists()] == [saved]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3
    with pytest.raises(FileNotFoundError, match="step-00000010 holds a model but no state/state.pt"):
        load_state(checkpoints(tmp_path)[0])


def test_one_checkpoint_can_be_kept(tmp_path):
    save(tmp_path, 1, keep_last=1)
    saved = save(tmp_path, 2, keep_last=1)
    assert checkpoints(tmp_path) == [saved]


def test_an_interrupted_checkpoint_leaves_those_before_it(tmp_path):
    saved = save(tmp_path, 1, keep_last=1, step=1)

    def fail(folder):
        save_file({}, folder / "model.safetensors")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, fail, {}, {}, keep_last=1)
    assert checkpoints(tmp_path) == [saved]
    assert load_state(saved) == {"step": 1}


def test_folders_that_are_no_complete_checkpoints_are_passed_over(tmp_path):
    assert checkpoints(tmp_path) == []
    saved = save(tmp_path, 7)
    (tmp_path / "checkpoints" / "step-00000008").mkdir()
    weights(tmp_path / "checkpoints" / ".step-00000009.tmp", a=torch.ones(1))
    weights(tmp_path / "checkpoints" / "step-00000007-copy", a=torch.ones(1))
    weights(tmp_path / "checkpoints" / "best", a=torch.ones(1))
    assert checkpoints(tmp_path) == [saved]


def test_a_state_comes_back_as_it_was(tmp_path):
    state = {"step": 3, "random": [torch.get_rng_state()], "optimizer": {"state": {0: {"exp_avg": torch.randn(2, 3)}}}}
    loaded = load_state(save(tmp_path, 3, **state))
    assert loaded["step"] == 3
    assert torch.equal(loaded["random"][0], state["random"][0])
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])


class Planted:
    """Unpickles into a call."""

    def __reduce__(self):
        return print, ("unpickled",)


def test_a_state_that_would_run_code_is_refused(tmp_path, capsys):
    saved = save(tmp_path, 3)
    torch.save({"step": Planted()}, saved / "state" / "state.pt")
    with pytest.raises(Exception, match="(?i)weights.only"):
        load_state(saved)
    assert "unpickled" not in capsys.readouterr().out


# Averaging


def test_the_average_is_the_mean_by_hand(tmp_path):
    folders = [
        weights(tmp_path / "1", a=torch.tensor([1.0, 2.0]), b=torch.tensor([[1.5]])),
        weights(tmp_path / "2", a=torch.tensor([2.0, 4.0]), b=torch.tensor([[0.0]])),
        weights(tmp_path / "3", a=torch.tensor([6.0, 0.0]), b=torch.tensor([[0.0]])),
    ]
    (folders[2] / "config.json").write_text("the last")
    (folders[2] / "state").mkdir()
    (folders[2] / "state" / "state.pt").write_text("x")
    output = average(iter(folders), tmp_path / "mean")
    assert output == tmp_path / "mean"
    assert names(output) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (output / "config.json").read_text() == "the last"
    mean = load_file(output / "model.safetensors")
    assert mean["a"].tolist() == [3.0, 2.0] and mean["b"].tolist() == [[0.5]]
    with safe_open(output / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_mean_is_not_rounded_on_the_way(tmp_path):
    values = [256.0, 1.0, 1.0, 2.0]  # in bfloat16, 256 + 1 is 256
    folders = [weights(tmp_path / str(i), a=torch.tensor([v]).bfloat16()) for i, v in enumerate(values)]
    mean = load_file(average(folders, tmp_path / "mean") / "model.safetensors")["a"]
    assert mean.dtype == torch.bfloat16 and mean.tolist() == [65.0]


def test_the_average_of_models_loads_with_its_ties(tmp_path):
    config = VanillaTransformerConfig(vocab_size=20, d_model=8, d_ff=8, num_heads=2, encoder_layers=1, decoder_layers=1)
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(VanillaTransformerForConditionalGeneration(config))
        models[-1].save_pretrained(tmp_path / str(seed))
    average([tmp_path / str(seed) for seed in range(3)], tmp_path / "mean")
    assert (
        load_file(tmp_path / "mean" / "model.safetensors").keys() == load_file(tmp_path / "0/model.safetensors").keys()
    )
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "mean")
    encoder, decoder = loaded.get_encoder(), loaded.get_decoder()
    assert encoder.embed_tokens.weight is decoder.embed_tokens.weight is loaded.lm_head.weight
    for (name, mean), *others in zip(loaded.named_parameters(), *(m.named_parameters() for m in models), strict=True):
        torch.testing.assert_close(mean, sum(other for _, other in others) / 3, msg=name)
    assert not torch.equal(loaded.lm_head.weight, models[2].lm_head.weight)


def test_an_existing_average_is_refused_unless_asked(tmp_path):
    folder = weights(tmp_path / "1", a=torch.tensor([1.0]))
    weights(tmp_path / "mean", a=torch.tensor([7.0]))
    with pytest.raises(FileExistsError, match="mean exists already"):
        average([folder], tmp_path / "mean")
    assert load_file(tmp_path / "mean" / "model.safetensors")["a"].item() == 7
    average([folder], tmp_path / "mean", overwrite=True)
    assert load_file(tmp_path / "mean" / "model.safetensors")["a"].item() == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": torch.ones(3)}, r"differ in a: shape \[3\] and \[2\]"),
        ({"a": torch.ones(2), "b": torch.ones(1)}, r"differ in b: shape \[1\] and None"),
        ({"c": torch.ones(2)}, r"differ in a: shape None and \[2\]"),
        ({"a": torch.ones(2), "words": ("a", "c")}, "1 has another vocabulary than .*2"),
    ],
)
def test_checkpoints_that_do_not_match_are_refused(tmp_path, other, message):
    folders = [weights(tmp_path / "1", **other), weights(tmp_path / "2", a=torch.ones(2))]
    before = names(tmp_path)
    with pytest.raises(ValueError, match=message):
        average(folders, tmp_path / "mean")
    assert names(tmp_path) == before


def test_a_folder_without_weights_is_refused_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty holds no model.safetensors"):
        average([weights(tmp_path / "1", a=torch.ones(2)), tmp_path / "empty"], tmp_path / "mean")


def test_an_average_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no checkpoints to average"):
        average([], tmp_path / "mean")


def test_a_folder_that_is_none_of_ours_is_not_overwritten_even_when_asked(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("mine")
    with pytest.raises(FileExistsError, match="holds no corpus.json"):
        write_folder(tmp_path / "thesis", lambda aside: None, overwrite=True, mark="corpus.json")
    assert (tmp_path / "thesis" / "text").read_text() == "mine"


def test_what_a_kill_between_two_renames_left_is_put_back(tmp_path):
    (tmp_path / ".run.old").mkdir()
    (tmp_path / ".run.old" / "old").write_text("x")
    with pytest.raises(FileExistsError):
        write_folder(tmp_path / "run", lambda aside: None)
    assert names(tmp_path) == ["run", "run/old"]


# Choosing


def save_measured(run, at, **figures):
    def write(folder):
        save_file({"a": torch.ones(1)}, folder / "model.safetensors")

    return save_checkpoint(run, at, write, {}, figures, keep_last=9)


@pytest.fixture
def measured(tmp_path):
    """A run of four checkpoints with a loss and a BLEU, and a fifth that was not evaluated."""
    for step, (loss, bleu) in enumerate([(4.0, 1.0), (2.0, 9.0), (3.0, 9.0), (2.0, 5.0)], start=1):
        save_measured(tmp_path / "run", step, validation_loss=loss, validation_bleu=bleu)
    save_measured(tmp_path / "run", 5)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("choice", "steps"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"last": 2}, [4, 5]),
        ({"best": 1}, [2]),
        ({"best": 2}, [2, 4]),
        ({"best": 3}, [2, 3, 4]),
        ({"best": 1, "best_by": "validation_bleu"}, [2]),
        ({"best": 3, "best_by": "validation_bleu"}, [2, 3, 4]),
    ],
)
def test_checkpoints_are_chosen_from_a_run_by_age_or_by_a_figure(measured, choice, steps):
    assert [step_of(folder) for folder in choose([measured], **choice)] == steps


def test_unless_told_as_many_of_the_last_are_chosen_as_the_recipe_keeps(measured):
    (measured / "recipe.json").write_text('{"recipe": {"keep_last": 3}}')
    assert [step_of(folder) for folder in choose([measured])] == [3, 4, 5]
    assert [step_of(folder) for folder in choose([measured], last=4)] == [2, 3, 4, 5]


def test_folders_of_their_own_are_taken_as_they_are(measured, tmp_path):
    folders = [checkpoints(measured)[3], checkpoints(measured)[0]]
    assert choose(folders) == folders
    assert choose(folders[:1]) == folders[:1]


@pytest.mark.parametrize(
    ("choice", "message"),
    [({"last": 6}, "has kept 5 such checkpoints, and 6 were asked for"), ({"best": 5}, "has kept 4 .* and 5 were")],
)
def test_fewer_checkpoints_than_asked_for_are_refused(measured, choice, message):
    with pytest.raises(ValueError, match=message):
        choose([measured], **choice)
    with pytest.raises(ValueError, match="holds no checkpoints to choose from"):
        choose([checkpoints(measured)[0]], **choice)


def test_what_a_checkpoint_measured_does_not_get_into_the_average(measured, tmp_path):
    average(choose([measured]), tmp_path / "mean")
    assert names(tmp_path / "mean") == ["model.safetensors"]


def test_a_checkpoint_is_out_of_sight_before_it_is_removed(tmp_path, monkeypatch):
    """A kill in the middle of the removal leaves no half of a checkpoint, and the next save cleans up."""
    save(tmp_path, 1, keep_last=1)
    true = shutil.rmtree

    def killed(folder, **arguments):
        if "00000001" in str(folder):
            raise KeyboardInterrupt
        true(folder, **arguments)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, keep_last=1)
    assert [step_of(path) for path in checkpoints(tmp_path)] == [2]
    monkeypatch.setattr(shutil, "rmtree", true)
    (tmp_path / "checkpoints" / ".step-00000009.tmp").mkdir()
    save(tmp_path, 3, keep_last=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("damage", [lambda data: data[:50], lambda data: b"garbage", lambda data: b""])
def test_a_damaged_state_is_named(tmp_path, damage):
    path = save(tmp_path, 1, step=1) / "state" / "state.pt"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="step-00000001/state/state.pt is damaged"):
        load_state(checkpoints(tmp_path)[0])


def test_a_text_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    write_text(tmp_path / "a.json", "old")

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "old"


def test_a_checkpoint_is_not_overwritten_by_its_average(measured):
    newest = checkpoints(measured)[-1]
    with pytest.raises(ValueError, match="is one of the checkpoints to average"):
        average([newest], newest.parent / "." / newest.name, overwrite=True)
    assert (newest / "state").exists()


def test_a_figure_that_nothing_measured_is_named(measured):
    with pytest.raises(ValueError, match="no checkpoint of .* has measured 'validation_los'"):
        choose([measured], best=1, best_by="validation_los")
