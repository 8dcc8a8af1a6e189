"""From bitext to batches: reading, tokenising, and sentences of like length by the budget of tokens (section 5.1).

A prepared corpus is a folder: `tokenizer/`, and for each split a `datasets` folder whose columns are `input_ids` and
`labels` (both end in `</s>`), memory-mapped when read. Splits for scoring keep their text in `source` and `target`.

Shapes: B sentences, S source tokens, T target tokens, P pairs of a corpus.
"""

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from transformers import PreTrainedTokenizerBase

LONGEST_LIST = 5  # line numbers named in a message
READ_AT_ONCE = 10_000  # pairs held in memory while reading


def read_lines(path: str | Path) -> Iterator[str]:
    """Read a text file, plain or gzipped, one sentence a line.

    Args:
        path: a file; gzip where the name ends in `.gz`.

    Yields:
        Lines without their line end.

    Raises:
        ValueError: bytes that are not UTF-8, with the line's number.
    """
    with gzip.open(path, "rb") if str(path).endswith(".gz") else open(path, "rb") as file:
        for number, line in enumerate(_until_damaged(file, path), start=1):
            try:
                # Some editors begin a file with a byte order mark.
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start} of the line); "
                    "convert the file, with iconv for example"
                ) from error


def _until_damaged(file, path):
    """Lines of a file; a gzip file that is cut off or is none is refused by its name."""
    try:
        yield from file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged or no gzip file: {error}") from error


def read_parallel_files(source: str | Path, target: str | Path) -> Iterator[tuple[str, str]]:
    """Read two files whose lines are translations of each other.

    Args:
        source, target: text files, plain or gzipped.

    Yields:
        (source sentence, target sentence).

    Raises:
        ValueError: different numbers of lines, or bytes that are not UTF-8.
    """
    source_lines, target_lines = read_lines(source), read_lines(target)
    missing = object()
    both = itertools.zip_longest(source_lines, target_lines, fillvalue=missing)
    for pairs, (source_line, target_line) in enumerate(both):
        if source_line is missing or target_line is missing:
            longer, rest = (target, target_lines) if source_line is missing else (source, source_lines)
            more = pairs + 1 + sum(1 for _ in rest)
            shorter = source if source_line is missing else target
            raise ValueError(
                f"{shorter} has {pairs} lines and {longer} has {more}: the lines of a parallel corpus must match"
            )
        yield source_line, target_line


def read_tsv(path: str | Path) -> Iterator[tuple[str, str]]:
    """Read a file of `source<TAB>target` lines, plain or gzipped.

    Args:
        path: the file.

    Yields:
        (source sentence, target sentence).

    Raises:
        ValueError: a line without exactly two columns, with its number.
    """
    for number, line in enumerate(read_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise ValueError(f"{path}, line {number}: expected source<TAB>target, got {len(columns)} columns")
        yield columns[0], columns[1]


def read_jsonl(path: str | Path, src_lang: str, tgt_lang: str) -> Iterator[tuple[str, str]]:
    """Read a file of JSON objects, one a line, plain or gzipped.

    Args:
        path: the file, of `{"en": …, "de": …}` or `{"translation": {"en": …, "de": …}}`.
        src_lang, tgt_lang: the two keys.

    Yields:
        (source sentence, target sentence).

    Raises:
        ValueError: a line that is no such object, with its number.
    """
    for number, line in enumerate(read_lines(path), start=1):
        try:
            record = json.loads(line)
            pair = record.get("translation", record)
            source, target = pair[src_lang], pair[tgt_lang]
            if not (isinstance(source, str) and isinstance(target, str)):
                raise TypeError("not text")
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with the keys {src_lang!r} and {tgt_lang!r} "
                f"and text under them, got {line[:80]!r}"
            ) from error
        yield source, target


def read_dataset(name: str, src_lang: str, tgt_lang: str, split: str, config: str | None = None) -> datasets.Dataset:
    """Read a `datasets` dataset, from a folder that `save_to_disk` wrote or from the Hub.

    Args:
        name: the folder, or the Hub's name, such as "wmt/wmt14".
        src_lang, tgt_lang: language columns, or keys of a `translation` column.
        split: "train", "validation", …
        config: the Hub's configuration, such as "de-en".

    Returns:
        Dataset with the columns `source` and `target`.

    Raises:
        ValueError: no such split or columns.
    """
    if Path(name).is_dir() and ((Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists()):
        loaded = datasets.load_from_disk(name)
        splits = loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
        if split not in splits:
            raise ValueError(f"{name} has no split {split!r}, only {sorted(splits)}")
        loaded = splits[split]
    else:
        loaded = datasets.load_dataset(name, config, split=split)
    if "translation" in loaded.column_names:
        loaded = loaded.flatten()
        columns = {f"translation.{src_lang}": "source", f"translation.{tgt_lang}": "target"}
    else:
        columns = {src_lang: "source", tgt_lang: "target"}
    absent = [column for column in columns if column not in loaded.column_names]
    if absent:
        raise ValueError(f"{name} has no column {absent[0]!r}, only {loaded.column_names}: check src_lang and tgt_lang")
    return loaded.select_columns(list(columns)).rename_columns(columns)


def read_bitext(
    source: str | Path,
    target: str | Path | None,
    src_lang: str,
    tgt_lang: str,
    folder: str | Path,
) -> datasets.Dataset:
    """Read parallel text of any kind into a dataset.

    Args:
        source: a text file with `target` beside it; or without, a `.tsv` or `.jsonl` file; `.gz` behind any of them.
        target: the file of translations, or `None`.
        src_lang, tgt_lang: languages, which are the keys of a `.jsonl` file.
        folder: where the text is put as one Arrow file, memory-mapped from then on.

    Returns:
        Dataset with the columns `source` and `target`.

    Raises:
        ValueError: files of unequal length, bytes that are not UTF-8, an unknown kind.
        FileNotFoundError: a file that is not there.
    """
    for path in (source, target):
        if path is not None and not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {path}")
    kind = Path(str(source).removesuffix(".gz")).suffix
    if target is not None:
        pairs = read_parallel_files(source, target)
    elif kind == ".tsv":
        pairs = read_tsv(source)
    elif kind == ".jsonl":
        pairs = read_jsonl(source, src_lang, tgt_lang)
    else:
        raise ValueError(f"{source} has no target beside it, and only .tsv and .jsonl files hold both sides")
    path = Path(folder) / "bitext.arrow"
    schema = pa.schema({"source": pa.string(), "target": pa.string()})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        while block := list(itertools.islice(pairs, READ_AT_ONCE)):
            writer.write(pa.record_batch([[s for s, _ in block], [t for _, t in block]], schema=schema))
    return datasets.Dataset.from_file(str(path))


def pairs_with_text(bitext: datasets.Dataset, name: str | Path, drop_empty: bool = False) -> np.ndarray:
    """Refuse pairs with nothing but white space on a side, or leave them out.

    Args:
        bitext: dataset with the columns `source` and `target`.
        name: of the text, for the message.
        drop_empty: leave such pairs out.

    Returns:
        Row numbers of all other pairs.

    Raises:
        ValueError: there are some and `drop_empty` is not set, or nothing is left.
    """
    has_text = np.zeros(len(bitext), dtype=bool)
    for start in range(0, len(bitext), READ_AT_ONCE):
        table = bitext.with_format("arrow")[start : start + READ_AT_ONCE]
        sides = [pc.fill_null(pc.utf8_trim_whitespace(table.column(side)), "") for side in ("source", "target")]
        both = pc.and_(pc.not_equal(sides[0], ""), pc.not_equal(sides[1], ""))
        has_text[start : start + READ_AT_ONCE] = both.to_numpy()
    empty = np.flatnonzero(~has_text)
    if len(empty) and not drop_empty:
        first = ", ".join(str(i + 1) for i in empty[:LONGEST_LIST]) + (", …" if len(empty) > LONGEST_LIST else "")
        raise ValueError(
            f"{len(empty)} pairs of {name} have an empty side (lines {first}): remove them, or --drop-empty"
        )
    if not has_text.any():
        raise ValueError(f"{name} holds no pairs of sentences")
    return np.flatnonzero(has_text)


def tokenize(
    bitext: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    keep_text: bool = False,
    num_proc: int | None = None,
    folder: str | Path | None = None,
) -> datasets.Dataset:
    """Turn text into ids.

    Args:
        bitext: dataset with the columns `source` and `target`.
        tokenizer: the shared one.
        keep_text: keep the two columns, for scoring.
        num_proc: processes to use; `None` for this one.
        folder: where the ids are put, memory-mapped from then on; `None` keeps them in memory.

    Returns:
        Dataset with the columns `input_ids` and `labels`, which end in `</s>`.
    """

    def to_ids(batch):
        encoded = tokenizer(batch["source"], return_attention_mask=False)
        return {
            "input_ids": encoded["input_ids"],
            "labels": tokenizer(text_target=batch["target"], return_attention_mask=False)["input_ids"],
        }

    ids = datasets.Sequence(datasets.Value("int32"))
    text = dict(bitext.features) if keep_text else {}
    return bitext.map(
        to_ids,
        batched=True,
        num_proc=num_proc,
        # Not beside the text, which may be somebody else's folder, and not from what an earlier call left there.
        cache_file_name=None if folder is None else str(Path(folder) / "ids.arrow"),
        keep_in_memory=folder is None,
        load_from_cache_file=False,
        remove_columns=[] if keep_text else bitext.column_names,
        features=datasets.Features({**text, "input_ids": ids, "labels": ids}),
        desc="tokenising",
    )


def pair_lengths(dataset: datasets.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Source and target lengths of a tokenised corpus, whose ids are not read for it.

    Args:
        dataset: with the columns `input_ids` and `labels`.

    Returns:
        Two arrays (P,) int32 of tokens, `</s>` counted.
    """
    table = dataset.data.table
    source, target = (pc.list_value_length(table.column(side)).to_numpy() for side in ("input_ids", "labels"))
    if dataset._indices is None:
        return source, target
    rows = dataset._indices.column(0).to_numpy()
    return source[rows], target[rows]


class TokenBatchSampler:
    """Batches of about `batch_tokens` source and as many target tokens, sentences of like length together (5.1).

    Pairs are sorted by their longer side, which is what the budget counts, and within one length back and forth by how
    much longer the source is, so that neighbours differ little on either side. They are cut where the padded batch
    would pass the budget, and the batches shuffled; ties are broken by chance, so that each epoch cuts other batches.
    All of it follows from seed and epoch alone. Each rank gets as many batches as the others, and none that another
    has; up to `ranks * accumulation - 1` batches, which others each epoch, are left over.

    How much is padding depends on how many batches the corpus makes. Of lengths such as Multi30k's, 20 batches hold
    9 % padding, 80 hold 4 %, and a million pairs 1 % at 25,000 tokens; a small corpus wants its step in several smaller
    batches (`accumulation`), which gives the same gradient.

    Args:
        source_lengths, target_lengths: (P,) tokens of every pair.
        batch_tokens: the most tokens of a batch on either side, padding counted.
        seed: of the shuffling.
        rank, ranks: this process, and how many there are.
        accumulation: batches that make one step of one rank.

    Raises:
        ValueError: a budget below the longest sentence, or fewer batches than one step takes.
    """

    def __init__(self, source_lengths, target_lengths, batch_tokens, seed=0, rank=0, ranks=1, accumulation=1):
        longest = max(source_lengths.max(initial=0), target_lengths.max(initial=0))
        if longest > batch_tokens:
            raise ValueError(
                f"batch_tokens={batch_tokens} is smaller than the longest sentence of {longest} tokens: "
                "raise it, or prepare the corpus with a lower max_length"
            )
        self.source_lengths, self.target_lengths = source_lengths, target_lengths
        self.batch_tokens, self.seed = batch_tokens, seed
        self.rank, self.ranks, self.accumulation = rank, ranks, accumulation
        self.epoch, self.batches_done = 0, 0

    def plan(self, epoch: int) -> list[np.ndarray]:
        """All batches of an epoch, for all ranks together.

        Args:
            epoch: counted from 0.

        Returns:
            Arrays of pair numbers, one a batch.
        """
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(np.arange(len(self.source_lengths), dtype=np.int32))
        # No length passes the budget; numbers of 16 bits are sorted several times as fast.
        small = np.int16 if self.batch_tokens <= np.iinfo(np.int16).max else np.int64
        source, target = self.source_lengths[order].astype(small), self.target_lengths[order].astype(small)
        longest = np.maximum(source, target)
        order = order[np.lexsort((np.where(longest % 2, source - target, target - source), longest))]
        starts = self._cut(np.maximum(self.source_lengths[order], self.target_lengths[order]))
        ends = [*starts[1:], len(order)]
        return [order[starts[i] : ends[i]] for i in random.permutation(len(starts))]

    def _cut(self, longest):
        """Where batches begin in the sorted corpus: as many pairs each as the budget holds with padding."""
        starts, start = [], 0
        while start < len(longest):
            starts.append(start)
            # The last pair is the longest.
            candidates = longest[start : start + self.batch_tokens // max(int(longest[start]), 1)]
            start += np.count_nonzero(candidates * np.arange(1, len(candidates) + 1) <= self.batch_tokens)
        return starts

    def state_dict(self) -> dict[str, int]:
        """The place from which `load_state_dict` goes on."""
        return {"epoch": self.epoch, "batches_done": self.batches_done}

    def load_state_dict(self, state: dict[str, int]):
        """Go on from a place that `state_dict` gave."""
        self.epoch, self.batches_done = state["epoch"], state["batches_done"]

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches of the current epoch that are not done yet."""
        batches = self.plan(self.epoch)
        together = self.ranks * self.accumulation
        if len(batches) < together:
            raise ValueError(
                f"the corpus makes {len(batches)} batches of {self.batch_tokens} tokens, too few for one step of "
                f"{self.ranks} processes with {self.accumulation} batches each: lower batch_tokens"
            )
        usable = len(batches) - len(batches) % together
        for batch in batches[self.rank : usable : self.ranks][self.batches_done :]:
            yield batch.tolist()


class PairDataset(torch.utils.data.Dataset):
    """A tokenised corpus as torch wants it, read a whole batch at a time from the memory-mapped file.

    Args:
        dataset: with the columns `input_ids` and `labels`.
        number_pairs: add a column `pair` of the pairs' numbers in the corpus, counted from 0.
    """

    def __init__(self, dataset: datasets.Dataset, number_pairs: bool = False):
        self.arrow = dataset.select_columns(["input_ids", "labels"]).with_format("arrow")
        self.number_pairs = number_pairs

    def __len__(self) -> int:
        return len(self.arrow)

    def __getitems__(self, indices: list[int]) -> pa.Table:
        """Arrow table of these pairs."""
        table = self.arrow[indices]
        return table.append_column("pair", pa.array(indices, pa.int64())) if self.number_pairs else table


class Collator:
    """Pads a table of pairs to tensors, and refuses ids that the model does not have.

    Args:
        vocab_size: of the model.
        pad_token_id: fills sources; labels are filled with -100.
    """

    def __init__(self, vocab_size: int, pad_token_id: int):
        self.vocab_size, self.pad_token_id = vocab_size, pad_token_id

    def __call__(self, table: pa.Table) -> dict[str, torch.Tensor]:
        """Make one batch.

        Args:
            table: with the columns `input_ids` and `labels`, and perhaps `pair`.

        Returns:
            `input_ids` (B, S), `attention_mask` (B, S) and `labels` (B, T), padded on the right; and `pairs` (B,),
            which is no input of the model, where the table numbers its pairs.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        input_ids, mask = self._pad(table.column("input_ids"), self.pad_token_id, "input_ids")
        labels, _ = self._pad(table.column("labels"), -100, "labels")
        batch = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
        if "pair" in table.column_names:
            batch["pairs"] = torch.tensor(table.column("pair").to_numpy())
        return batch

    def _pad(self, column, filler, name):
        # In one piece first: a batch comes in as many as it has pairs, and each would cost as much as all together.
        sentences = column.combine_chunks()
        lengths = pc.list_value_length(sentences).to_numpy()
        ids = sentences.flatten().to_numpy()
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(
                f"{name} holds the id {wrong}, but the model's vocabulary has {self.vocab_size} tokens, 0 to "
                f"{self.vocab_size - 1}: was the corpus prepared with this model's tokenizer?"
            )
        mask = np.arange(lengths.max(initial=0)) < lengths[:, None]  # (B, L)
        padded = np.full(mask.shape, filler, dtype=np.int64)
        padded[mask] = ids
        return torch.from_numpy(padded), torch.from_numpy(mask.astype(np.int64))
