"""The command line: options that do not go together, and mistakes told in a line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vanilla_transformer.cli import app

RECIPE = str(Path(__file__).parents[1] / "train" / "recipes" / "reverse_toy.yaml")
PREPARE = ["prepare", RECIPE, "--output", "corpus"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in (("some", "a\n"), ("none", "")):
        Path(name).write_text(content)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (PREPARE, "either --source"),
        ([*PREPARE, "--source", "some", "--dataset", "some"], "either --source"),
        ([*PREPARE, "--dataset", "some", "--target", "some"], "not with --dataset"),
        ([*PREPARE, "--source", "some.tsv", "--config", "de-en"], "--config goes with --dataset"),
        ([*PREPARE, "--source", "some.tsv", "--validation-target", "some"], "needs --validation-source"),
        (["translate", "model", "a text", "--file", "some"], "either sentences or --file"),
        (["score", "model", "--source", "some", "--target", "some", "--output", "some"], "exists already"),
        (["score", "model", "--source", "some", "--target", "some", "--output", "nowhere/new"], "its folder does not"),
        (["score", "model", "--source", "some", "--target", "some", "--batch-size", "0"], "--batch-size"),
        (["average", "run", "--output", "model", "--last", "0"], "--last"),
        (["average", "run", "--output", "model", "--last", "2", "--best", "2"], "either --last or --best"),
        (["train", RECIPE, "--corpus", "c", "--output", "run", "--restart", "--accept-changes"], "either --restart"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_any_work(arguments, words):
    result = CliRunner().invoke(app, arguments, terminal_width=300)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert sorted(path.name for path in Path().iterdir()) == ["none", "some"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*PREPARE, "--source", "nowhere", "--target", "some"], "there is no file nowhere"),
        (["train", RECIPE, "--corpus", "nowhere", "--output", "run"], "nowhere holds no prepared corpus"),
        (["train", "nowhere.yaml", "--corpus", "some", "--output", "run"], "nowhere.yaml"),
        (["average", "nowhere", "--output", "model"], "nowhere holds no checkpoints"),
        (["score", "model", "--source", "none", "--target", "none"], "none holds no sentences"),
        (["publish", "nowhere", "user/name"], "nowhere lacks config.json"),
    ],
)
def test_a_mistake_is_told_in_one_line(arguments, words):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and words in result.stderr and result.stderr.count("\n") == 1
