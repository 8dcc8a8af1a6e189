"""The `vanilla-transformer` command: prepare, train, average, score, translate, publish.

Every verb is a function that another module exports; here are only their arguments as a shell gives them.
"""

import functools
import itertools
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from accelerate import PartialState
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers import pipeline as make_pipeline
from transformers.utils import logging

from . import checkpoint, evaluation, hub, journal, training
from . import prepare as preparation
from .data import read_lines, read_parallel_files
from .recipe import load_recipe

app = typer.Typer(
    help="The Transformer of 'Attention Is All You Need', from raw text to a published translator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def says_what_is_wrong(verb):
    """Turn the errors that tell a user what to do into one line and exit code 1; any other keeps its traceback."""

    @functools.wraps(verb)
    def wrapped(*args, **kwargs):
        try:
            return verb(*args, **kwargs)
        except (ValueError, OSError, FloatingPointError, StrictDataclassError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error

    return wrapped


RecipePath = Annotated[Path, typer.Argument(help="A recipe, see train/recipes.")]
Overwrite = Annotated[bool, typer.Option(help="Replace the output if it exists.")]


@app.command()
@says_what_is_wrong
def prepare(
    recipe: RecipePath,
    output: Annotated[Path, typer.Option(help="The folder to make.")],
    source: Annotated[str | None, typer.Option(help="Source text file, or a .tsv or .jsonl of pairs.")] = None,
    target: Annotated[str | None, typer.Option(help="Target text file, line by line beside the source.")] = None,
    validation_source: Annotated[str | None, typer.Option(help="The same for validation.")] = None,
    validation_target: Annotated[str | None, typer.Option(help="The same for validation.")] = None,
    dataset: Annotated[str | None, typer.Option(help="In place of files: a datasets folder or Hub name.")] = None,
    config: Annotated[str | None, typer.Option(help="The dataset's configuration, such as de-en.")] = None,
    validation_split: Annotated[str, typer.Option(help="The dataset's split, or none.")] = "validation",
    tokenizer: Annotated[Path | None, typer.Option(help="Use this tokenizer instead of learning one.")] = None,
    drop_empty: Annotated[bool, typer.Option(help="Leave out pairs with an empty side.")] = False,
    num_proc: Annotated[int | None, typer.Option(help="Processes that tokenise.")] = None,
    overwrite: Overwrite = False,
):
    """Read bitext, learn the shared vocabulary and tokenise, into one folder."""
    if (source is None) == (dataset is None):
        raise typer.BadParameter("give either --source (with --target) or --dataset")
    validation = None
    if dataset is not None:
        if target is not None or validation_source is not None or validation_target is not None:
            raise typer.BadParameter("--target and --validation-… go with --source, not with --dataset")
        train = preparation.Bitext(dataset, config=config, split="train")
        if validation_split != "none":
            validation = preparation.Bitext(dataset, config=config, split=validation_split)
    else:
        if config is not None:
            raise typer.BadParameter("--config goes with --dataset, not with --source")
        if validation_target is not None and validation_source is None:
            raise typer.BadParameter("--validation-target needs --validation-source")
        train = preparation.Bitext(source, target)
        if validation_source is not None:
            validation = preparation.Bitext(validation_source, validation_target)
    report = preparation.prepare(
        load_recipe(recipe), train, validation, output, tokenizer, drop_empty, num_proc, overwrite
    )
    typer.echo(json.dumps(report, indent=2))


@app.command()
@says_what_is_wrong
def train(
    recipe: RecipePath,
    corpus: Annotated[Path, typer.Option(help="What prepare made.")],
    output: Annotated[Path, typer.Option(help="The run's folder; goes on from its newest checkpoint.")],
    track: Annotated[
        list[str], typer.Option(help="Accelerate's trackers, such as tensorboard or wandb; none for none.")
    ] = ["tensorboard"],  # noqa: B006  (typer wants the default as it is)
    workers: Annotated[int, typer.Option(min=0, help="Processes that prepare batches.")] = 0,
    restart: Annotated[bool, typer.Option(help="Remove what an earlier training wrote there.")] = False,
    accept_changes: Annotated[
        bool, typer.Option(help="Go on from a checkpoint of another recipe, corpus or number of processes.")
    ] = False,
):
    """Train by a recipe; under `accelerate launch`, on many devices."""
    if restart and accept_changes:
        raise typer.BadParameter("give either --restart or --accept-changes")
    trackers = [name for name in track if name != "none"]
    logging.disable_progress_bar()  # of files being saved, which would break up the one of the training
    saved = training.train(
        load_recipe(recipe), preparation.load_corpus(corpus), output, trackers, workers, restart, accept_changes
    )
    if PartialState().is_main_process:
        report = output / journal.REPORT
        typer.echo(f"{report.read_text(encoding='utf-8')}trained: {saved}")


@app.command()
@says_what_is_wrong
def average(
    models: Annotated[list[Path], typer.Argument(help="A run's folder, or the checkpoints' own.")],
    output: Annotated[Path, typer.Option(help="The folder to make.")],
    last: Annotated[int | None, typer.Option(min=1, help="Of a run, this many of the newest checkpoints.")] = None,
    best: Annotated[int | None, typer.Option(min=1, help="Of a run, this many of the best checkpoints.")] = None,
    best_by: Annotated[str, typer.Option(help="What --best goes by.")] = "validation_loss",
    overwrite: Overwrite = False,
):
    """Average checkpoints into one model: those given, or of a run the last that its recipe keeps, or others."""
    if last is not None and best is not None:
        raise typer.BadParameter("give either --last or --best")
    folders = checkpoint.choose(models, last, best, best_by)
    typer.echo(f"averaged {len(folders)} checkpoints: {checkpoint.average(folders, output, overwrite)}")


@app.command()
@says_what_is_wrong
def score(
    model: Annotated[str, typer.Argument(help="A model's folder or Hub name.")],
    source: Annotated[Path, typer.Option(help="Source text, plain or gzipped.")],
    target: Annotated[Path, typer.Option(help="Reference translations.")],
    num_beams: Annotated[int | None, typer.Option(help="Beam size; the model's own unless given.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sentences translated together.")] = 32,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …")] = "cpu",
    output: Annotated[Path | None, typer.Option(help="Write the translations here.")] = None,
    tgt_lang: Annotated[str | None, typer.Option(help="Where the model does not declare it.")] = None,
):
    """Translate a test set and score it: BLEU, chrF, and BLEU on lower-cased tokens."""
    if output is not None and (output.exists() or not output.parent.is_dir()):
        raise typer.BadParameter(f"{output} exists already, or its folder does not: choose another name")
    pairs = list(read_parallel_files(source, target))
    if not pairs:
        raise ValueError(f"{source} holds no sentences")
    texts, references = zip(*pairs, strict=True)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(model).to(device)
    tgt_lang = tgt_lang or loaded.config.tgt_lang
    if tgt_lang is None:
        raise ValueError(f"{model} does not declare its target language: pass --tgt-lang")
    generation = {} if num_beams is None else {"num_beams": num_beams}
    translations = evaluation.translate(
        loaded, AutoTokenizer.from_pretrained(model), list(texts), batch_size, show_progress=True, **generation
    )
    if output is not None:
        output.write_text("".join(f"{text}\n" for text in translations), encoding="utf-8")
    typer.echo(evaluation.score(translations, list(references), tgt_lang))


@app.command()
@says_what_is_wrong
def translate(
    model: Annotated[str, typer.Argument(help="A model's folder or Hub name.")],
    text: Annotated[list[str] | None, typer.Argument(help="Sentences; standard input if there are none.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file, plain or gzipped, one sentence a line.")] = None,
    num_beams: Annotated[int | None, typer.Option(help="Beam size; the model's own unless given.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …")] = "cpu",
    show_source: Annotated[bool, typer.Option(help="Print every sentence above its translation.")] = False,
):
    """Translate sentences."""
    if text and file is not None:
        raise typer.BadParameter("give either sentences or --file")
    lines = text or (read_lines(file) if file is not None else (line.rstrip("\r\n") for line in sys.stdin))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    generation = {} if num_beams is None else {"num_beams": num_beams}
    pipe = make_pipeline("translation", model=model, device=device, **generation)
    sources, texts = itertools.tee(lines)
    for source, hypotheses in zip(sources, pipe(line for line in texts), strict=True):
        translation = hypotheses[0]["translation_text"]
        typer.echo(f"{source}\n  → {translation}" if show_source else translation)


@app.command()
@says_what_is_wrong
def publish(
    folder: Annotated[Path, typer.Argument(help="A model laid out as its Hub repository, see model_cards.")],
    repo_id: Annotated[str, typer.Argument(help="user/name on the Hub.")],
    private: Annotated[bool, typer.Option(help="Make a new repository private.")] = False,
):
    """Upload a model to the Hub."""
    typer.echo(f"published: {hub.publish(folder, repo_id, private)}")
