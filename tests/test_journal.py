"""What a run tells its reader: a log that survives kills, a report, curves."""

import json

import pytest

from vanilla_transformer.journal import draw_curves, forget_after, read_log, write_line, write_report

LINES = [
    {"step": 1, "training_loss": 5.0, "learning_rate": 0.1},
    {"step": 2, "training_loss": 4.0, "learning_rate": 0.2, "validation_loss": 4.5, "validation_bleu": 1.0},
    {"step": 4, "training_loss": 3.0, "learning_rate": 0.1},
]


@pytest.fixture
def run(tmp_path):
    for line in LINES:
        write_line(tmp_path, line)
    return tmp_path


def test_a_log_comes_back_line_by_line(run, tmp_path):
    assert read_log(run) == LINES
    assert [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()] == LINES


def test_a_folder_without_a_log_has_no_lines(tmp_path):
    assert read_log(tmp_path) == []
    forget_after(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("step", "left"), [(4, 3), (3, 2), (2, 2), (1, 1), (0, 0)])
def test_what_was_logged_after_a_step_is_forgotten(run, step, left):
    forget_after(run, step)
    assert read_log(run) == LINES[:left]


def test_a_line_that_a_kill_cut_short_is_forgotten_and_the_next_stands_alone(run):
    with open(run / "log.jsonl", "a") as log:
        log.write('null\n17\n{"cake": 1}\n{"step": 5, "trai')
    assert read_log(run) == LINES
    forget_after(run, 4)
    write_line(run, {"step": 5})
    assert read_log(run) == [*LINES, {"step": 5}]


def test_a_report_comes_with_its_curves(run):
    write_report(run, {"steps": 4, "last": LINES[-1]})
    assert json.loads((run / "report.json").read_text()) == {"steps": 4, "last": LINES[-1]}
    png = (run / "curves.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 10_000
    assert sorted(path.name for path in run.iterdir()) == ["curves.png", "log.jsonl", "report.json"]


def test_curves_change_with_the_log(run):
    draw_curves(run)
    before = (run / "curves.png").read_bytes()
    write_line(run, {"step": 6, "training_loss": 2.0, "learning_rate": 0.1, "validation_loss": 2.5})
    draw_curves(run)
    assert (run / "curves.png").read_bytes() != before


def test_a_log_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(OSError, match="nowhere/log.jsonl could not be written"):
        write_line(tmp_path / "nowhere", {"step": 1})
