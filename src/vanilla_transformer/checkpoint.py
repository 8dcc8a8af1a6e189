"""Checkpoints: folders that `from_pretrained` loads, written whole or not at all, and their average (section 6.1)."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

WEIGHTS = "model.safetensors"
STATE = "state"  # what resuming needs beyond the model; only the newest checkpoint keeps it
FIGURES = "figures.json"  # what the training measured at this step
NAME = re.compile(r"step-(\d+)")


def write_folder(folder: str | Path, write: Callable[[Path], None], overwrite: bool = False, mark: str | None = None):
    """Write a folder aside, force it to the disk and rename it, so that it is never seen half-written.

    Args:
        folder: the folder's name in the end.
        write: fills the folder that it is given.
        overwrite: replace a folder of that name.
        mark: a file that a folder to be replaced must hold, or it is somebody else's.

    Raises:
        FileExistsError: there is one already, and `overwrite` is not set or the mark is missing.
    """
    folder = Path(folder)
    aside, replaced = folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.old")
    if replaced.exists() and not folder.exists():  # what a kill between the two renames below left
        replaced.rename(folder)
    refuse_to_replace(folder, overwrite, mark)
    for stale in (aside, replaced):
        shutil.rmtree(stale, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        write(aside)
        for path in (aside, *aside.rglob("*")):
            _fsync(path)
        if folder.exists():
            folder.rename(replaced)
        aside.rename(folder)
        _fsync(folder.parent)
    except BaseException:
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def write_text(path: str | Path, text: str):
    """Write a text file aside and rename it, so that it is never seen half-written; an older one is replaced.

    Args:
        path: the file's name in the end.
        text: what it holds.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    _fsync(aside)
    os.replace(aside, path)


def refuse_to_replace(folder: str | Path, overwrite: bool, mark: str | None = None):
    """Refuse where writing would destroy a folder that was not to be destroyed.

    Args:
        folder: what is to be written.
        overwrite: whether the user asked to replace it.
        mark: a file that a folder to be replaced must hold, or it is somebody else's.

    Raises:
        FileExistsError: it exists, and `overwrite` is not set or the mark is missing.
    """
    folder = Path(folder)
    if not folder.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{folder} exists already: choose another name, or ask for it to be overwritten")
    if mark is not None and any(folder.iterdir()) and not (folder / mark).exists():
        raise FileExistsError(f"{folder} holds no {mark}, so it is none of ours to overwrite: choose another name")


def _fsync(path):
    """Force a file or a folder's list of names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints(run: str | Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first.

    Args:
        run: the run's folder.

    Returns:
        Folders named `step-…`.
    """
    folders = (path for path in (Path(run) / "checkpoints").glob("step-*") if NAME.fullmatch(path.name))
    return sorted((path for path in folders if (path / WEIGHTS).exists()), key=step_of)


def step_of(checkpoint: str | Path) -> int:
    """The optimizer step at which a checkpoint was made."""
    return int(NAME.fullmatch(Path(checkpoint).name)[1])


def best_checkpoints(run: str | Path, count: int, by: str = "validation_loss") -> list[Path]:
    """The checkpoints of a run at which a figure was best, of equal ones the older.

    Args:
        run: the run's folder.
        count: how many.
        by: the figure; a BLEU is better the higher it is, anything else the lower.

    Returns:
        At most `count` folders, oldest first; those without the figure are passed over.
    """
    measured = {}
    for folder in checkpoints(run):
        if (folder / FIGURES).exists():
            figures = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
            if by in figures:
                measured[folder] = -figures[by] if by.endswith("bleu") else figures[by]
    return sorted(sorted(measured, key=measured.get)[:count], key=step_of)


def save_checkpoint(
    run: str | Path,
    step: int,
    save_model: Callable[[Path], None],
    state: dict,
    figures: dict,
    keep_last: int,
    keep_best: int = 0,
    best_by: str = "validation_loss",
) -> Path:
    """Save a model and what resuming needs, and drop what is no longer wanted.

    Args:
        run: the run's folder.
        step: optimizer steps done.
        save_model: writes model and tokenizer into a folder.
        state: tensors and plain values, for `load_state`.
        figures: what was measured at this step, for `best_checkpoints`.
        keep_last: newest checkpoints kept, this one counted.
        keep_best, best_by: best ones kept beside them, and the figure that says which they are.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: the disk is full, say; the checkpoints before this one are whole.
    """
    home = Path(run) / "checkpoints"

    def write(folder):
        save_model(folder)
        (folder / FIGURES).write_text(json.dumps(figures) + "\n", encoding="utf-8")
        (folder / STATE).mkdir()
        torch.save(state, folder / STATE / "state.pt")

    for stale in (*home.glob(".step-*.tmp"), *home.glob(".step-*.removed")):  # of a training that was killed
        shutil.rmtree(stale, ignore_errors=True)
    saved = home / f"step-{step:08d}"
    try:
        write_folder(saved, write, overwrite=True)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is each of these to one of the writers
        raise OSError(f"the checkpoint of step {step} could not be written ({error}): is the disk full?") from error
    kept = {*checkpoints(run)[-keep_last:], *best_checkpoints(run, keep_best, best_by)}
    for older in checkpoints(run):
        if older not in kept:
            # Out of sight at once: half removed, it would still look like a checkpoint.
            removed = older.rename(older.with_name(f".{older.name}.removed"))
            shutil.rmtree(removed, ignore_errors=True)
        elif older != saved:
            shutil.rmtree(older / STATE, ignore_errors=True)
    return saved


def load_state(checkpoint: str | Path) -> dict:
    """What `save_checkpoint` was given as `state`.

    Args:
        checkpoint: the folder.

    Returns:
        The state; tensors on the CPU. Nothing but tensors and plain values is unpickled.

    Raises:
        FileNotFoundError: the checkpoint has none.
        ValueError: the file is damaged.
    """
    path = Path(checkpoint) / STATE / "state.pt"
    if not path.exists():
        raise FileNotFoundError(
            f"{checkpoint} holds a model but no {STATE}/state.pt: it cannot be resumed from; choose another "
            "folder, or --restart"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # as many kinds as there are ways to damage a file
        raise ValueError(
            f"{path} is damaged ({error}): it cannot be resumed from; choose another folder, or --restart"
        ) from error


def choose(
    models: list[Path], last: int | None = None, best: int | None = None, best_by: str = "validation_loss"
) -> list[Path]:
    """The checkpoints to average.

    Args:
        models: a run's folder, or checkpoints' own folders.
        last: of a run, as many of the newest; unless given, as many as its recipe keeps for this.
        best: of a run, as many of the best instead.
        best_by: the figure that says which these are.

    Returns:
        Folders, oldest first.

    Raises:
        ValueError: no checkpoints, or fewer than asked for.
    """
    run, *others = models
    existing = [] if others else checkpoints(run)
    if not existing:
        if last is not None or best is not None or not (others or (run / WEIGHTS).exists()):
            raise ValueError(f"{run} holds no checkpoints to choose from")
        return models
    if best is not None:
        wanted, existing = best, best_checkpoints(run, best, best_by)
    elif last is not None:
        wanted = last
    else:
        record = run / "recipe.json"
        kept = json.loads(record.read_text(encoding="utf-8"))["recipe"]["keep_last"] if record.exists() else None
        wanted = min(kept or len(existing), len(existing))
    if best is not None and not existing:
        raise ValueError(f"no checkpoint of {run} has measured {best_by!r}: is it 'validation_loss' that you mean?")
    if len(existing) < wanted:
        raise ValueError(f"{run} has kept {len(existing)} such checkpoints, and {wanted} were asked for")
    return existing[-wanted:]


def average(folders: Iterable[str | Path], output: str | Path, overwrite: bool = False) -> Path:
    """The mean of several checkpoints' weights (section 6.1), one tensor in memory at a time from each.

    Args:
        folders: checkpoints of one model and one vocabulary.
        output: the folder to make; all but the weights is copied from the last checkpoint.
        overwrite: replace a folder of that name.

    Returns:
        `output`, which `from_pretrained` loads.

    Raises:
        ValueError: no checkpoints, or such as do not match in tensors, shapes or vocabulary.
        FileNotFoundError: a folder without weights.
        FileExistsError: the output exists, and `overwrite` is not set.
    """
    folders = [Path(folder) for folder in folders]
    if not folders:
        raise ValueError("there are no checkpoints to average")
    for folder in folders:
        if not (folder / WEIGHTS).exists():
            raise FileNotFoundError(f"{folder} holds no {WEIGHTS}")
    if Path(output).resolve() in {folder.resolve() for folder in folders}:
        raise ValueError(f"{output} is one of the checkpoints to average: choose another output")
    last = folders[-1]
    vocabulary = _vocabulary(last)
    for folder in folders:
        if _vocabulary(folder) != vocabulary:
            raise ValueError(f"{folder} has another vocabulary than {last}: their average would mean nothing")
    files = [safe_open(folder / WEIGHTS, framework="pt") for folder in folders]
    shapes = [{name: file.get_slice(name).get_shape() for name in file.keys()} for file in files]  # noqa: SIM118
    for folder, of_folder in zip(folders, shapes, strict=True):
        differing = sorted(name for name in {*of_folder, *shapes[-1]} if of_folder.get(name) != shapes[-1].get(name))
        if differing:
            raise ValueError(
                f"{folder} and {last} differ in {differing[0]}: shape {of_folder.get(differing[0])} "
                f"and {shapes[-1].get(differing[0])}"
            )

    def write(aside):
        shutil.copytree(last, aside, dirs_exist_ok=True, ignore=shutil.ignore_patterns(WEIGHTS, STATE, FIGURES))
        mean = {}
        for name in shapes[-1]:
            total = sum(file.get_tensor(name).double() for file in files)
            mean[name] = (total / len(files)).to(files[-1].get_tensor(name).dtype)
        save_file(mean, aside / WEIGHTS, metadata={"format": "pt"})

    write_folder(output, write, overwrite, mark=WEIGHTS)
    return Path(output)


def _vocabulary(folder):
    """The tokenizer's words and merges, or `None` where there is no tokenizer."""
    path = folder / "tokenizer.json"
    return json.loads(path.read_text(encoding="utf-8"))["model"] if path.exists() else None
