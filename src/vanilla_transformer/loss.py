"""Label-smoothed cross-entropy (section 5.4), fused with the projection onto the vocabulary.

The logits of a batch are by far the largest tensor of a training step: 4,096 words of 37,000 take 600 MB, and as much
again for their gradient. They are needed only for a sum, so they are made, used and dropped a few rows at a time.

Shapes: N target words, D d_model, W vocabulary.
"""

import torch

CHUNK_BYTES = 16 * 2**20  # logits held at once: large enough for fast products, small enough to stay in the cache


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
        The summed loss (differentiable), and the number of labels that are not -100, both scalars. Divide once, by
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
    return _ProjectedCrossEntropy.apply(hidden_states, weight, labels, label_smoothing), count


class _ProjectedCrossEntropy(torch.autograd.Function):
    """The gradient of a row of logits needs that row alone, so it is computed along with the loss, chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden_states, weight, labels, label_smoothing):
        device = hidden_states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        size, vocab_size = labels.numel(), weight.shape[0]
        rows = max(1, CHUNK_BYTES // (vocab_size * 4))
        wants_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        d_hidden = torch.empty_like(hidden_states) if wants_gradient else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_gradient else None
        total = torch.zeros((), dtype=torch.float32, device=hidden_states.device)
        with torch.autocast(device, enabled=False):
            projection = weight.to(dtype)
            for start in range(0, size, rows):
                hidden = hidden_states[start : start + rows].to(dtype)
                label = labels[start : start + rows].unsqueeze(-1)  # (n, 1)
                logits = (hidden @ projection.T).float()  # (n, W)
                log_sum = logits.logsumexp(dim=-1, keepdim=True)  # (n, 1)
                total += log_sum.sum() - (1 - label_smoothing) * logits.gather(1, label).sum()
                if label_smoothing:
                    total -= label_smoothing * logits.mean(dim=-1).sum()
                if not wants_gradient:
                    continue
                # d loss / d logits = softmax - (1 - e) * one-hot(label) - e / W, made where the logits were.
                d_logits = logits.sub_(log_sum).exp_()
                if label_smoothing:
                    d_logits.sub_(label_smoothing / vocab_size)
                d_logits.scatter_add_(1, label, d_logits.new_full(label.shape, label_smoothing - 1))
                d_logits = d_logits.to(dtype)
                d_hidden[start : start + rows] = d_logits @ projection
                if dtype == torch.float32:
                    d_weight.addmm_(d_logits.T, hidden)
                else:
                    d_weight += d_logits.T @ hidden
        if wants_gradient:
            ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, d_total):
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * d_total.to(d_hidden.dtype), d_weight * d_total.to(d_weight.dtype), None, None
