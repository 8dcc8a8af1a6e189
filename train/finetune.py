"""Fine-tune a translator with transformers' stock `Seq2SeqTrainer`: all of it is here, to be read and to be changed.

    python train/finetune.py model_cards/vanilla-transformer-tiny-multi30k-en-de --output runs/tuned \
      --source new.en --target new.de --validation-source held_out.en --validation-target held_out.de

Of ours are only the reading of text and the scores; the loss and its smoothing, accumulation, several processes
(`torchrun`, `accelerate launch`), checkpoints and the Hub are Trainer's. The output is a folder that `from_pretrained`
loads.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import datasets
import numpy as np
import pyarrow.compute as pc
import typer
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

import vanilla_transformer  # noqa: F401  (makes transformers know the model)
from vanilla_transformer.cli import says_what_is_wrong
from vanilla_transformer.data import LONGEST_LIST, pair_lengths, tokenize
from vanilla_transformer.evaluation import score
from vanilla_transformer.prepare import Bitext


@says_what_is_wrong
def finetune(
    model: Annotated[str, typer.Argument(help="The model to start from: a folder or a Hub name.")],
    output: Annotated[Path, typer.Option(help="The folder to make: the tuned model, its checkpoints below it.")],
    source: Annotated[str | None, typer.Option(help="Source text file, or a .tsv or .jsonl of pairs.")] = None,
    target: Annotated[str | None, typer.Option(help="Target text file, line by line beside the source.")] = None,
    validation_source: Annotated[str | None, typer.Option(help="The same for validation.")] = None,
    validation_target: Annotated[str | None, typer.Option(help="The same for validation.")] = None,
    dataset: Annotated[str | None, typer.Option(help="In place of files: a datasets folder or Hub name.")] = None,
    config: Annotated[str | None, typer.Option(help="The dataset's configuration, such as de-en.")] = None,
    validation_split: Annotated[str, typer.Option(help="The dataset's split.")] = "validation",
    src_lang: Annotated[str | None, typer.Option(help="Source language; the model's unless given.")] = None,
    tgt_lang: Annotated[str | None, typer.Option(help="Target language; the model's unless given.")] = None,
    drop_empty: Annotated[bool, typer.Option(help="Leave out pairs with an empty side.")] = False,
    max_length: Annotated[int, typer.Option(min=1, help="Pairs with more tokens on a side are left out.")] = 256,
    epochs: Annotated[float, typer.Option(min=0, help="Passes over the text.")] = 3,
    learning_rate: Annotated[float, typer.Option(min=0, help="At first; it falls to 0. LoRA wants more.")] = 2e-4,
    batch_size: Annotated[int, typer.Option(min=1, help="Pairs of a batch on one device.")] = 64,
    gradient_accumulation: Annotated[int, typer.Option(min=1, help="Batches of a step on one device.")] = 1,
    label_smoothing: Annotated[float, typer.Option(min=0, max=1, help="Of the loss; 0.1 in the paper.")] = 0.1,
    mixed_precision: Annotated[Literal["no", "bf16", "fp16"], typer.Option(help="Where the device has it.")] = "no",
    evaluate_every: Annotated[int | None, typer.Option(min=1, help="Steps; every epoch unless given.")] = None,
    group_by_length: Annotated[
        bool,
        typer.Option(help="Less padding, up to twice as fast; but then a run resumes exactly between epochs only."),
    ] = False,
    lora_rank: Annotated[int, typer.Option(min=0, help="Train adapters of this rank (PEFT); 0: all weights.")] = 0,
    track: Annotated[list[str] | None, typer.Option(help="Trainer's trackers, such as tensorboard.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the output's last checkpoint, if there is one.")] = False,
    push_to_hub: Annotated[str | None, typer.Option(help="user/name of the Hub repository to upload to.")] = None,
    private: Annotated[bool, typer.Option(help="Make a new repository private.")] = False,
):
    """Fine-tune a model on bitext; the state with the best BLEU on the validation text is what comes out."""
    if (source is None) == (dataset is None):
        raise typer.BadParameter("give either --source (with --target) or --dataset")
    if dataset is None and validation_source is None:
        raise typer.BadParameter("give --validation-source, too: its BLEU says which state of the model is the best")
    if dataset is not None and (target or validation_source or validation_target):
        raise typer.BadParameter("--target and --validation-… go with --source, not with --dataset")
    if dataset is None and config is not None:
        raise typer.BadParameter("--config goes with --dataset, not with --source")
    last_checkpoint = find_last_checkpoint(output, resume)
    tokenizer, tuned = AutoTokenizer.from_pretrained(model), AutoModelForSeq2SeqLM.from_pretrained(model)
    tuned.config.src_lang = src_lang or getattr(tuned.config, "src_lang", None)
    tuned.config.tgt_lang = tgt_lang or getattr(tuned.config, "tgt_lang", None)
    if tuned.config.src_lang is None or tuned.config.tgt_lang is None:
        raise ValueError(f"{model} does not declare its languages: pass --src-lang and --tgt-lang")
    if dataset is None:
        texts = Bitext(source, target), Bitext(validation_source, validation_target)
    else:
        texts = (Bitext(dataset, config=config, split=split) for split in ("train", validation_split))
    train, validation = (encode(text, tokenizer, tuned.config, max_length, drop_empty) for text in texts)

    every = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    if evaluate_every is not None:
        every = dict.fromkeys(("eval_strategy", "save_strategy"), "steps")
        every |= dict.fromkeys(("eval_steps", "save_steps"), evaluate_every)
    arguments = Seq2SeqTrainingArguments(
        str(output),
        num_train_epochs=epochs,
        learning_rate=learning_rate,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation,
        label_smoothing_factor=label_smoothing,
        bf16=mixed_precision == "bf16",
        fp16=mixed_precision == "fp16",
        train_sampling_strategy="group_by_length" if group_by_length else "random",
        predict_with_generate=True,  # as the model's generation config has it: the paper's beam search
        **every,
        load_best_model_at_end=True,
        metric_for_best_model="bleu",
        save_total_limit=2,  # the best and the last
        report_to=track or "none",
        push_to_hub=push_to_hub is not None,  # which makes the repository now, so that a missing token is not late news
        hub_model_id=push_to_hub,
        hub_private_repo=private or None,
        hub_strategy="end",
    )
    set_seed(arguments.seed)  # as Trainer will, which is too late for adapters: they begin at random
    trainer = Seq2SeqTrainer(
        add_adapters(tuned, lora_rank) if lora_rank else tuned,
        arguments,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, tuned),  # with the model, which shifts labels for the smoothing
        compute_metrics=make_scorer(tokenizer, tuned.config.tgt_lang),
    )
    trainer.train(resume_from_checkpoint=last_checkpoint)
    if lora_rank:
        trainer.model.save_pretrained(str(output / "adapter"), is_main_process=trainer.is_world_process_zero())
        trainer.model = trainer.model.merge_and_unload()
    trainer.model.config.use_cache = True  # Trainer turned it off for itself, and would leave it so for the users
    scores = trainer.evaluate()
    trainer.save_model()
    if push_to_hub is not None:
        trainer.push_to_hub(
            language=[tuned.config.src_lang, tuned.config.tgt_lang], tags="translation", dataset=dataset or source
        )
    if trainer.is_world_process_zero():
        typer.echo(f"{output}: validation BLEU {scores['eval_bleu']:.2f}, chrF {scores['eval_chrf']:.2f}")


def find_last_checkpoint(output: Path, resume: bool) -> str | None:
    """Where to go on from.

    Args:
        output: the run's folder, there or not.
        resume: whether going on was asked for.

    Returns:
        The last complete checkpoint's folder, `None` for a start from nothing.

    Raises:
        FileExistsError: the folder holds anything and `resume` is not set, or what is no part of an unfinished run.
    """
    names = sorted(path.name for path in output.iterdir()) if output.exists() else []
    if names and not resume:
        raise FileExistsError(f"{output} is not empty: choose another --output, or go on from it with --resume")
    foreign = [name for name in names if name != "runs" and not name.startswith("checkpoint-")]
    if foreign:
        raise FileExistsError(f"{output} holds {foreign[0]}, so it is no unfinished run: choose another --output")
    # The state is written last, so a checkpoint that was cut short by a kill has none.
    complete = [path.parent for path in output.glob("checkpoint-*/trainer_state.json")]
    last = max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    return None if last is None else str(last)


def encode(text: Bitext, tokenizer, config, max_length: int, drop_empty: bool) -> datasets.Dataset:
    """Read and tokenise text, check its ids once and for all, and leave out what is too long.

    Args:
        text: where it is.
        tokenizer: of the model.
        config: the model's; it names the languages.
        max_length: the most tokens of a side, if the model has places for as many.
        drop_empty: leave out pairs with an empty side instead of refusing them.

    Returns:
        Dataset with the columns `input_ids` and `labels`.

    Raises:
        ValueError: text that `Bitext.read` refuses, ids that are not the model's, or nothing left.
    """
    with tempfile.TemporaryDirectory() as folder:
        bitext, numbers = text.read(config, Path(folder), drop_empty)
        ids = tokenize(bitext, tokenizer)
    table = ids.data.table
    highest = max(pc.max(pc.list_flatten(table.column(side))).as_py() for side in ("input_ids", "labels"))
    if highest >= config.vocab_size or ids[0]["labels"][-1] != config.eos_token_id:
        raise ValueError(
            f"the tokenizer gives ids up to {highest} and ends a sentence in {ids[0]['labels'][-1]}, the model has "
            f"vocab_size={config.vocab_size} and eos_token_id={config.eos_token_id}: they do not belong together"
        )
    if getattr(config, "position_encoding", "learned") == "learned":
        max_length = min(max_length, config.max_position_embeddings)
    is_long = np.maximum(*pair_lengths(ids)) > max_length
    if is_long.all():
        raise ValueError(f"no pair of {text.source} has at most {max_length} tokens on both sides")
    if is_long.any():
        first = ", ".join(str(number + 1) for number in numbers[is_long][:LONGEST_LIST])
        typer.echo(
            f"{text.source}: {is_long.sum()} pairs of over {max_length} tokens left out (lines {first} …)", err=True
        )
    return ids.select(np.flatnonzero(~is_long))


def add_adapters(model, rank: int):
    """LoRA (Hu et al. 2021) on every matrix of every layer; the model's own weights are kept as they are.

    Args:
        model: `VanillaTransformerForConditionalGeneration`.
        rank: of the adapters.

    Returns:
        `PeftModel`.

    Raises:
        ValueError: PEFT is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("--lora-rank needs PEFT: pip install peft") from error
    matrices = ["q_proj", "k_proj", "v_proj", "out_proj", "w_1", "w_2"]
    return get_peft_model(
        model, LoraConfig(task_type="SEQ_2_SEQ_LM", r=rank, lora_alpha=2 * rank, target_modules=matrices)
    )


def make_scorer(tokenizer, tgt_lang: str):
    """What Trainer calls on its predictions.

    Args:
        tokenizer: of the model.
        tgt_lang: the target language.

    Returns:
        A function from ids, predicted and wanted, to sacreBLEU's BLEU and chrF.
    """

    def scores(prediction):
        hypotheses, references = (
            # Trainer pads with -100, which no tokenizer knows.
            tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)
            for ids in (prediction.predictions, prediction.label_ids)
        )
        found = score(hypotheses, references, tgt_lang)
        return {"bleu": found.bleu, "chrf": found.chrf}

    return scores


if __name__ == "__main__":
    typer.run(finetune)
