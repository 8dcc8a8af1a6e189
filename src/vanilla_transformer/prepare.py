"""From bitext to a prepared corpus, and back from the disk: the tokenizer and the tokenised splits in one folder."""

import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .checkpoint import refuse_to_replace, write_folder
from .data import LONGEST_LIST, pair_lengths, read_bitext, read_dataset, refuse_empty_pairs, tokenize
from .recipe import Recipe
from .tokenizer import train_tokenizer


@dataclass(frozen=True)
class Bitext:
    """Where a split's text is.

    Args:
        source: a text file with `target` beside it, or a `.tsv` or `.jsonl` file, or the name or folder of a
            `datasets` dataset.
        target: the file of translations, or `None`.
        config, split: of the dataset; a split makes `source` a dataset's name.
    """

    source: str
    target: str | None = None
    config: str | None = None
    split: str | None = None

    def read(self, recipe: Recipe, folder: Path, drop_empty: bool) -> datasets.Dataset:
        """Dataset with the columns `source` and `target`, its text put in `folder`."""
        if self.split is not None:
            bitext = read_dataset(self.source, recipe.src_lang, recipe.tgt_lang, self.split, self.config)
            return refuse_empty_pairs(bitext, f"{self.split} of {self.source}", drop_empty)
        return read_bitext(self.source, self.target, recipe.src_lang, recipe.tgt_lang, folder, drop_empty)


def prepare(
    recipe: Recipe,
    train: Bitext,
    validation: Bitext | None,
    output: str | Path,
    tokenizer: str | Path | None = None,
    drop_empty: bool = False,
    num_proc: int | None = None,
    overwrite: bool = False,
    show_progress: bool = True,
) -> dict:
    """Read, learn the vocabulary, tokenise, and leave out what is too long.

    Args:
        recipe: gives the languages, the vocabulary's size and the longest sentence.
        train, validation: the text; only the first teaches the tokenizer.
        output: the folder to make.
        tokenizer: a tokenizer's folder to use in place of learning one.
        drop_empty: leave out pairs with an empty side instead of refusing them.
        num_proc: processes that tokenise.
        overwrite: replace a folder of that name.
        show_progress: whether to draw progress bars.

    Returns:
        Counts by split: pairs kept, pairs left out as too long and the first of their numbers, tokens of either side.

    Raises:
        FileExistsError: the output exists, and `overwrite` is not set.
        ValueError: text that `read_bitext` refuses, or nothing left of a split.
    """
    output = Path(output)
    refuse_to_replace(output, overwrite, mark="corpus.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    (datasets.enable_progress_bars if show_progress else datasets.disable_progress_bars)()
    report = {}

    def write(folder):
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-text-") as scratch:
            splits = {"train": train} if validation is None else {"train": train, "validation": validation}
            for name in splits:
                Path(scratch, name).mkdir()
            texts = {name: split.read(recipe, Path(scratch, name), drop_empty) for name, split in splits.items()}
            if tokenizer is None:
                sentences = (text for side in ("source", "target") for text in _column(texts["train"], side))
                learned = train_tokenizer(sentences, recipe.vocab_size, show_progress)
            else:
                learned = AutoTokenizer.from_pretrained(tokenizer)
                _refuse_foreign_ids(learned, tokenizer)
            learned.save_pretrained(folder / "tokenizer")
            kept = {}
            for name, bitext in texts.items():
                ids = tokenize(bitext, learned, name != "train", num_proc, folder=Path(scratch, name))
                kept[name], report[name] = _leave_out_long(name, ids, recipe.max_length)
                kept[name].save_to_disk(folder / name)
        report["vocab_size"] = len(learned)
        report["fingerprint"] = fingerprint(
            (folder / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"), *kept.values()
        )
        (folder / "corpus.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    write_folder(output, write, overwrite, mark="corpus.json")
    return report


def _refuse_foreign_ids(tokenizer, name):
    """Refuse a tokenizer whose special symbols are not where the model's configuration has them."""
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    if ids != (0, 1, 2) or tokenizer("a")["input_ids"][-1] != 2:
        raise ValueError(
            f"{name} has pad, bos and eos at {ids} and encodes 'a' as {tokenizer('a')['input_ids']}: "
            "they must be 0, 1 and 2, and every sentence must end in eos, as `train_tokenizer` makes it"
        )


def _column(dataset, name, at_once=10_000):
    """The texts of a column, not all in memory at once."""
    for start in range(0, len(dataset), at_once):
        yield from dataset[start : start + at_once][name]


def _leave_out_long(name, ids, max_length):
    """Drop pairs with a side of more than `max_length` tokens; returns what is left, and the counts."""
    source, target = pair_lengths(ids)
    long = np.maximum(source, target) > max_length
    if long.all():
        raise ValueError(f"no pair of the {name} split has at most max_length={max_length} tokens on both sides")
    if long.any():
        ids = ids.select(np.flatnonzero(~long))
    return ids, {
        "pairs": int((~long).sum()),
        "too_long": int(long.sum()),
        "too_long_pairs": (np.flatnonzero(long)[:LONGEST_LIST] + 1).tolist(),
        "source_tokens": int(source[~long].sum()),
        "target_tokens": int(target[~long].sum()),
    }


@dataclass
class Corpus:
    """A folder that `prepare` made.

    Args:
        tokenizer: the shared one.
        train, validation: tokenised splits; the second keeps its text.
        fingerprint: changes with the text and with the tokenizer.
    """

    tokenizer: PreTrainedTokenizerBase
    train: datasets.Dataset
    validation: datasets.Dataset | None
    fingerprint: str


def load_corpus(folder: str | Path) -> Corpus:
    """Open a prepared corpus, memory-mapped.

    Args:
        folder: what `prepare` wrote.

    Returns:
        `Corpus`.

    Raises:
        FileNotFoundError: no such folder, or one that holds no prepared corpus.
    """
    folder = Path(folder)
    if not (folder / "corpus.json").exists():
        raise FileNotFoundError(f"{folder} holds no prepared corpus (no corpus.json): run `prepare` first")
    validation = folder / "validation"
    return Corpus(
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        train=datasets.load_from_disk(folder / "train"),
        validation=datasets.load_from_disk(validation) if validation.exists() else None,
        fingerprint=json.loads((folder / "corpus.json").read_text(encoding="utf-8"))["fingerprint"],
    )


def fingerprint(*datasets_and_texts) -> str:
    """A digest that changes with the content of Arrow columns and texts.

    Args:
        datasets_and_texts: `datasets.Dataset` objects and strings.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for item in datasets_and_texts:
        if isinstance(item, str):
            digest.update(item.encode("utf-8"))
            continue
        for name in sorted(item.column_names):
            for chunk in item.with_format("arrow")[:].column(name).chunks:
                for buffer in chunk.buffers():
                    if buffer is not None:
                        digest.update(buffer)
    return digest.hexdigest()
