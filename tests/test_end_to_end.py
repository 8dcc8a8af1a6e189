"""The whole path as a user walks it: prepare, train, average, score, translate; and fine-tuning with Trainer."""

import random
from pathlib import Path

import datasets
import pytest
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    pipeline,
)
from typer.testing import CliRunner

from vanilla_transformer.cli import app

RECIPE = Path(__file__).parents[1] / "train" / "recipes" / "reverse_toy.yaml"


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def reversed_digits(tmp_path_factory):
    """A folder with text, a prepared corpus, a finished run and the averaged model."""
    folder = tmp_path_factory.mktemp("reverse")
    digits = random.Random(1)
    for split, size in (("train", 10_000), ("test", 100)):
        rows = [digits.choices("0123456789", k=digits.randint(2, 8)) for _ in range(size)]
        (folder / f"{split}.row").write_text("".join(" ".join(row) + "\n" for row in rows))
        (folder / f"{split}.reversed").write_text("".join(" ".join(row[::-1]) + "\n" for row in rows))
    source, target = folder / "train.row", folder / "train.reversed"
    run("prepare", RECIPE, "--source", source, "--target", target, "--output", folder / "corpus")
    run("train", RECIPE, "--corpus", folder / "corpus", "--output", folder / "run")
    run("average", folder / "run", "--last", 2, "--output", folder / "model")
    return folder


def test_a_tiny_model_learns_to_reverse_digits(reversed_digits):
    source, target = reversed_digits / "test.row", reversed_digits / "test.reversed"
    translations = reversed_digits / "translations"
    printed = run("score", reversed_digits / "model", "--source", source, "--target", target, "--output", translations)
    exact = [a == b for a, b in zip(translations.read_text().split("\n"), target.read_text().split("\n"), strict=True)]
    assert sum(exact) > 90
    assert "100 sentences: BLEU " in printed and "version:" in printed
    translate = pipeline("translation_row_to_reversed", model=str(reversed_digits / "model"))
    assert translate("3 1 4 1 5") == [{"translation_text": "5 1 4 1 3"}]


def test_translate_reads_standard_input_and_keeps_blank_lines(reversed_digits):
    result = CliRunner().invoke(app, ["translate", str(reversed_digits / "model")], input="1 2\n\n7 8 9\n")
    assert result.stdout == "2 1\n\n9 8 7\n"


def test_a_mistake_is_told_in_one_line(reversed_digits, tmp_path):
    (tmp_path / "short").write_text("1 2\n")
    result = CliRunner().invoke(
        app,
        ["prepare", str(RECIPE), "--source", str(reversed_digits / "test.row"), "--target", str(tmp_path / "short")]
        + ["--output", str(tmp_path / "corpus")],
    )
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and "1 lines" in result.stderr and "100" in result.stderr
    assert not (tmp_path / "corpus").exists()


def test_the_stock_trainer_fine_tunes_the_saved_model(reversed_digits, tmp_path):
    folder = reversed_digits / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    rows = (reversed_digits / "train.row").read_text().splitlines()[:64]
    data = datasets.Dataset.from_dict({"row": rows})  # the new task: to copy

    def encode(pair):
        return tokenizer(pair["row"], text_target=pair["row"])

    data = data.map(encode, remove_columns=["row"])
    arguments = Seq2SeqTrainingArguments(
        tmp_path,
        learning_rate=1e-3,
        label_smoothing_factor=0.1,
        num_train_epochs=4,
        per_device_train_batch_size=16,
        predict_with_generate=True,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Seq2SeqTrainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 2
    trainer.save_model(tmp_path / "tuned")
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "tuned").generation_config.gnmt_alpha == 0.6
