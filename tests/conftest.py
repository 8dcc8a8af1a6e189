"""What the tests share: a tiny configuration, a tiny model with every weight at random, and a padded batch."""

import pytest
import torch

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration


@pytest.fixture
def make_config():
    """A tiny configuration, as a function of what differs from it."""
    sizes = {"vocab_size": 13, "d_model": 16, "d_ff": 24, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2}
    return lambda **changes: VanillaTransformerConfig(**{**sizes, **changes})


@pytest.fixture
def make_model(make_config):
    """A tiny model in evaluation mode, norms and biases at random too, as a function of what differs in its config."""

    def make(seed=0, **changes):
        torch.manual_seed(seed)
        model = VanillaTransformerForConditionalGeneration(make_config(**changes)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return model

    return make


@pytest.fixture
def model(make_model):
    return make_model()


@pytest.fixture
def batch():
    """Three sentence pairs of different lengths, padded on the right."""
    source = [[5, 6, 7, 8, 9, 2], [4, 12, 2], [10, 3, 11, 2]]
    target = [[7, 4, 2], [11, 5, 8, 6, 2], [9, 2]]
    pad = torch.nn.utils.rnn.pad_sequence
    input_ids = pad([torch.tensor(row) for row in source], batch_first=True)
    labels = pad([torch.tensor(row) for row in target], batch_first=True, padding_value=-100)
    return {"input_ids": input_ids, "attention_mask": input_ids.ne(0).long(), "labels": labels}
