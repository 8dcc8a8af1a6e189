"""The data path at the size of WMT14, on made text: planning an epoch, padding, batches a second, preparation.

    python benchmarks/data_path.py
    python benchmarks/data_path.py --part plan --pairs 36000000
    python benchmarks/data_path.py --part plan --pairs 29000 --lengths multi30k
    python benchmarks/data_path.py --part prepare --text-pairs 4500000 --processes 2

Nothing is downloaded. Lengths are lognormal, as those of Multi30k (15 tokens on average) or WMT14 (30); words are
random letters, drawn by Zipf's law. Every part runs in a process of its own, whose peak of memory is printed beside
what it held before the part began; pages of memory-mapped files count as memory.
"""

import itertools
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Literal

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import typer
from transformers import AutoTokenizer

from vanilla_transformer.data import Collator, PairDataset, TokenBatchSampler, pair_lengths, read_lines, tokenize
from vanilla_transformer.prepare import Bitext, load_corpus, prepare
from vanilla_transformer.recipe import Recipe

# Mean and deviation of the logarithm of source lengths; deviation of that of the targets' ratio to them.
LENGTHS = {"multi30k": (2.66, 0.3, 0.16), "wmt": (3.2, 0.6, 0.2)}
LONGEST = 255
VOCABULARY = 37_000
AT_ONCE = 100_000  # pairs made together


def peak_megabytes(who=resource.RUSAGE_SELF):
    """The most memory that this process, or one of its children, ever held."""
    return resource.getrusage(who).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def apart(part, *arguments):
    """Run a part in a fresh process, which may start others."""
    process = multiprocessing.get_context("spawn").Process(target=part, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise typer.Exit(process.exitcode)


def made_lengths(pairs, kind, random):
    """Source and target lengths (P,) of made sentences."""
    mean, deviation, of_ratio = LENGTHS[kind]
    source = random.lognormal(mean, deviation, pairs).astype(np.float32)
    target = source * random.lognormal(0, of_ratio, pairs).astype(np.float32)
    return tuple(np.clip(side + 1, 2, LONGEST).astype(np.int32) for side in (source, target))


def plan(pairs, kind, batch_tokens):
    """Time, memory and padding of an epoch's plan."""
    sampler = TokenBatchSampler(*made_lengths(pairs, kind, np.random.default_rng(0)), batch_tokens)
    before, begin, begin_busy = peak_megabytes(), time.perf_counter(), time.process_time()
    batches = sampler.plan(0)
    seconds, busy, peak = time.perf_counter() - begin, time.process_time() - begin_busy, peak_megabytes()
    source, target = sampler.source_lengths, sampler.target_lengths
    cells = sum(len(batch) * (int(source[batch].max()) + int(target[batch].max())) for batch in batches)
    padding = 1 - (int(source.sum(dtype=np.int64)) + int(target.sum(dtype=np.int64))) / cells
    print(
        f"plan of {pairs:,} pairs like {kind}'s: {seconds:.2f} s ({busy:.2f} s of a processor), memory {peak:,.0f} MB "
        f"({before:,.0f} before); {len(batches):,} batches of {batch_tokens:,}, {padding:.2%} padding",
        flush=True,
    )


def write_ids(path, pairs, kind):
    """A tokenised corpus of random ids as `prepare` leaves one."""
    random = np.random.default_rng(0)
    schema = pa.schema({side: pa.list_(pa.int32()) for side in ("input_ids", "labels")})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for start in range(0, pairs, AT_ONCE):
            sides = []
            for lengths in made_lengths(min(AT_ONCE, pairs - start), kind, random):
                ids = random.integers(4, VOCABULARY, lengths.sum(), dtype=np.int32)
                offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
                sides.append(pa.ListArray.from_arrays(offsets, ids))
            # In the pieces that `datasets` writes.
            writer.write_table(pa.table(sides, schema=schema), max_chunksize=datasets.config.DEFAULT_MAX_BATCH_SIZE)


def worker(folder, pairs, kind, batch_tokens, batches):
    """Target tokens a second that one worker of a loader delivers from the page cache."""
    path = Path(folder) / "ids.arrow"
    write_ids(path, pairs, kind)
    path.read_bytes()  # into the page cache
    corpus = datasets.Dataset.from_file(str(path))
    lengths = pair_lengths(corpus)
    plan = TokenBatchSampler(*lengths, batch_tokens).plan(0)[: batches + 1]
    loader = torch.utils.data.DataLoader(
        PairDataset(corpus), batch_sampler=plan, collate_fn=Collator(VOCABULARY, 0), num_workers=1
    )
    delivered = iter(loader)
    next(delivered)  # the worker's start
    begin = time.perf_counter()
    for _ in delivered:
        pass
    seconds = time.perf_counter() - begin
    tokens = sum(int(lengths[1][batch].sum()) for batch in plan[1:])
    print(
        f"one worker over {pairs:,} pairs like {kind}'s: {tokens / seconds:,.0f} target tokens/s "
        f"({len(plan) - 1} batches of {batch_tokens:,} tokens, from the page cache)",
        flush=True,
    )


def made_text(folder, pairs, kind):
    """Two files of made sentences, of as many words as `made_lengths` says, drawn from 1,000,000 by Zipf's law."""
    random = np.random.default_rng(0)
    ranks = np.arange(1, 1_000_001)
    share = (1 / (ranks + 2.7) ** 1.07).cumsum()
    letters = random.choice(list("abcdefghijklmnopqrstuvwxyzäöüß"), (len(ranks), 16))
    lengths = 1 + np.log(ranks).astype(int) + random.integers(0, 2, len(ranks))  # frequent words are short
    words = pa.array(["".join(row[:length]) for row, length in zip(letters, lengths, strict=True)])
    files = [Path(folder) / f"made.{side}" for side in ("source", "target")]
    with open(files[0], "wb") as source, open(files[1], "wb") as target:
        for start in range(0, pairs, AT_ONCE):
            sides = made_lengths(min(AT_ONCE, pairs - start), kind, random)
            for file, lengths in zip((source, target), sides, strict=True):
                drawn = words.take(pa.array(np.searchsorted(share, random.random(lengths.sum()) * share[-1])))
                offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
                sentences = pc.binary_join(pa.ListArray.from_arrays(offsets, drawn), " ")
                file.write(("\n".join(sentences.to_pylist()) + "\n").encode())
    return files


def preparation(folder, files, processes):
    """Time and memory of all of `prepare`, and of opening what it wrote."""
    before, begin = peak_megabytes(), time.perf_counter()
    recipe = Recipe(src_lang="source", tgt_lang="target", vocab_size=VOCABULARY)
    report = prepare(recipe, Bitext(*map(str, files)), None, Path(folder) / "corpus", num_proc=processes)
    seconds, peak = time.perf_counter() - begin, peak_megabytes()
    begin = time.perf_counter()
    load_corpus(Path(folder) / "corpus")
    print(
        f"prepare of {report['train']['pairs']:,} pairs by {processes} processes: {seconds:,.0f} s, memory {peak:,.0f} "
        f"MB ({before:,.0f} before; {peak_megabytes(resource.RUSAGE_CHILDREN):,.0f} the largest tokenising process); "
        f"opened again in {time.perf_counter() - begin:.1f} s",
        flush=True,
    )


def tokenising(folder, files, processes):
    """Tokens of both sides a second that `tokenize` makes of the first pairs of some files."""
    tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "corpus" / "tokenizer")
    sides = [list(itertools.islice(read_lines(file), AT_ONCE)) for file in files]
    bitext = datasets.Dataset.from_dict({"source": sides[0], "target": sides[1]})
    begin = time.perf_counter()
    ids = tokenize(bitext, tokenizer, num_proc=processes, folder=folder)
    seconds = time.perf_counter() - begin
    tokens = sum(int(lengths.sum()) for lengths in pair_lengths(ids))
    print(
        f"tokenising by {processes} processes: {tokens / seconds:,.0f} tokens/s, {len(ids) / seconds:,.0f} pairs/s",
        flush=True,
    )


def main(
    part: Annotated[Literal["all", "plan", "worker", "prepare"], typer.Option(help="What to measure.")] = "all",
    pairs: Annotated[int, typer.Option(help="Pairs that are planned, and that the worker reads from.")] = 4_500_000,
    lengths: Annotated[Literal["multi30k", "wmt"], typer.Option(help="What their lengths are like.")] = "wmt",
    batch_tokens: Annotated[int, typer.Option(help="Budget of a batch on either side.")] = 25_000,
    batches: Annotated[int, typer.Option(help="Batches that the worker delivers.")] = 400,
    text_pairs: Annotated[int, typer.Option(help="Pairs of text that are prepared.")] = 100_000,
    processes: Annotated[int, typer.Option(help="Processes that tokenise, beside a run with one.")] = 2,
):
    """Print how long every part takes on this machine, and how much memory."""
    print(f"made text, no real corpus; {os.cpu_count()} processors")
    with tempfile.TemporaryDirectory(prefix="data-path-") as folder:
        if part in ("all", "plan"):
            apart(plan, pairs, lengths, batch_tokens)
        if part in ("all", "worker"):
            apart(worker, folder, pairs, lengths, batch_tokens, batches)
        if part in ("all", "prepare"):
            files = made_text(folder, text_pairs, lengths)
            apart(preparation, folder, files, processes)
            for number in sorted({1, processes}):
                apart(tokenising, folder, files, number)


if __name__ == "__main__":
    typer.run(main)
