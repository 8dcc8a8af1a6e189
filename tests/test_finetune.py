"""Fine-tuning with the stock Trainer: its gradient, the script `train/finetune.py`, and code from a folder."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
import typer
from hub_double import HubDouble
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)
from typer.testing import CliRunner

import vanilla_transformer
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.evaluation import score, translate
from vanilla_transformer.tokenizer import train_tokenizer

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "train" / "finetune.py"
SHIPPED = ROOT / "model_cards" / "vanilla-transformer-tiny-multi30k-en-de"
SOURCES = ["a dog", "two dogs run", "a man and a dog", "run", "a man", "the man runs", "two men", "a dog runs"]
TARGETS = ["ein Hund", "zwei Hunde rennen", "ein Mann und ein Hund", "renn", "ein Mann", "der Mann rennt"]
TARGETS += ["zwei Männer", "ein Hund rennt"]
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="PEFT is not installed")


@pytest.fixture(scope="module")
def finetune():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("finetune", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with its tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tokenizer = train_tokenizer([*SOURCES, *TARGETS], vocab_size=280)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        vocab_size=len(tokenizer),
        d_model=16,
        d_ff=16,
        num_heads=2,
        encoder_layers=1,
        decoder_layers=1,
        src_lang="en",
        tgt_lang="de",
    )
    model = VanillaTransformerForConditionalGeneration(config)
    model.generation_config.max_new_tokens_over_source = 2  # it knows no end yet
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The arguments that name parallel files of eight pairs."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "en").write_text("".join(f"{line}\n" for line in SOURCES), encoding="utf-8")
    (folder / "de").write_text("".join(f"{line}\n" for line in TARGETS), encoding="utf-8")
    names = ("--source", "--target", "--validation-source", "--validation-target")
    return [part for name, file in zip(names, ("en", "de") * 2, strict=True) for part in (name, folder / file)]


@pytest.fixture
def run(finetune, model, text, monkeypatch):
    """Run the script in this process on the tiny model and text; small batches make eight pairs an epoch of two."""
    monkeypatch.setattr(finetune, "Seq2SeqTrainingArguments", functools.partial(Seq2SeqTrainingArguments, use_cpu=True))

    def run(output, *arguments, model=model, text=text):
        app = typer.Typer()
        app.command()(finetune.finetune)
        command = [model, "--output", output, *text, "--batch-size", 4, "--learning-rate", 1e-2, *arguments]
        return CliRunner().invoke(app, [str(part) for part in command], catch_exceptions=False)

    return run


def weights(folder):
    """Of the model, or of the adapters alone."""
    (file,) = Path(folder).glob("*model.safetensors")
    return load_file(file)


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


# The gradient


def ragged_pairs(padding_only=()):
    """16 pairs of 2 to 20 tokens; those named have nothing to predict."""
    random = torch.Generator().manual_seed(1)

    def sentence():
        length = int(torch.randint(1, 20, (), generator=random))
        return [*torch.randint(4, 50, (length,), generator=random).tolist(), 2]

    pairs = [{"input_ids": sentence(), "labels": sentence()} for _ in range(16)]
    for i in padding_only:
        pairs[i]["labels"] = [-100, -100]
    return pairs


def tiny_model():
    torch.manual_seed(0)
    return VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(
            vocab_size=50, d_model=16, d_ff=32, num_heads=2, encoder_layers=2, decoder_layers=2, dropout=0.0
        )
    )


def update_by_trainer(pairs, batch_size, accumulation, label_smoothing, folder):
    """What one step of SGD on 16 pairs with rate 1 changes, by the stock Trainer."""
    model = tiny_model()
    arguments = Seq2SeqTrainingArguments(
        str(folder),
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=1,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        label_smoothing_factor=label_smoothing,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)  # for padding alone
    data = datasets.Dataset.from_list(pairs)
    trainer = Seq2SeqTrainer(
        model, arguments, train_dataset=data, data_collator=DataCollatorForSeq2Seq(tokenizer, model)
    )
    trainer.train()
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def update_by_hand(pairs, label_smoothing):
    """The same from torch's loss, summed over the pairs one by one and divided by all that is predicted."""
    model = tiny_model()
    pairs = [pair for pair in pairs if pair["labels"][0] != -100]
    for pair in pairs:
        labels = torch.tensor(pair["labels"])
        shifted = torch.tensor([[1, *pair["labels"][:-1]]])
        logits = model(input_ids=torch.tensor([pair["input_ids"]]), decoder_input_ids=shifted).logits[0]
        F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing).backward()
    count = sum(len(pair["labels"]) for pair in pairs)
    return {name: -parameter.grad / count for name, parameter in model.named_parameters()}


def distance(one, other):
    """||one - other|| / ||other||, over all parameters."""
    error = sum((one[name] - other[name]).double().square().sum() for name in other)
    return float((error / sum(tensor.double().square().sum() for tensor in other.values())).sqrt())


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("batch_size", "accumulation"), [(16, 1), (4, 4)])
def test_the_update_is_that_of_the_global_batch(batch_size, accumulation, label_smoothing, tmp_path):
    pairs = ragged_pairs()
    update = update_by_trainer(pairs, batch_size, accumulation, label_smoothing, tmp_path)
    assert distance(update, update_by_hand(pairs, label_smoothing)) < 1e-5


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_micro_batches_of_padding_alone_count_for_nothing(label_smoothing, tmp_path):
    pairs = ragged_pairs(padding_only=range(4, 8))
    update = update_by_trainer(pairs, 4, 4, label_smoothing, tmp_path)
    assert distance(update, update_by_hand(pairs, label_smoothing)) < 1e-5


def main_of_several_processes(folder):
    """What `torchrun` runs in each of two processes."""
    for batch_size, accumulation in ((8, 1), (4, 2)):
        for label_smoothing in (0.0, 0.1):
            # The second micro-batch of the second process is padding alone.
            pairs = ragged_pairs(padding_only=range(12, 16))
            update = update_by_trainer(pairs, batch_size, accumulation, label_smoothing, folder / "trainer")
            if os.environ["RANK"] == "0":
                torch.save(update, folder / f"{accumulation}-{label_smoothing}")


def run_in_two_processes(script, *arguments):
    paths = [str(Path(vanilla_transformer.__file__).parents[1]), str(Path(__file__).parent)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, *arguments]
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_processes_make_the_update_of_the_global_batch(tmp_path):
    code = f"import pathlib, test_finetune; test_finetune.main_of_several_processes(pathlib.Path({str(tmp_path)!r}))"
    (tmp_path / "main.py").write_text(code, encoding="utf-8")
    run_in_two_processes(tmp_path / "main.py")
    for label_smoothing in (0.0, 0.1):
        by_hand = update_by_hand(ragged_pairs(padding_only=range(12, 16)), label_smoothing)
        for accumulation in (1, 2):
            update = torch.load(tmp_path / f"{accumulation}-{label_smoothing}", weights_only=True)
            assert distance(update, by_hand) < 1e-5


# The script


def test_the_output_is_a_model_with_tokenizer_languages_and_code(run, model, tmp_path):
    result = run(tmp_path / "out", "--epochs", 2)
    assert result.exit_code == 0, result.output
    assert "validation BLEU" in result.stdout.splitlines()[-1]
    tuned = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert (tuned.config.src_lang, tuned.config.tgt_lang, tuned.config.use_cache) == ("en", "de", True)
    assert tuned.generation_config.gnmt_alpha == 0.6 and tuned.generation_config.max_length is None
    assert not torch.equal(tuned.lm_head.weight, AutoModelForSeq2SeqLM.from_pretrained(model).lm_head.weight)
    assert translate(tuned, AutoTokenizer.from_pretrained(tmp_path / "out"), ["a dog"])
    assert {"modeling_vanilla_transformer.py", "pipeline_vanilla_transformer.py"} <= names_in(tmp_path / "out")
    assert {"checkpoint-2", "checkpoint-4"} <= names_in(tmp_path / "out")


def test_the_bleu_that_is_reported_is_that_of_the_pipeline(run, tmp_path):
    lines = ["A man is riding a bicycle.", "Two women are talking.", "A dog runs on the beach."]
    references = ["Ein Mann fährt Fahrrad.", "Zwei Frauen unterhalten sich.", "Ein Hund rennt am Strand entlang."]
    (tmp_path / "en").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "de").write_text("\n".join(references), encoding="utf-8")
    files = ["--source", tmp_path / "en", "--target", tmp_path / "de"]
    files += ["--validation-source", tmp_path / "en", "--validation-target", tmp_path / "de"]
    result = run(tmp_path / "out", "--learning-rate", 0, "--epochs", 1, model=SHIPPED, text=files)
    assert_same(weights(tmp_path / "out"), weights(SHIPPED))
    shipped = AutoModelForSeq2SeqLM.from_pretrained(SHIPPED)
    scores = score(translate(shipped, AutoTokenizer.from_pretrained(SHIPPED), lines), references, "de")
    assert f"BLEU {scores.bleu:.2f}, chrF {scores.chrf:.2f}" in result.stdout and scores.bleu > 20


def test_the_best_state_by_bleu_is_what_comes_out(run, finetune, tmp_path, monkeypatch):
    bleus = iter([3.0, 9.0, 1.0, 9.0])

    class Scores:
        chrf = 0.0

        def __init__(self, *_):
            self.bleu = next(bleus)

    monkeypatch.setattr(finetune, "score", Scores)
    assert run(tmp_path, "--epochs", 3).exit_code == 0
    assert {"checkpoint-4", "checkpoint-6"} <= names_in(tmp_path)
    assert_same(weights(tmp_path), weights(tmp_path / "checkpoint-4"))
    assert not torch.equal(
        weights(tmp_path)["model.encoder.embed_tokens.weight"],
        weights(tmp_path / "checkpoint-6")["model.encoder.embed_tokens.weight"],
    )


def interrupt_at(monkeypatch, step):
    """Raise `KeyboardInterrupt` at that training step, counted from 1; returns a list of all that are begun."""
    begun, whole = [], Seq2SeqTrainer.training_step

    def training_step(self, *args, **kwargs):
        begun.append(self.state.global_step + 1)
        if len(begun) == step:
            raise KeyboardInterrupt
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(Seq2SeqTrainer, "training_step", training_step)
    return begun


@pytest.mark.parametrize(
    ("options", "last"),
    [
        pytest.param(["--evaluate-every", "3"], 3, id="in an epoch"),
        pytest.param(["--group-by-length"], 4, id="between epochs"),
        pytest.param(["--evaluate-every", "3", "--lora-rank", "2"], 3, id="adapters", marks=needs_peft),
    ],
)
def test_a_killed_run_resumes_to_the_same_weights(run, options, last, tmp_path, monkeypatch):
    options = ["--epochs", 3, *options]  # 6 steps, with dropout; checkpoints at 3 and 6, or at 2, 4 and 6
    run(tmp_path / "straight", *options)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5)
        run(tmp_path / "killed", *options)
    (tmp_path / "killed" / "checkpoint-5").mkdir()  # cut short: no state in it
    begun = interrupt_at(monkeypatch, None)
    result = run(tmp_path / "killed", *options, "--resume")
    assert result.exit_code == 0, result.output
    assert begun == list(range(last + 1, 7))
    assert_same(weights(tmp_path / "killed" / "checkpoint-6"), weights(tmp_path / "straight" / "checkpoint-6"))
    assert_same(weights(tmp_path / "killed"), weights(tmp_path / "straight"))


def test_nothing_that_lies_in_the_output_is_written_over(run, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
    result = run(tmp_path)
    assert result.exit_code == 1 and "is not empty" in result.stderr and "--resume" in result.stderr
    result = run(tmp_path, "--resume")
    assert result.exit_code == 1 and "holds thesis.txt, so it is no unfinished run" in result.stderr
    assert names_in(tmp_path) == {"thesis.txt"}


def test_a_finished_run_is_left_as_it_is(run, tmp_path):
    run(tmp_path, "--epochs", 1)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    result = run(tmp_path, "--epochs", 2, "--resume")
    assert result.exit_code == 1 and "so it is no unfinished run" in result.stderr
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([], "give either --source"),
        (["--source", "a.en", "--dataset", "made"], "give either --source"),
        (["--source", "a.en", "--target", "a.de"], "give --validation-source"),
        (["--dataset", "made", "--validation-source", "b.tsv"], "go with --source"),
        (["--source", "a.tsv", "--validation-source", "b.tsv", "--config", "de-en"], "goes with --dataset"),
        (["--source", "a.en", "--target", "a.de", "--validation-source", "b.tsv"], "there is no file a.en"),
    ],
)
def test_text_that_is_missing_is_asked_for_by_name(run, text, message, tmp_path):
    result = run(tmp_path / "out", text=text)
    assert result.exit_code in (1, 2) and message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_model_without_languages_needs_them_and_keeps_them(run, model, tmp_path):
    nameless = tmp_path / "nameless"
    AutoModelForSeq2SeqLM.from_pretrained(model, src_lang=None, tgt_lang=None).save_pretrained(nameless)
    AutoTokenizer.from_pretrained(model).save_pretrained(nameless)
    result = run(tmp_path / "out", model=nameless)
    assert result.exit_code == 1 and "pass --src-lang and --tgt-lang" in result.stderr
    run(tmp_path / "out", "--src-lang", "en", "--tgt-lang", "de", "--epochs", 1, model=nameless)
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").config
    assert (config.src_lang, config.tgt_lang) == ("en", "de")


def test_a_tokenizer_of_another_model_is_refused_before_training(run, model, tmp_path):
    AutoModelForSeq2SeqLM.from_pretrained(model).save_pretrained(tmp_path / "mixed")
    AutoTokenizer.from_pretrained(SHIPPED).save_pretrained(tmp_path / "mixed")
    result = run(tmp_path / "out", model=tmp_path / "mixed")
    assert result.exit_code == 1 and "they do not belong together" in result.stderr
    assert "vocab_size=280" in result.stderr
    assert not (tmp_path / "out").exists()


def test_pairs_that_are_too_long_are_left_out_and_named(run, tmp_path):
    result = run(tmp_path / "out", "--epochs", 1, "--max-length", 3)
    assert "en: " in result.stderr and "of over 3 tokens left out (lines " in result.stderr
    result = run(tmp_path / "none", "--max-length", 1)
    assert result.exit_code == 1 and "has at most 1 tokens" in result.stderr


def test_learned_positions_set_the_longest_pair(run, model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = VanillaTransformerConfig.from_pretrained(model, position_encoding="learned", max_position_embeddings=6)
    VanillaTransformerForConditionalGeneration(config).save_pretrained(tmp_path / "learned")
    tokenizer.save_pretrained(tmp_path / "learned")
    result = run(tmp_path / "out", "--epochs", 1, model=tmp_path / "learned")
    assert result.exit_code == 0 and "of over 6 tokens left out" in result.stderr


def test_a_dataset_serves_as_well(run, tmp_path):
    pairs = [{"translation": {"en": en, "de": de}} for en, de in zip(SOURCES, TARGETS, strict=True)]
    split = datasets.Dataset.from_list(pairs)
    datasets.DatasetDict({"train": split, "dev": split}).save_to_disk(tmp_path / "made")
    text = ["--dataset", tmp_path / "made", "--validation-split", "dev"]
    result = run(tmp_path / "out", "--epochs", 1, text=text)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "model.safetensors").exists()


@needs_peft
def test_adapters_alone_are_trained_and_merged_into_the_model(run, model, tmp_path):
    from peft import PeftModel

    result = run(tmp_path / "out", "--epochs", 1, "--lora-rank", 2)
    assert result.exit_code == 0, result.output
    base, merged = weights(model), weights(tmp_path / "out")
    changed = {name.split(".")[-2] for name in merged if not torch.equal(merged[name], base[name])}
    assert merged.keys() == base.keys()
    assert changed == {"q_proj", "k_proj", "v_proj", "out_proj", "w_1", "w_2"}
    assert "adapter_model.safetensors" in names_in(tmp_path / "out" / "checkpoint-2")
    adapted = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(model), tmp_path / "out" / "adapter")
    inputs = {"input_ids": torch.tensor([[5, 6, 2]]), "decoder_input_ids": torch.tensor([[1, 7]])}
    tuned = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(tuned(**inputs).logits, adapted.eval()(**inputs).logits)


def test_adapters_without_peft_say_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    result = run(tmp_path / "out", "--lora-rank", 2)
    assert result.exit_code == 1 and "pip install peft" in result.stderr


def test_the_readmes_lines_run(tmp_path, monkeypatch):
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Fine-tune")[1]
    code = section.split("```python\n")[1].split("```")[0]
    pairs = [json.dumps({"en": en, "de": de}) for en, de in zip(SOURCES, TARGETS, strict=True)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs), encoding="utf-8")
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    exec(compile(code, "README.md", "exec"), {})
    tuned = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "runs" / "tuned" / "model")
    assert not torch.equal(tuned.lm_head.weight, AutoModelForSeq2SeqLM.from_pretrained(SHIPPED).lm_head.weight)


# Processes of their own


@pytest.mark.slow
def test_two_processes_fine_tune_as_one_does(model, text, tmp_path):
    torch.manual_seed(0)
    still = tmp_path / "model"
    AutoModelForSeq2SeqLM.from_pretrained(model, dropout=0.0).save_pretrained(still)
    AutoTokenizer.from_pretrained(model).save_pretrained(still)
    options = [*text, "--epochs", 2, "--learning-rate", 1e-3]
    printed = run_in_two_processes(SCRIPT, still, "--output", tmp_path / "two", "--batch-size", 2, *options)
    assert printed.count("validation BLEU") == 1
    command = [sys.executable, SCRIPT, still, "--output", tmp_path / "one", "--batch-size", 4, *options]
    path = str(Path(vanilla_transformer.__file__).parents[1])
    subprocess.run([str(part) for part in command], check=True, env={**os.environ, "PYTHONPATH": path})
    torch.testing.assert_close(weights(tmp_path / "two"), weights(tmp_path / "one"), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_tuned_model_goes_to_the_hub_without_its_checkpoints(model, text, tmp_path):
    with HubDouble() as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": "hf_made_up",
            "HF_HOME": str(tmp_path / "home"),
        }
        environment |= {"PYTHONPATH": str(Path(vanilla_transformer.__file__).parents[1])}
        environment.pop("HF_HUB_OFFLINE", None)
        command = [sys.executable, SCRIPT, model, "--output", tmp_path / "out", *text, "--epochs", 1]
        command += ["--push-to-hub", "user/tuned"]
        done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        pushed = hub.repositories["user/tuned"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "modeling_vanilla_transformer.py"} <= set(pushed)
    assert not [name for name in pushed if name.startswith("checkpoint-")]
    assert pushed["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
    card = pushed["README.md"].decode()
    assert "- en\n- de\n" in card and "- translation\n" in card and "\n- Bleu: " in card


WITHOUT_THE_PACKAGE = """
import importlib.util, json, sys
import numpy as np, sacrebleu
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, pipeline
)
assert importlib.util.find_spec("vanilla_transformer") is None
folder, pairs, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
pairs = load_dataset("json", data_files=pairs, split="train")
data = pairs.map(lambda pair: tokenizer(pair["en"], text_target=pair["de"]), remove_columns=pairs.column_names)
arguments = Seq2SeqTrainingArguments(
    output, learning_rate=1e-2, label_smoothing_factor=0.1, num_train_epochs=30, per_device_train_batch_size=4,
    gradient_accumulation_steps=2, predict_with_generate=True, report_to="none", use_cpu=True, save_strategy="no",
)
trainer = Seq2SeqTrainer(
    model, arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model),
)
before = trainer.evaluate()["eval_loss"]
trainer.train()
after = trainer.evaluate()["eval_loss"]
trainer.save_model(output)
again = pipeline("translation", model=output, trust_remote_code=True)
print("\\n" + json.dumps([before, after, type(again.model).__module__, again("a dog"), model.config.architectures]))
"""


@pytest.mark.slow
def test_a_model_by_remote_code_is_fine_tuned_saved_and_loaded_where_the_package_is_not_installed(model, tmp_path):
    pairs = [json.dumps({"en": en, "de": de}) for en, de in zip(SOURCES, TARGETS, strict=True)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs), encoding="utf-8")
    # -S leaves out site's path files, by which an editable installation is found; the libraries are put back by hand.
    libraries = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    code = f"import sys; sys.path += {libraries!r}\n{WITHOUT_THE_PACKAGE}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, model, tmp_path / "pairs.jsonl", tmp_path / "out"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    before, after, module, translations, architectures = json.loads(done.stdout.splitlines()[-1])
    assert after < before / 2
    assert module.startswith("transformers_modules.") and translations[0]["translation_text"]
    assert architectures == ["VanillaTransformerForConditionalGeneration"]
    # And with the package installed, as any other folder.
    assert type(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")) is VanillaTransformerForConditionalGeneration
