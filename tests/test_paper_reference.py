"""The whole model against a short reference, written from the paper's equations alone, a sentence at a time."""

import math

import pytest
import torch

from vanilla_transformer import VanillaTransformerForConditionalGeneration


class PaperTransformer:
    """Section 3 of the paper in plain tensor operations, on one sentence pair without padding.

    Args:
        weights: name -> tensor, the names being those of the package's model.
        config: sizes and the choice of positions.
    """

    def __init__(self, weights, config):
        self.weights, self.config = weights, config

    def linear(self, name, x):
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def layer_norm(self, name, x):
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return (x - mean) / (variance + 1e-6).sqrt() * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def attention(self, name, x, memory, causal=False):
        """Section 3.2.2, head by head: Concat(head_1, ..., head_h) W^O with head_i = Attention(QW_i, KW_i, VW_i)."""
        projected = [
            self.linear(f"{name}.{letter}_proj", of) for letter, of in (("q", x), ("k", memory), ("v", memory))
        ]
        heads = []
        for q_i, k_i, v_i in zip(*(p.chunk(self.config.num_heads, -1) for p in projected), strict=True):
            scores = q_i @ k_i.T / math.sqrt(q_i.shape[-1])
            if causal:
                scores = scores + torch.full_like(scores, float("-inf")).triu(1)
            exponentials = scores.exp()
            heads.append(exponentials / exponentials.sum(-1, keepdim=True) @ v_i)
        return self.linear(f"{name}.out_proj", torch.cat(heads, -1))

    def feed_forward(self, name, x):
        """Equation (2)."""
        return self.linear(f"{name}.w_2", self.linear(f"{name}.w_1", x).clamp(min=0))

    def embed(self, stack, ids):
        """Sections 3.4 and 3.5."""
        d = self.config.d_model
        x = self.weights[f"model.{stack}.embed_tokens.weight"][ids] * math.sqrt(d)
        if self.config.position_encoding == "learned":
            return x + self.weights[f"model.{stack}.embeddings.positions.weight"][: len(ids)]
        if self.config.position_encoding == "none":
            return x
        waves = [math.sin if i % 2 == 0 else math.cos for i in range(d)]
        table = [[waves[i](pos / 10000 ** (2 * (i // 2) / d)) for i in range(d)] for pos in range(len(ids))]
        return x + torch.tensor(table)

    def logits(self, source, target):
        """(S,), (T,) -> (T, W): what comes after each prefix of the target, which is shifted right here."""
        x = self.embed("encoder", source)
        for i in range(self.config.encoder_layers):
            layer = f"model.encoder.layers.{i}"
            x = self.layer_norm(f"{layer}.self_attn_norm", x + self.attention(f"{layer}.self_attn", x, x))
            x = self.layer_norm(f"{layer}.ffn_norm", x + self.feed_forward(f"{layer}.ffn", x))
        memory, start = x, torch.tensor([self.config.decoder_start_token_id])
        x = self.embed("decoder", torch.cat([start, target[:-1]]))
        for i in range(self.config.decoder_layers):
            layer = f"model.decoder.layers.{i}"
            x = self.layer_norm(f"{layer}.self_attn_norm", x + self.attention(f"{layer}.self_attn", x, x, causal=True))
            x = self.layer_norm(f"{layer}.cross_attn_norm", x + self.attention(f"{layer}.cross_attn", x, memory))
            x = self.layer_norm(f"{layer}.ffn_norm", x + self.feed_forward(f"{layer}.ffn", x))
        return x @ self.weights["lm_head.weight"].T


VARIANTS = [
    {},
    {"num_heads": 1},
    {"num_heads": 3, "d_k": 5, "d_v": 7},
    {"d_k": 3},
    {"position_encoding": "learned", "max_position_embeddings": 8},
    {"position_encoding": "none"},
    {"tie_word_embeddings": False},
    {"attention_bias": True},
    {"encoder_layers": 3, "decoder_layers": 1, "decoder_start_token_id": 3},
]


def reference_and_its_weights(model):
    """The reference with a model's weights as leaves of its own, one leaf where the model shares one."""
    leaves = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    weights = dict(leaves)
    if model.config.tie_word_embeddings:
        for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"):
            weights[name] = leaves["model.encoder.embed_tokens.weight"]
    return PaperTransformer(weights, model.config), leaves


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_logits_loss_and_gradients_are_those_of_the_papers_equations(make_model, batch, changes, attention):
    model = make_model(**changes)
    model.set_attn_implementation(attention)
    reference, leaves = reference_and_its_weights(model)

    output = model(**batch)
    output.loss.backward()

    losses = []
    for i, labels in enumerate(batch["labels"]):
        source = batch["input_ids"][i][batch["attention_mask"][i].bool()]
        target = labels[labels.ne(-100)]
        logits = reference.logits(source, target)
        torch.testing.assert_close(output.logits[i, : len(target)], logits, rtol=1e-5, atol=1e-5)
        losses.append(-logits.log_softmax(-1)[range(len(target)), target])
    loss = torch.cat(losses).mean()
    loss.backward()

    torch.testing.assert_close(output.loss, loss, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, leaves[name].grad, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_layer_norm_comes_last_in_every_layer(make_config, batch):
    model = VanillaTransformerForConditionalGeneration(make_config()).eval()  # gains 1, biases 0
    output = model(**batch, output_hidden_states=True)
    for hidden_states in (*output.encoder_hidden_states[1:], *output.decoder_hidden_states[1:]):
        torch.testing.assert_close(hidden_states.mean(-1), torch.zeros(hidden_states.shape[:2]), rtol=0, atol=1e-5)
        variance = hidden_states.var(-1, unbiased=False)
        torch.testing.assert_close(variance, torch.ones_like(variance), rtol=0, atol=1e-4)
    assert torch.equal(output.encoder_hidden_states[-1], output.encoder_last_hidden_state)
