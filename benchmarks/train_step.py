"""Speed of a training step beside transformers' MarianMT: same sizes, same batches, same optimizer, in one process.

    python benchmarks/train_step.py --size tiny
    python benchmarks/train_step.py --size base --sentences 8 --length 32 --rounds 3

Every round takes one step of each in turn, so that whatever else the machine does meets both; figures are medians. Both
train with Adam and label smoothing 0.1: ours by the loss of `vanilla_transformer.loss`, MarianMT by
`torch.nn.functional.cross_entropy` on its logits, which is what transformers' Trainer does at its fastest.
"""

import statistics
import time
from typing import Annotated, Literal

import torch
import typer
from torch.nn import functional as F
from transformers import MarianConfig, MarianMTModel

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.training import SummedLoss

SIZES = {
    "tiny": {"vocab_size": 10_000, "d_model": 128, "d_ff": 256, "num_heads": 4, "layers": 4, "dropout": 0.3},
    "base": {"vocab_size": 37_000, "d_model": 512, "d_ff": 2048, "num_heads": 8, "layers": 6, "dropout": 0.1},
}


def ours(size):
    """A function from a batch to its mean loss, and the model."""
    sizes = {**size, "encoder_layers": size["layers"], "decoder_layers": size["layers"]}
    del sizes["layers"]
    module = SummedLoss(VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**sizes))).train()

    def loss(batch):
        total, words = module(batch, label_smoothing=0.1)
        return total / words

    return loss, module


def marian(size):
    """The same of MarianMT."""
    stacks = {
        f"{stack}_{name}": value
        for stack in ("encoder", "decoder")
        for name, value in {
            "layers": size["layers"],
            "attention_heads": size["num_heads"],
            "ffn_dim": size["d_ff"],
        }.items()
    }
    model = MarianMTModel(
        MarianConfig(
            vocab_size=size["vocab_size"],
            d_model=size["d_model"],
            dropout=size["dropout"],
            activation_function="relu",
            scale_embedding=True,
            pad_token_id=0,
            eos_token_id=2,
            decoder_start_token_id=1,
            max_position_embeddings=512,
            **stacks,
        )
    ).train()

    def loss(batch):
        labels = batch["labels"]
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels),
            use_cache=False,
        ).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)

    return loss, model


def main(
    size: Annotated[Literal["tiny", "base"], typer.Option(help="Sizes of the model.")] = "tiny",
    sentences: Annotated[int, typer.Option(help="Sentences of a batch.")] = 256,
    length: Annotated[int, typer.Option(help="Tokens of the longest of them, on either side.")] = 20,
    rounds: Annotated[int, typer.Option(help="Steps of each, after two to warm up.")] = 10,
):
    """Print target words a second of either, and their ratio."""
    torch.manual_seed(0)
    lengths = torch.randint(length * 3 // 4, length + 1, (sentences,))
    lengths[0] = length
    mask = torch.arange(length) < lengths.unsqueeze(-1)
    ids = torch.randint(4, SIZES[size]["vocab_size"], (2, sentences, length))
    batch = {
        "input_ids": ids[0].masked_fill(~mask, 0),
        "attention_mask": mask.long(),
        "labels": ids[1].masked_fill(~mask, -100),
    }
    runs = {}
    for name, make in {"vanilla_transformer": ours, "MarianMT": marian}.items():
        loss, module = make(SIZES[size])
        runs[name] = (loss, torch.optim.Adam(module.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True))
    seconds = {name: [] for name in runs}
    for number in range(rounds + 2):
        for name, (loss, optimizer) in runs.items():
            begin = time.perf_counter()
            loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number >= 2:
                seconds[name].append(time.perf_counter() - begin)
    rates = {name: int(lengths.sum()) / statistics.median(taken) for name, taken in seconds.items()}
    for name, rate in rates.items():
        print(f"{name:20} {rate:10,.0f} target words/s")
    print(f"ratio {rates['vanilla_transformer'] / rates['MarianMT']:.2f} on {torch.get_num_threads()} threads")


if __name__ == "__main__":
    typer.run(main)
