"""What a run tells its reader: `log.jsonl` while it lasts, `report.json` and `curves.png` when it has ended."""

import json
from pathlib import Path

from matplotlib.figure import Figure

from .checkpoint import write_text

LOG, REPORT, CURVES = "log.jsonl", "report.json", "curves.png"
LABELS = {
    "training_loss": "training, label-smoothed",
    "validation_loss": "validation",
    "validation_bleu": "validation BLEU",
    "learning_rate": "learning rate",
}


def write_line(run: str | Path, figures: dict):
    """Append a line to the log.

    Args:
        run: the run's folder.
        figures: what was measured, by name; "step" among them.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(run) / LOG
    try:
        with open(path, "a", encoding="utf-8") as log:
            log.write(json.dumps(figures) + "\n")
    except OSError as error:
        raise OSError(f"{path} could not be written ({error}): is the disk full?") from error


def read_log(run: str | Path) -> list[dict]:
    """The log, line by line.

    Args:
        run: the run's folder.

    Returns:
        Figures by name, in the order of their steps; nothing where there is no log. A line that a kill cut short, or
        that is none of ours, is passed over.
    """
    path = Path(run) / LOG
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            figures = json.loads(line)
        except ValueError:
            continue
        if isinstance(figures, dict) and "step" in figures:
            lines.append(figures)
    return lines


def forget_after(run: str | Path, step: int):
    """Drop what was logged after a step, since the run goes on from there and will log it again.

    Args:
        run: the run's folder.
        step: the last one whose lines stay.
    """
    path = Path(run) / LOG
    if not path.exists():
        return
    kept = [figures for figures in read_log(run) if figures["step"] <= step]
    write_text(path, "".join(json.dumps(figures) + "\n" for figures in kept))


def write_report(run: str | Path, report: dict):
    """Close a run: its report, and its curves drawn from the log.

    Args:
        run: the run's folder.
        report: figures by name.
    """
    draw_curves(run)
    write_text(Path(run) / REPORT, json.dumps(report, indent=2) + "\n")


def draw_curves(run: str | Path):
    """Draw loss, BLEU and learning rate over the steps into `curves.png`.

    Args:
        run: the run's folder.
    """
    lines = read_log(run)
    figure = Figure(figsize=(8, 9), layout="constrained")
    loss, bleu, rate = figure.subplots(3, sharex=True)
    for axes, names in (
        (loss, ("training_loss", "validation_loss")),
        (bleu, ("validation_bleu",)),
        (rate, ("learning_rate",)),
    ):
        for name in names:
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                axes.plot(*zip(*points, strict=True), marker=".", label=LABELS[name])
                axes.legend()
        axes.grid(alpha=0.3)
    loss.set_ylabel("nats a token")
    bleu.set_ylabel("BLEU")
    rate.set_xlabel("step")
    figure.savefig(Path(run) / CURVES, dpi=150)
