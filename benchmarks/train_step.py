"""Training speed and memory beside other implementations of the same model, on a CPU.

    python benchmarks/train_step.py base             # the paper's base model, 32 pairs of 64 and 64 tokens
    python benchmarks/train_step.py base --bf16      # under bfloat16 autocast
    python benchmarks/train_step.py ragged           # pairs of 8 to 64 tokens, each side with its own batching
    python benchmarks/train_step.py epoch            # the tiny recipe's model, one epoch, data loading and all
    python benchmarks/train_step.py epoch --source train.en.gz --target train.de.gz
    python benchmarks/train_step.py base --threads 1 --clock cpu    # on a machine that is busy with other work

Every implementation runs in a process of its own, in which its peak of memory is measured, all of it: what importing
torch takes is part of it. One step (or epoch) of each is timed in turn, so that whatever else the machine does meets
all of them. All use torch's fused Adam and label smoothing 0.1. "products" is no implementation: it does the matrix
products of a step and nothing else, so that its time, as a share of a step's, says how much of the machine is used.
"""

import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from peers import PEERS, SIZES, Products, marian_model

OURS = "vanilla_transformer"


def random_pairs(lengths, vocab_size):
    """Pairs of random ids, one for each pair of lengths: [(source, target), ...]."""
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(4, vocab_size, (n,), generator=generator) for n in pair) for pair in lengths]


def batch_of(pairs):
    """Pad pairs on the right."""
    sources, targets = zip(*pairs, strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(sources, batch_first=True),
        "attention_mask": pad([torch.ones_like(source) for source in sources], batch_first=True),
        "labels": pad(targets, batch_first=True, padding_value=-100),
    }


def fixed_batches():
    """The same batch for all: 32 pairs of 64 tokens on either side, no padding."""
    return [batch_of(random_pairs([(64, 64)] * 32, SIZES["base"]["vocab_size"]))]


def ragged_batches(name, pairs, sentences):
    """Pairs of 8 to 64 tokens: ours by tokens, others as Trainer does it, so many sentences of like source length.

    Both have as many target tokens in a batch, on average.
    """
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(8, 65, (pairs,), generator=generator)
    target = (source + torch.randint(-8, 9, (pairs,), generator=generator)).clamp(8, 64)
    data = random_pairs(zip(source.tolist(), target.tolist(), strict=True), SIZES["base"]["vocab_size"])
    if name == OURS:
        from vanilla_transformer.data import TokenBatchSampler

        # The budget counts the longer side with its padding.
        budget = int(torch.maximum(source, target).float().mean() * sentences)
        batches = TokenBatchSampler(source.numpy(), target.numpy(), max(budget, 64)).plan(0)
    else:
        from transformers.trainer_pt_utils import LengthGroupedSampler

        order = list(LengthGroupedSampler(sentences, lengths=source.tolist(), generator=generator))
        batches = [order[i : i + sentences] for i in range(0, pairs, sentences)]
    return [batch_of([data[i] for i in batch]) for batch in batches]


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def take_step(loss, batch, optimizer, bf16):
    """Forward, backward and update; "products" has no optimizer, and does its backward by itself."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        value = loss(batch) if optimizer else loss()
    if optimizer:
        value.backward()
        optimizer.step()
        optimizer.zero_grad()


def step_worker(pipe, name, workload, bf16, threads, clock, pairs, sentences):
    """A process that takes a step for every number it is sent, and answers with tokens and seconds."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    try:
        if name == "products":
            optimizer, loss = None, Products(SIZES["base"], 32 * 64, 32 * 64)
        else:
            model, loss = PEERS[name](SIZES["base"])
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    except ImportError as error:
        pipe.send(f"left out: {error}")
        return
    batches = fixed_batches() if workload == "base" else ragged_batches(name, pairs, sentences)
    pipe.send(len(batches))
    while (number := pipe.recv()) is not None:
        batch = batches[number % len(batches)]
        begin = CLOCKS[clock]()
        take_step(loss, batch, optimizer, bf16)
        pipe.send((int(batch["labels"].ne(-100).sum()), CLOCKS[clock]() - begin))
    pipe.send((peak_memory(), loss.flops() if name == "products" else None))


def peak_memory():
    """Most megabytes that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Worker:
    """A process of its own, and the pipe to it.

    Args:
        target, *arguments: what it runs, with its end of the pipe first.
    """

    def __init__(self, target, *arguments):
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=target, args=(other, *arguments), daemon=True)
        self.process.start()
        other.close()
        self.ready = self.pipe.recv()

    def ask(self, question):
        """Send, and wait for the answer."""
        self.pipe.send(question)
        return self.pipe.recv()


def time_steps(workload, peers, rounds, bf16, threads, clock, pairs, sentences):
    """Rows of the table for "base" and "ragged": name, target tokens/s, seconds of a step, megabytes, flops."""
    names = [*peers, "products"] if workload == "base" else peers
    workers = {name: Worker(step_worker, name, workload, bf16, threads, clock, pairs, sentences) for name in names}
    for name in [name for name, worker in workers.items() if isinstance(worker.ready, str)]:
        print(f"{name}: {workers.pop(name).ready}")
    steps = {name: rounds if workload == "base" else worker.ready for name, worker in workers.items()}
    timed = {name: [] for name in workers}
    for worker in workers.values():  # to warm up
        worker.ask(0)
    for number in range(max(steps.values())):
        for name, worker in workers.items():
            if number < steps[name]:
                timed[name].append(worker.ask(number))
    rows = []
    for name, worker in workers.items():
        tokens, seconds = zip(*timed[name], strict=True)
        step = statistics.median(seconds)
        rate = tokens[0] / step if workload == "base" else sum(tokens) / sum(seconds)
        rows.append((name, rate, step, *worker.ask(None)))
    return rows


def multi30k_like(folder, pairs=29_000):
    """Made text with lengths as those of Multi30k, and words by Zipf's law."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (15_000, 7), generator=generator).tolist()
    words = ["".join(map(chr, word[: 2 + i % 6])) for i, word in enumerate(letters)]
    frequency = 1 / torch.arange(1.0, len(words) + 1)
    lengths = torch.randn(pairs, generator=generator).mul(0.3).add(2.45).exp().round().clamp(3, 40)
    for name, ratio in (("source", 1.0), ("target", 0.95)):
        counts = (lengths * ratio * torch.randn(pairs, generator=generator).mul(0.16).exp()).round().clamp(min=2)
        drawn = torch.multinomial(frequency, int(counts.sum()), replacement=True, generator=generator)
        lines = (" ".join(words[i] for i in sentence) for sentence in drawn.split(counts.int().tolist()))
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "source", folder / "target"


def tiny_recipe(steps=1):
    """The recipe of the tiny model, that trains for so many steps."""
    from vanilla_transformer.recipe import Recipe

    size = dict(SIZES["tiny"])
    layers, heads, vocabulary = size.pop("layers"), size.pop("heads"), size.pop("vocab_size")
    return Recipe(
        src_lang="source",
        tgt_lang="target",
        vocab_size=vocabulary,
        model={**size, "num_heads": heads, "encoder_layers": layers, "decoder_layers": layers},
        batch_tokens=4096,
        steps=steps,
        save_every=10**6,
    )


def our_epoch(corpus, clock):
    """Train through the corpus once; returns seconds and steps."""
    from vanilla_transformer.data import TokenBatchSampler, pair_lengths
    from vanilla_transformer.training import train

    steps = len(TokenBatchSampler(*pair_lengths(corpus.train), 4096).plan(0))
    with tempfile.TemporaryDirectory() as run:
        begin = clock()
        train(tiny_recipe(steps), corpus, run, trackers=(), show_progress=False)
        return clock() - begin, steps


def marian_epoch(corpus, clock, sentences):
    """The same by transformers' Seq2SeqTrainer, with its batching by length; returns seconds and steps."""
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

    tokenizer = corpus.tokenizer
    size = {**SIZES["tiny"], "vocab_size": len(tokenizer)}
    model = marian_model(size, "sdpa", tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id)
    lengths = [len(ids) for ids in corpus.train["input_ids"]]  # given, so that Trainer need not count
    with tempfile.TemporaryDirectory() as run:
        trainer = Seq2SeqTrainer(
            model,
            Seq2SeqTrainingArguments(
                run,
                num_train_epochs=1,
                per_device_train_batch_size=sentences,
                train_sampling_strategy="group_by_length",
                label_smoothing_factor=0.1,
                optim="adamw_torch_fused",
                lr_scheduler_type="inverse_sqrt",
                warmup_steps=2000,
                max_grad_norm=0.0,
                logging_steps=100,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=corpus.train.add_column("length", lengths),
            data_collator=DataCollatorForSeq2Seq(tokenizer, model),
            processing_class=tokenizer,
        )
        begin = clock()
        trainer.train()
        return clock() - begin, trainer.state.global_step


def epoch_worker(pipe, name, folder, threads, clock, sentences):
    """A process that trains through the corpus once when asked, and answers with tokens, seconds, steps, megabytes."""
    from vanilla_transformer.prepare import load_corpus

    torch.set_num_threads(threads)
    corpus = load_corpus(folder)
    tokens = sum(map(len, corpus.train["labels"]))
    pipe.send("ready")
    pipe.recv()
    seconds, steps = (
        our_epoch(corpus, CLOCKS[clock]) if name == OURS else marian_epoch(corpus, CLOCKS[clock], sentences)
    )
    pipe.send((tokens, seconds, steps, peak_memory()))


def time_epochs(source, target, rounds, threads, clock, sentences):
    """Rows of the table for "epoch": name, target tokens/s, seconds of a step, megabytes, no flops."""
    from vanilla_transformer.prepare import Bitext, prepare

    names = [OURS, *(f"Seq2SeqTrainer, MarianMT, {count} sentences" for count in sentences)]
    answers = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        text = (source, target) if source else multi30k_like(Path(folder))
        prepare(tiny_recipe(), Bitext(*map(str, text)), None, f"{folder}/corpus", show_progress=False)
        for _ in range(rounds):
            for name, count in zip(names, (0, *sentences), strict=True):
                worker = Worker(epoch_worker, name, f"{folder}/corpus", threads, clock, count)
                answers[name].append(worker.ask("go"))
    rows = []
    for name, runs in answers.items():
        tokens, seconds, steps, memory = (statistics.median(column) for column in zip(*runs, strict=True))
        rows.append((name, tokens / seconds, seconds / steps, memory, None))
    return rows


def main(
    workload: Annotated[Literal["base", "ragged", "epoch"], typer.Argument(help="What is timed.")],
    bf16: Annotated[bool, typer.Option("--bf16", help="Under bfloat16 autocast (base and ragged).")] = False,
    peers: Annotated[str, typer.Option(help="Implementations, by commas (base and ragged).")] = ",".join(PEERS),
    rounds: Annotated[int, typer.Option(help="Steps of each for base, epochs of each for epoch.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads of each.")] = torch.get_num_threads(),
    clock: Annotated[
        Literal["wall", "cpu"], typer.Option(help="Seconds that pass, or that the processor spends on it.")
    ] = "wall",
    pairs: Annotated[int, typer.Option(help="Pairs of the ragged workload.")] = 4000,
    sentences: Annotated[str, typer.Option(help="Sentences of a batch of the others (ragged: one number).")] = "",
    source: Annotated[Path | None, typer.Option(help="Text of the epoch; made if not given.")] = None,
    target: Annotated[Path | None, typer.Option(help="Its translation.")] = None,
):
    """Print target tokens a second, and what they are of ours."""
    if workload == "epoch":
        counts = [int(count) for count in (sentences or "256").split(",")]
        rows = time_epochs(source, target, rounds, threads, clock, counts)
    else:
        rows = time_steps(workload, peers.split(","), rounds, bf16, threads, clock, pairs, int(sentences or 32))
    _, rate, seconds, memory, _ = next(row for row in rows if row[0] == OURS)
    print(f"{'':40} {'target tokens/s':>15} {'ours is':>8} {'peak MB':>8} {'ours is':>8} {'step s':>8}")
    for name, its_rate, its_seconds, its_memory, flops in rows:
        if flops:
            print(
                f"Its matrix products alone take {its_seconds:.3f} s, {its_seconds / seconds:.0%} of our step, at "
                f"{flops / its_seconds / 1e9:,.0f} GFLOP/s."
            )
            continue
        faster, smaller = rate / its_rate, memory / its_memory
        print(f"{name:40} {its_rate:15,.0f} {faster:7.2f}x {its_memory:8,.0f} {smaller:7.2f}x {its_seconds:8.3f}")


if __name__ == "__main__":
    typer.run(main)
