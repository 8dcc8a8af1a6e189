"""Label-smoothed cross-entropy (section 5.4), fused with the projection onto the vocabulary.

The logits of a batch are by far the largest tensor of a training step: 4,096 words of 37,000 take 600 MB, and as much
again for their gradient. They are needed only for a sum, so they are made, used and dropped a few rows at a time.

Shapes: N target words, D d_model, W vocabulary.
"""

import torch
from torch.autograd.function import once_differentiable

# Logits held at once, in multiples of the weight's size in float32. Every chunk adds to the gradient of all words:
# smaller ones would move more memory for that than for themselves, larger ones leave a CPU's caches. A GPU, whose
# products are fast beside its memory, wants larger ones, and has the room.
CPU_CHUNK, GPU_CHUNK = 1, 8


def label_smoothed_loss(
    hidden_states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over words of (1 - e) * -log p(label) + e * mean over the vocabulary of -log p.

    Args:
        hidden_states: (..., D) the decoder's output.
        weight: (W, D) the output projection, which is the embedding matrix.
        labels: (...) target ids, -100 where nothing is predicted; those places are not projected at all.
        label_smoothing: e; 0.1 in the paper.

    Returns:
        The summed loss (differentiable once), and the number of labels that are not -100, both scalars. Divide once, by
        the number of labels of the whole batch, so that the way a batch is split changes nothing.

    Raises:
        ValueError: label_smoothing outside [0, 1).
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}")
    hidden_states, labels = hidden_states.flatten(0, -2), labels.flatten()
    kept = labels.ne(-100).nonzero().squeeze(-1)
    if kept.numel() < labels.numel():
        hidden_states, labels = hidden_states.index_select(0, kept), labels.index_select(0, kept)  # (N, D), (N,)
    count = torch.tensor(labels.numel(), device=labels.device)
    kernel = _gpu_kernel(hidden_states.device.type)
    if kernel is None or labels.numel() == 0:  # Liger's divides by the number of words
        return _ProjectedCrossEntropy.apply(hidden_states, weight, labels, label_smoothing), count
    total = kernel(
        hidden_states, weight, labels, label_smoothing=label_smoothing, reduction="sum", accum_dtype=torch.float32
    )
    return total, count


def _gpu_kernel(device_type):
    """Liger's kernel for the same loss, where it is installed and the tensors are on a GPU that it runs on."""
    if device_type != "cuda":
        return None
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError:
        return None
    return liger_fused_linear_cross_entropy


class _ProjectedCrossEntropy(torch.autograd.Function):
    """The loss and both gradients in one pass over the rows, since a row of logits is all that its gradient needs.

    d loss / d logits = p - (1 - e) * one-hot - e / W. Only p is as large as the logits: the one-hot and the constant
    are applied to the products with it, which have D columns in place of W. So is the mean of the logits, which is the
    product with the mean word.
    """

    @staticmethod
    def forward(ctx, hidden_states, weight, labels, label_smoothing):
        device = hidden_states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        vocab_size, d_model = weight.shape
        chunk = CPU_CHUNK if device == "cpu" else GPU_CHUNK
        rows = max(1, min(labels.numel(), chunk * d_model * torch.float32.itemsize // dtype.itemsize))
        wants_gradient = any(ctx.needs_input_grad)
        with torch.autocast(device, enabled=False):
            hidden_states = hidden_states.detach().to(dtype)
            projection = weight.detach().to(dtype)
            mean_word = weight.detach().mean(dim=0, dtype=torch.float32)  # (D,)
            total = torch.zeros((), dtype=torch.float32, device=hidden_states.device)
            d_hidden = torch.empty_like(hidden_states) if wants_gradient else None
            d_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_gradient else None
            logits_buffer, p_buffer = (projection.new_empty(rows, vocab_size) for _ in range(2))
            for start in range(0, labels.numel(), rows):
                hidden, label = hidden_states[start : start + rows], labels[start : start + rows]  # (n, D), (n,)
                logits = torch.mm(hidden, projection.T, out=logits_buffer[: len(label)])  # (n, W)
                p = torch.softmax(logits, dim=-1, out=p_buffer[: len(label)])  # (n, W)
                # log of the sum of exp(logits), by the likeliest word, whose p is at least 1 / W.
                normalizers = logits.amax(dim=-1).float() - p.amax(dim=-1).float().log()  # (n,)
                label_logits = logits.gather(1, label.unsqueeze(-1)).float()  # (n, 1)
                mean_logits = hidden.float() @ mean_word  # (n,)
                total += normalizers.sum() - (1 - label_smoothing) * label_logits.sum()
                total -= label_smoothing * mean_logits.sum()
                if not wants_gradient:
                    continue
                d_rows = (p @ projection).float()  # (n, D)
                d_rows -= (1 - label_smoothing) * projection.index_select(0, label) + label_smoothing * mean_word
                d_hidden[start : start + rows] = d_rows
                if dtype == torch.float32:
                    d_weight.addmm_(p.T, hidden)
                else:
                    d_weight += p.T @ hidden
                d_weight.index_add_(0, label, hidden.float(), alpha=label_smoothing - 1)
            if wants_gradient:
                d_weight -= label_smoothing / vocab_size * hidden_states.sum(dim=0, dtype=torch.float32)
                ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total):
        d_hidden, d_weight = ctx.saved_tensors
        # In place, as nobody else has them; autograd refuses a second backward through them.
        return d_hidden.mul_(d_total), d_weight.mul_(d_total), None, None
