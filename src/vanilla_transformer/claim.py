"""Whose a run's folder is: one training at a time writes to it, and only the training that began it goes on."""

import json
from pathlib import Path

from filelock import FileLock, Timeout

from .checkpoint import checkpoints, write_text

RECORD, LOCK = "recipe.json", ".lock"
PATIENCE = 10.0  # seconds; the loader processes of a killed training hold its lock until they notice, 5 seconds later


def lock(run: str | Path) -> FileLock:
    """Keep other trainings out of a folder until the lock is released or this process ends, however it ends.

    Args:
        run: the run's folder; it is made.

    Returns:
        The lock, for its `release`.

    Raises:
        BlockingIOError: another training holds it.
    """
    Path(run).mkdir(parents=True, exist_ok=True)
    held = FileLock(Path(run) / LOCK, timeout=PATIENCE)
    try:
        held.acquire()
    except Timeout as error:
        raise BlockingIOError(f"another training is running in {run}: wait for it, or choose another folder") from error
    return held


def newest_to_go_on_from(run: str | Path, identity: dict, accept_changes: bool = False) -> Path | None:
    """The checkpoint from which a training goes on.

    Args:
        run: the run's folder.
        identity: of the training that asks: "recipe", "corpus" and "processes".
        accept_changes: go on from another recipe, corpus or number of processes.

    Returns:
        The newest checkpoint, or `None` where there is none.

    Raises:
        ValueError: the folder holds another training, or is somebody else's.
    """
    existing, known = checkpoints(run), read_record(run)
    if not existing:
        return None
    if known is None:
        raise ValueError(f"{run} holds checkpoints but no {RECORD} to say of what: choose another folder, or --restart")
    if not accept_changes:
        refuse_changes(run, known, identity)
    return existing[-1]


def read_record(run: str | Path) -> dict | None:
    """What `record` wrote.

    Args:
        run: the run's folder.

    Returns:
        "recipe", "corpus" and "processes" of the training that the folder holds; `None` where there is no record.

    Raises:
        ValueError: the file is somebody else's.
    """
    path = Path(run) / RECORD
    if not path.exists():
        return None
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {name: known[name] for name in ("recipe", "corpus", "processes")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no record of a training: choose another folder") from error


def refuse_changes(where: str | Path, known: dict, identity: dict):
    """Refuse to go on with another training than the one that was begun.

    Args:
        where: what holds the training that was begun, for the message.
        known: its "recipe", "corpus" and "processes".
        identity: the same of the training that wants to go on.

    Raises:
        ValueError: they differ; the message says in what.
    """
    instead = "choose another folder, --restart, or --accept-changes to go on all the same"
    if known["corpus"] != identity["corpus"]:
        raise ValueError(f"{where} holds a training on another corpus or tokenizer: {instead}")
    recipe, other = known["recipe"], identity["recipe"]
    for name in sorted(other):
        if recipe.get(name) != other[name]:
            raise ValueError(
                f"{where} holds a training by another recipe ({name} was {recipe.get(name)!r} and is now "
                f"{other[name]!r}): {instead}"
            )
    if known["processes"] != identity["processes"]:
        raise ValueError(
            f"{where} holds a training by {known['processes']} processes, and this one has {identity['processes']}: "
            f"launch as many again, {instead}"
        )


def record(run: str | Path, identity: dict):
    """Write down which training a folder holds.

    Args:
        run: the run's folder.
        identity: "recipe", "corpus" and "processes".
    """
    write_text(Path(run) / RECORD, json.dumps(identity, indent=2) + "\n")
