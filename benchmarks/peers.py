"""The paper's model in several implementations, for `train_step.py`: same sizes, same weights' count, same loss.

Each function takes sizes and gives the model, in training mode, and a function from a batch to its mean loss. A batch
has `input_ids` (B, S), `attention_mask` (B, S) and `labels` (B, T), -100 where nothing is predicted. All predict by the
embedding matrix and smooth by 0.1, in the form that transformers and torch have in common.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import MarianConfig, MarianMTModel
from transformers.trainer_pt_utils import LabelSmoother

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.cpu import keep_freed_memory, use_fastest_exact_products
from vanilla_transformer.loss import label_smoothed_loss
from vanilla_transformer.modeling_vanilla_transformer import shift_right, sinusoids

SMOOTHING = 0.1
SIZES = {
    "base": {"vocab_size": 37_000, "d_model": 512, "d_ff": 2048, "heads": 8, "layers": 6, "dropout": 0.1},
    "tiny": {"vocab_size": 10_000, "d_model": 128, "d_ff": 256, "heads": 4, "layers": 4, "dropout": 0.3},
}


def cross_entropy(logits, labels):
    """Smoothed mean loss of logits (B, T, W) and labels (B, T), by torch's own function."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=SMOOTHING)


def ours(size):
    """This package, set up as its training does."""
    keep_freed_memory()
    use_fastest_exact_products()
    model = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(
            vocab_size=size["vocab_size"],
            d_model=size["d_model"],
            d_ff=size["d_ff"],
            num_heads=size["heads"],
            encoder_layers=size["layers"],
            decoder_layers=size["layers"],
            dropout=size["dropout"],
        )
    )

    def loss(batch):
        hidden_states = model.model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            decoder_input_ids=model.prepare_decoder_input_ids_from_labels(batch["labels"]),
            use_cache=False,
        ).last_hidden_state
        total, words = label_smoothed_loss(hidden_states, model.lm_head.weight, batch["labels"], SMOOTHING)
        return total / words

    return model.train(), loss


def marian_model(size, attention="sdpa", pad=0, eos=2, start=1):
    """transformers' MarianMT of these sizes."""
    return MarianMTModel(
        MarianConfig(
            vocab_size=size["vocab_size"],
            d_model=size["d_model"],
            encoder_layers=size["layers"],
            decoder_layers=size["layers"],
            encoder_attention_heads=size["heads"],
            decoder_attention_heads=size["heads"],
            encoder_ffn_dim=size["d_ff"],
            decoder_ffn_dim=size["d_ff"],
            dropout=size["dropout"],
            activation_function="relu",
            scale_embedding=True,
            max_position_embeddings=512,
            pad_token_id=pad,
            eos_token_id=eos,
            decoder_start_token_id=start,
            forced_eos_token_id=None,
            attn_implementation=attention,
        )
    ).train()


def marian(size, attention="sdpa", of_trainer=False):
    """MarianMT, by torch's cross-entropy or by the smoothing of transformers' Trainer."""
    model, smoother = marian_model(size, attention), LabelSmoother(SMOOTHING)

    def loss(batch):
        outputs = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            decoder_input_ids=model.prepare_decoder_input_ids_from_labels(batch["labels"]),
            use_cache=False,
        )
        return smoother(outputs, batch["labels"]) if of_trainer else cross_entropy(outputs.logits, batch["labels"])

    return model, loss


def torch_transformer(size):
    """torch.nn.Transformer between tied embeddings and sinusoids: what one writes without a library."""
    width, layers = size["d_model"], size["layers"]
    core = nn.Transformer(width, size["heads"], layers, layers, size["d_ff"], size["dropout"], batch_first=True)
    core.encoder.norm = core.decoder.norm = None
    embedding = nn.Embedding(size["vocab_size"], width, padding_idx=0)
    nn.init.normal_(embedding.weight, std=width**-0.5)
    model = nn.ModuleDict({"core": core, "embedding": embedding, "dropout": nn.Dropout(size["dropout"])})
    table = sinusoids(torch.arange(512), width)

    def enter(ids):
        return model["dropout"](embedding(ids) * width**0.5 + table[: ids.shape[1]])

    def loss(batch):
        labels, padding = batch["labels"], batch["attention_mask"].eq(0)
        padding = padding if padding.any() else None
        hidden_states = core(
            enter(batch["input_ids"]),
            enter(shift_right(labels, 1, 0)[0]),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(labels.shape[1]),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return cross_entropy(F.linear(hidden_states, embedding.weight), labels)

    return model.train(), loss


def x_transformers(size):
    """x-transformers (`pip install x-transformers`) with post-norm, sinusoids and ReLU."""
    from x_transformers import XTransformer

    stack = {
        "num_tokens": size["vocab_size"],
        "depth": size["layers"],
        "heads": size["heads"],
        "attn_dim_head": size["d_model"] // size["heads"],
        "ff_mult": size["d_ff"] / size["d_model"],
        "ff_custom_activation": nn.ReLU(),
        "ff_dropout": size["dropout"],
        "emb_dropout": size["dropout"],
        "max_seq_len": 512,
        "pre_norm": False,
        "attn_flash": True,
        "scaled_sinu_pos_emb": True,
    }
    both = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in stack.items()}
    model = XTransformer(dim=size["d_model"], tie_token_emb=True, pad_value=0, **both)
    decoder, embedding = model.decoder.net, model.encoder.token_emb.emb
    decoder.to_logits = nn.Linear(size["d_model"], size["vocab_size"], bias=False)
    decoder.to_logits.weight = embedding.weight

    def loss(batch):
        mask = batch["attention_mask"].bool()
        memory = model.encoder(batch["input_ids"], mask=mask, return_embeddings=True)
        words = shift_right(batch["labels"], 1, 0)[0]
        return cross_entropy(decoder(words, context=memory, context_mask=mask), batch["labels"])

    return model.train(), loss


class Products:
    """The matrix products of a step and nothing else: the time that is left when all the rest costs none.

    Args:
        size: of the model.
        source, target: tokens of a batch on either side.
    """

    def __init__(self, size, source, target):
        width, inner, layers, vocabulary = (size[name] for name in ("d_model", "d_ff", "layers", "vocab_size"))
        chunks = max(1, target // width)  # of the product with the vocabulary, as the fused loss cuts it
        self.shapes = [  # how often, rows, columns in, columns out
            (4 * layers + 2 * layers, source, width, width),  # encoder; keys and values of the memory
            (4 * layers + 2 * layers, target, width, width),  # decoder; queries to the memory, and outputs
            (layers, source, width, inner),
            (layers, source, inner, width),
            (layers, target, width, inner),
            (layers, target, inner, width),
            (chunks, target // chunks, width, vocabulary),
        ]
        self.operands = [
            (torch.randn(m, k, requires_grad=True), (torch.randn(n, k) * k**-0.5).requires_grad_())
            for _, m, k, n in self.shapes
        ]

    def flops(self):
        """Floating point operations of forward and backward."""
        return sum(3 * 2 * times * m * k * n for times, m, k, n in self.shapes)

    def __call__(self):
        """Forward and backward through each product as often as a step has it."""
        for (times, *_), (x, weight) in zip(self.shapes, self.operands, strict=True):
            for _ in range(times):
                y = F.linear(x, weight)
                torch.autograd.grad(y, (x, weight), y.detach())


PEERS = {
    "vanilla_transformer": ours,
    "MarianMT": marian,
    "MarianMT eager": lambda size: marian(size, attention="eager"),
    "MarianMT of Trainer": lambda size: marian(size, of_trainer=True),
    "torch.nn.Transformer": torch_transformer,
    "x-transformers": x_transformers,
}
