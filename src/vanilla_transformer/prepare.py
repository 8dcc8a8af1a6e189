"""From bitext to a prepared corpus, and back from the disk: the tokenizer and the tokenised splits in one folder."""

import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .checkpoint import refuse_to_replace, write_folder
from .data import LONGEST_LIST, READ_AT_ONCE, pair_lengths, pairs_with_text, read_bitext, read_dataset, tokenize
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

    def read(self, recipe: Recipe, folder: Path, drop_empty: bool) -> tuple[datasets.Dataset, np.ndarray]:
        """Dataset with the columns `source` and `target`, its text put in `folder`; and its pairs' numbers from 0."""
        if self.split is not None:
            name = f"{self.split} of {self.source}"
            bitext = read_dataset(self.source, recipe.src_lang, recipe.tgt_lang, self.split, self.config)
        else:
            name = self.source
            bitext = read_bitext(self.source, self.target, recipe.src_lang, recipe.tgt_lang, folder)
        numbers = pairs_with_text(bitext, name, drop_empty)
        return bitext if len(numbers) == len(bitext) else bitext.select(numbers), numbers


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

    Text and ids stay on the disk, beside `output` until it is done, and are never in memory whole; what takes memory is
    the count of distinct words while the vocabulary is learnt. `benchmarks/data_path.py` says how long it all takes.

    Args:
        recipe: gives the languages, the vocabulary's size and the longest sentence.
        train, validation: the text; only the first teaches the tokenizer.
        output: the folder to make.
        tokenizer: a tokenizer's folder to use in place of learning one.
        drop_empty: leave out pairs with an empty side instead of refusing them.
        num_proc: processes that tokenise; `None` for this one, whose tokenizer uses all cores by threads.
        overwrite: replace a folder of that name.
        show_progress: whether to draw progress bars.

    Returns:
        Counts by split: pairs kept, pairs left out as too long and the first of their line numbers in the text, tokens
        of either side. The vocabulary's size. The corpus' fingerprint.

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
                sentences = (text for side in ("source", "target") for text in _column(texts["train"][0], side))
                learned = train_tokenizer(sentences, recipe.vocab_size, show_progress)
            else:
                learned = AutoTokenizer.from_pretrained(tokenizer)
                _refuse_foreign_ids(learned, tokenizer)
            learned.save_pretrained(folder / "tokenizer")
            for name, (bitext, numbers) in texts.items():
                ids = tokenize(bitext, learned, name != "train", num_proc, folder=Path(scratch, name))
                kept, report[name] = _leave_out_long(name, ids, numbers, recipe.max_length)
                kept.save_to_disk(folder / name)
        report["vocab_size"] = len(learned)
        report["fingerprint"] = _fingerprint_of(folder, *(datasets.load_from_disk(folder / name) for name in texts))
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


def _column(dataset, name):
    """The texts of a column, not all in memory at once."""
    for start in range(0, len(dataset), READ_AT_ONCE):
        yield from dataset[start : start + READ_AT_ONCE][name]


def _leave_out_long(name, ids, numbers, max_length):
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
        "too_long_pairs": (numbers[long][:LONGEST_LIST] + 1).tolist(),
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
        ValueError: tokenizer or sentences are not those that `prepare` wrote.
    """
    folder = Path(folder)
    if not (folder / "corpus.json").exists():
        raise FileNotFoundError(f"{folder} holds no prepared corpus (no corpus.json): run `prepare` first")
    recorded = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))["fingerprint"]
    splits = {
        name: datasets.load_from_disk(folder / name) for name in ("train", "validation") if (folder / name).exists()
    }
    # Not taken on trust: a resumed training would go on, on other text, with nobody the wiser.
    if _fingerprint_of(folder, *splits.values()) != recorded:
        raise ValueError(
            f"{folder} is not as `prepare` wrote it: its tokenizer, its sentences or its corpus.json were exchanged "
            "or damaged since, or an older version wrote it; run `prepare` again"
        )
    return Corpus(
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        train=splits["train"],
        validation=splits.get("validation"),
        fingerprint=recorded,
    )


def _fingerprint_of(folder, *splits):
    """The fingerprint of a prepared corpus."""
    return fingerprint((folder / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"), *splits)


def fingerprint(*datasets_and_texts: datasets.Dataset | str) -> str:
    """A digest that changes with content and order of columns and texts, not with how Arrow has them in pieces.

    Args:
        datasets_and_texts: strings, and datasets whose columns are texts or lists of numbers; these are read piece by
            piece (about 1 GB a second).

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for item in datasets_and_texts:
        if isinstance(item, str):
            digest.update(hashlib.sha256(item.encode("utf-8")).digest())
            continue
        # Lengths and content apart, so that neither depends on where a piece ends.
        columns = {name: (hashlib.sha256(), hashlib.sha256()) for name in sorted(item.column_names)}
        for table in item.with_format("arrow").iter(READ_AT_ONCE):
            for name, (lengths, content) in columns.items():
                for chunk in table.column(name).chunks:
                    is_text = pa.types.is_string(chunk.type) or pa.types.is_large_string(chunk.type)
                    lengths.update((pc.binary_length if is_text else pc.list_value_length)(chunk).to_numpy())
                    content.update("".join(chunk.to_pylist()).encode() if is_text else chunk.flatten().to_numpy())
        for name, (lengths, content) in columns.items():
            digest.update(name.encode("utf-8") + lengths.digest() + content.digest())
    return digest.hexdigest()
