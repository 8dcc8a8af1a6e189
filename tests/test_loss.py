"""The fused loss against torch's own cross-entropy, and what it costs."""

import sys
import types

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vanilla_transformer import loss
from vanilla_transformer.loss import label_smoothed_loss


def inputs(tokens, d_model, vocab_size, ignored=0):
    """Random hidden states, weight and labels, the first `ignored` of which do not count."""
    generator = torch.Generator().manual_seed(tokens + vocab_size)
    hidden = torch.randn(tokens, d_model, generator=generator).requires_grad_()
    weight = torch.randn(vocab_size, d_model, generator=generator).requires_grad_()
    labels = torch.randint(vocab_size, (tokens,), generator=generator)
    labels[:ignored] = -100
    return hidden, weight, labels


def reference(hidden, weight, labels, label_smoothing):
    return F.cross_entropy(hidden @ weight.T, labels, reduction="sum", label_smoothing=label_smoothing)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("chunk", [0, 1, 100])  # single rows, as many as d_model, all
@pytest.mark.parametrize(
    ("tokens", "d_model", "vocab_size", "ignored"), [(20, 8, 11, 0), (23, 8, 11, 7), (1, 3, 2, 0), (5, 2, 301, 1)]
)
def test_value_and_gradients_equal_cross_entropy(
    monkeypatch, tokens, d_model, vocab_size, ignored, chunk, label_smoothing
):
    monkeypatch.setattr(loss, "CPU_CHUNK", chunk)
    hidden, weight, labels = inputs(tokens, d_model, vocab_size, ignored)
    total, count = label_smoothed_loss(hidden, weight, labels, label_smoothing)
    gradients = torch.autograd.grad(total * 0.5, (hidden, weight))
    expected = reference(hidden, weight, labels, label_smoothing)
    expected_gradients = torch.autograd.grad(expected * 0.5, (hidden, weight))
    assert count == tokens - ignored
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-5)


def test_three_words_by_hand():
    # p = 1/8, 2/8, 5/8: 0.9 * -ln(5/8) + 0.1 * (ln 8 + ln 4 + ln 8/5) / 3
    weight = torch.tensor([[1.0], [2.0], [5.0]]).log()
    total, count = label_smoothed_loss(torch.ones(1, 1), weight, torch.tensor([2]), 0.1)
    assert total.item() == pytest.approx(0.5541945, abs=1e-6)
    assert count.item() == 1
    assert label_smoothed_loss(torch.ones(1, 1), weight, torch.tensor([2]))[0].item() == pytest.approx(
        0.4700036, abs=1e-6
    )


def test_batches_of_sentences_are_summed_over_all_their_words():
    hidden, weight, labels = inputs(12, 4, 9, ignored=2)
    total, count = label_smoothed_loss(hidden.view(3, 4, 4), weight, labels.view(3, 4), 0.1)
    torch.testing.assert_close(total, reference(hidden, weight, labels, 0.1))
    assert count == 10


def test_the_way_a_batch_is_split_changes_nothing():
    hidden, weight, labels = inputs(12, 4, 9, ignored=2)
    whole = label_smoothed_loss(hidden, weight, labels, 0.1)
    parts = [label_smoothed_loss(hidden[i:j], weight, labels[i:j], 0.1) for i, j in ((0, 5), (5, 6), (6, 12))]
    torch.testing.assert_close(whole[0], sum(total for total, _ in parts))
    assert whole[1] == sum(count for _, count in parts)


def test_words_of_minus_100_change_nothing():
    hidden, weight, labels = inputs(12, 4, 9)
    labels[3] = labels[8] = -100
    with_garbage = hidden.detach().clone()
    with_garbage[3], with_garbage[8] = float("nan"), 1e30
    with_garbage.requires_grad_()
    total, _ = label_smoothed_loss(with_garbage, weight, labels, 0.1)
    d_hidden, d_weight = torch.autograd.grad(total, (with_garbage, weight))
    expected = torch.autograd.grad(reference(hidden, weight, labels, 0.1), (hidden, weight))
    torch.testing.assert_close((d_hidden, d_weight), expected, rtol=1e-5, atol=1e-5)
    assert not d_hidden[[3, 8]].any()


def test_labels_of_minus_100_alone_give_0_and_gradients_of_0():
    hidden, weight, labels = inputs(6, 4, 9, ignored=6)
    total, count = label_smoothed_loss(hidden, weight, labels, 0.1)
    total.backward()
    assert (total.item(), count.item()) == (0, 0)
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_large_logits_stay_finite():
    hidden, weight, labels = inputs(6, 4, 9)
    total, _ = label_smoothed_loss(hidden * 1e4, weight, labels, 0.1)
    torch.testing.assert_close(total, reference(hidden * 1e4, weight, labels, 0.1))


def test_one_tensor_as_embedding_and_projection_gets_both_gradients():
    _, weight, labels = inputs(6, 4, 9)
    words = torch.tensor([0, 3, 3, 8, 1, 2])
    total, _ = label_smoothed_loss(F.embedding(words, weight), weight, labels, 0.1)
    expected = reference(F.embedding(words, weight), weight, labels, 0.1)
    torch.testing.assert_close(
        torch.autograd.grad(total, weight), torch.autograd.grad(expected, weight), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_is_close_to_float32(autocast):
    hidden, weight, labels = inputs(30, 8, 50, ignored=3)
    expected = reference(hidden, weight, labels, 0.1)
    expected_gradients = torch.autograd.grad(expected, (hidden, weight))
    if autocast:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total, _ = label_smoothed_loss(hidden, weight, labels, 0.1)
        gradients = torch.autograd.grad(total, (hidden, weight))
        assert {g.dtype for g in gradients} == {torch.float32}
    else:
        halves = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()
        total, _ = label_smoothed_loss(*halves, labels, 0.1)
        gradients = torch.autograd.grad(total, halves)
        assert {g.dtype for g in gradients} == {torch.bfloat16}
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, expected, rtol=1e-2, atol=0)
    for gradient, of_float32 in zip(gradients, expected_gradients, strict=True):
        assert (gradient.float() - of_float32).norm() < 0.02 * of_float32.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_in_its_dtype_and_gives_gradients_in_float32(dtype):
    hidden, weight, labels = inputs(30, 8, 50)
    expected = reference(hidden, weight, labels, 0.1)
    with torch.autocast("cpu", dtype=dtype):
        total, _ = label_smoothed_loss(hidden, weight, labels, 0.1)
    assert total.dtype == torch.float32 and total != expected
    torch.testing.assert_close(total, expected, rtol=1e-2, atol=0)
    assert {g.dtype for g in torch.autograd.grad(total, (hidden, weight))} == {torch.float32}


def test_float16_weights_with_a_large_sum_do_not_overflow():
    # A sum of exponentials over 70,000 words is beyond float16's 65,504; probabilities are not.
    hidden = torch.zeros(2, 4, dtype=torch.float16, requires_grad=True)
    weight = torch.ones(70_000, 4, dtype=torch.float16, requires_grad=True)
    total, _ = label_smoothed_loss(hidden, weight, torch.tensor([1, 2]), 0.1)
    total.backward()
    assert total.item() == pytest.approx(22.3125, abs=0.01)  # 2 ln 70,000
    assert hidden.grad.abs().max() < 0.1 and weight.grad.isfinite().all()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_hidden_states_that_are_not_finite_give_a_loss_that_is_not_finite(value):
    hidden, weight, labels = inputs(6, 4, 9)
    hidden = hidden.detach().clone()
    hidden[2, 1] = value
    total, _ = label_smoothed_loss(hidden.requires_grad_(), weight, labels, 0.1)
    total.backward()
    assert not total.isfinite()


def test_a_second_derivative_is_refused_rather_than_0():
    hidden, weight, labels = inputs(6, 4, 9)
    total, _ = label_smoothed_loss(hidden, weight, labels, 0.1)
    (gradient,) = torch.autograd.grad(total.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


# Liger's kernel


@pytest.fixture
def liger(monkeypatch):
    """A stand-in for Liger's package, with the call of its functional interface; remembers how it was called."""
    calls = []

    def kernel(input, weight, target, *, label_smoothing, reduction, accum_dtype, ignore_index=-100):
        calls.append((reduction, accum_dtype, len(target)))
        return reference(input, weight, target, label_smoothing)

    functional = types.ModuleType("liger_kernel.transformers.functional")
    functional.liger_fused_linear_cross_entropy = kernel
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    return calls, kernel


def test_ligers_kernel_is_taken_on_gpus_alone_and_only_where_installed(liger, monkeypatch):
    assert loss._gpu_kernel("cuda") is liger[1]
    assert loss._gpu_kernel("cpu") is None and loss._gpu_kernel("mps") is None
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", None)
    assert loss._gpu_kernel("cuda") is None


def test_nothing_on_a_cpu_reaches_for_liger(liger):
    label_smoothed_loss(*inputs(6, 4, 9), 0.1)
    assert liger[0] == []


def test_ligers_kernel_gets_the_words_that_count_and_gives_the_same_sum(liger, monkeypatch):
    calls, kernel = liger
    hidden, weight, labels = inputs(12, 4, 9, ignored=5)
    expected = label_smoothed_loss(hidden, weight, labels, 0.1)
    monkeypatch.setattr(loss, "_gpu_kernel", lambda device_type: kernel)
    total, count = label_smoothed_loss(hidden, weight, labels, 0.1)
    torch.testing.assert_close((total, count), expected)
    assert calls == [("sum", torch.float32, 7)]


def test_a_batch_of_padding_alone_does_not_reach_liger(liger, monkeypatch):
    calls, kernel = liger
    monkeypatch.setattr(loss, "_gpu_kernel", lambda device_type: kernel)
    total, count = label_smoothed_loss(*inputs(6, 4, 9, ignored=6), 0.1)
    assert (total.item(), count.item(), calls) == (0, 0, [])


# Memory


class LargestTensor(TorchDispatchMode):
    """Remembers the elements of the largest result of any operation."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_the_logits_of_all_words_are_never_held_at_once():
    hidden, weight, labels = inputs(64, 8, 1000)
    with LargestTensor() as largest:
        label_smoothed_loss(hidden, weight, labels, 0.1)[0].backward()
    assert largest.elements == 8 * 1000
    with LargestTensor() as largest:
        reference(hidden, weight, labels, 0.1).backward()
    assert largest.elements == 64 * 1000


@pytest.mark.parametrize("label_smoothing", [-0.1, 1.0, 1.5, float("nan")])
def test_smoothing_out_of_range_is_refused(label_smoothing):
    with pytest.raises(ValueError, match=f"label_smoothing must be at least 0 and below 1, got {label_smoothing}"):
        label_smoothed_loss(*inputs(2, 2, 3), label_smoothing)
