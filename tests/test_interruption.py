"""Whatever interrupts a training: kills at any moment, a full disk, a rank that dies, a second training."""

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_training import (
    WELL_CONDITIONED,
    assert_same_checkpoint,
    interrupt_at,
    log_of,
    make_corpus,
    make_recipe,
    run_quietly,
)
from tqdm import tqdm

import vanilla_transformer
from vanilla_transformer import VanillaTransformerForConditionalGeneration, claim, training
from vanilla_transformer.checkpoint import checkpoints, load_state, step_of

PATHS = [str(Path(vanilla_transformer.__file__).parents[1]), str(Path(__file__).parent)]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(PATHS),
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def run_python(call, folder, processes=None, **arguments):
    """Run a function of this module in a fresh interpreter, or in as many as `torchrun` starts."""
    script = folder / f"{call}.py"
    script.write_text(f"import pathlib, test_interruption; test_interruption.{call}(pathlib.Path({str(folder)!r}))\n")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    command = [sys.executable, *launcher, str(script)]
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **arguments
    )


# Kills


KILLED = {"steps": 1_000_000, "save_every": 3, "log_every": 1, "keep_last": 2}


def train_until_killed(corpus, run, steps):
    """A training that tells of every step in a file."""
    tqdm.set_lock(threading.RLock())
    true = training.Training.take_step

    def take_step(self):
        true(self)
        with open(steps, "ab") as file:
            file.write(self.step.to_bytes(8, "little"))

    training.Training.take_step = take_step
    run_quietly(make_recipe(**KILLED), corpus, run)


def kill_again_and_again(folder, kills):
    """Fork a training and kill it at a random moment, over and over; then look at what is there."""
    corpus, run, steps, chance = make_corpus(validation=False), folder / "killed", folder / "steps", random.Random(0)
    steps.touch()
    tqdm.set_lock(threading.RLock())  # tqdm's own is shared with forked processes, and dies with them
    done = 0
    while done < kills or not checkpoints(run):
        before, deadline = steps.stat().st_size, time.monotonic() + 60
        child = os.fork()
        if child == 0:
            train_until_killed(corpus, run, steps)
            os._exit(1)
        while steps.stat().st_size == before:  # until it has taken its first step
            assert time.monotonic() < deadline, "a training hangs"
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "a training has ended by itself"
            time.sleep(0.001)
        time.sleep(chance.random() * 0.5)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        done += 1
        latest = int.from_bytes(steps.read_bytes()[-8:], "little")
        existing = checkpoints(run)
        newest = step_of(existing[-1]) if existing else 0
        assert newest >= latest - KILLED["save_every"], f"step {latest} was taken, and only {newest} is saved"
        for saved in existing:
            VanillaTransformerForConditionalGeneration.from_pretrained(saved)
        if existing:
            assert load_state(existing[-1])["step"] == newest
    straight = run_quietly(make_recipe(**{**KILLED, "steps": newest}), corpus, folder / "straight")
    assert (straight / "model.safetensors").read_bytes() == (checkpoints(run)[-1] / "model.safetensors").read_bytes()
    logged = [figures["step"] for figures in log_of(run)]
    assert logged == list(range(1, len(logged) + 1)) and len(logged) >= newest
    visible = {path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith(".")}
    assert visible == {path.name for path in checkpoints(run)}
    print("killed", done, "times; reached step", newest)


def kill_three_times(folder):
    kill_again_and_again(folder, 3)


def kill_fifty_times(folder):
    kill_again_and_again(folder, 50)


@pytest.mark.parametrize("call", ["kill_three_times", pytest.param("kill_fifty_times", marks=pytest.mark.slow)])
def test_kills_at_random_moments_cost_no_more_than_the_steps_since_the_last_save(tmp_path, call):
    process = run_python(call, tmp_path)
    output, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    assert "times; reached step" in output


def train_slowly_on_two(folder):
    """Tell the processes' numbers, and take 0.1 seconds a step so that a kill meets the middle."""
    (folder / f"pid-{os.getpid()}").touch()
    true = training.Training.take_step

    def take_step(self):
        time.sleep(0.1)
        true(self)

    training.Training.take_step = take_step
    run_quietly(make_recipe(steps=20, save_every=4), make_corpus(), folder / "killed")


def train_on_two(folder):
    run_quietly(make_recipe(steps=20, save_every=4), make_corpus(), folder / "straight")


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.mark.slow
def test_two_processes_killed_together_go_on_to_the_same_numbers(tmp_path):
    process = run_python("train_slowly_on_two", tmp_path, processes=2)
    wait_for(lambda: len(checkpoints(tmp_path / "killed")) >= 2)
    for path in tmp_path.glob("pid-*"):
        os.kill(int(path.name.removeprefix("pid-")), signal.SIGKILL)
    process.kill()
    process.communicate()
    assert step_of(checkpoints(tmp_path / "killed")[-1]) < 20
    for call in ("train_slowly_on_two", "train_on_two"):
        process = run_python(call, tmp_path, processes=2)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
    assert_same_checkpoint(checkpoints(tmp_path / "killed")[-1], checkpoints(tmp_path / "straight")[-1])


@pytest.mark.slow
def test_where_one_rank_dies_the_others_end_with_an_error(tmp_path):
    process = run_python("train_slowly_on_two", tmp_path, processes=2)
    wait_for(lambda: checkpoints(tmp_path / "killed"))
    ranks = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    os.kill(ranks[1], signal.SIGKILL)
    process.communicate(timeout=90)
    assert process.returncode != 0
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), seconds=30)


# Errors


def test_a_full_disk_leaves_the_checkpoint_before_and_says_so(tmp_path, monkeypatch):
    """A limit on the size of files stands for the full disk: every writer meets it in the same place."""
    corpus, recipe, limits = make_corpus(), make_recipe(), resource.getrlimit(resource.RLIMIT_FSIZE)
    true = training.learning_rate

    def filling_up(step, *arguments):
        if step == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        return true(step, *arguments)

    monkeypatch.setattr(training, "learning_rate", filling_up)
    try:
        with pytest.raises(OSError, match="could not be written.*is the disk full.*last good checkpoint is .*00005$"):
            run_quietly(recipe, corpus, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        monkeypatch.setattr(training, "learning_rate", true)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000005"]
    resumed = run_quietly(recipe, corpus, tmp_path / "run")
    assert_same_checkpoint(resumed, run_quietly(recipe, corpus, tmp_path / "straight"))


def test_a_second_training_in_a_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "PATIENCE", 0.1)
    first = claim.lock(tmp_path / "run")
    with pytest.raises(BlockingIOError, match="another training is running in .*run: wait for it, or choose"):
        run_quietly(make_recipe(steps=1), make_corpus(), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    first.release()
    assert run_quietly(make_recipe(steps=1), make_corpus(), tmp_path / "run").name == "step-00000001"


@pytest.mark.parametrize("name", ["model.safetensors", "state/state.pt"])
def test_a_damaged_checkpoint_is_named(tmp_path, monkeypatch, name):
    corpus = make_corpus()
    interrupt_at(monkeypatch, 8)
    with pytest.raises(KeyboardInterrupt):
        run_quietly(make_recipe(), corpus, tmp_path)
    path = checkpoints(tmp_path)[-1] / name
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="step-00000005.* is damaged"):
        run_quietly(make_recipe(), corpus, tmp_path)


# Sharded models


def train_sharded(folder):
    """Two processes under FSDP2, killed once, and the same undisturbed."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from torch.distributed.fsdp import fully_shard

    def prepare(self, module, optimizer):
        for stack in (module.model.model.encoder, module.model.model.decoder):
            for layer in stack.layers:
                fully_shard(layer)
        fully_shard(module)
        settings = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "fused")}
        return module, AcceleratedOptimizer(torch.optim.Adam(module.parameters(), **settings))

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(Accelerator, "prepare", prepare)
    monkeypatch.setattr(Accelerator, "end_training", lambda self: None)  # it would end the process group for good
    corpus, recipe = make_corpus(), make_recipe(dropout=0.0, max_gradient_norm=0.5, **WELL_CONDITIONED)
    run_quietly(recipe, corpus, folder / "straight")
    interrupt_at(monkeypatch, 8)
    with pytest.raises(KeyboardInterrupt):
        run_quietly(recipe, corpus, folder / "killed")
    run_quietly(recipe, corpus, folder / "killed")


@pytest.mark.slow
def test_sharded_over_two_processes_a_model_trains_as_in_one_and_resumes_to_the_same_numbers(tmp_path):
    process = run_python("train_sharded", tmp_path, processes=2)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    straight, killed = (checkpoints(tmp_path / name)[-1] for name in ("straight", "killed"))
    assert_same_checkpoint(killed, straight)
    settings = {"dropout": 0.0, "max_gradient_norm": 0.5, "gradient_accumulation": 2, **WELL_CONDITIONED}
    one = load_file(run_quietly(make_recipe(**settings), make_corpus(), tmp_path / "one") / "model.safetensors")
    torch.testing.assert_close(load_file(straight / "model.safetensors"), one, rtol=0, atol=1e-5)
