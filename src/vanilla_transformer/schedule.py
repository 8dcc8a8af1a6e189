"""Equation (3) of the paper (section 5.3)."""


def learning_rate(step: int, d_model: int, warmup_steps: int = 4000, factor: float = 1.0) -> float:
    """The learning rate of one step: up in a line, then down with the square root of the step.

    lrate = factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5), greatest at step = warmup_steps.

    Args:
        step: the optimizer's step, counted from 1.
        d_model: width of the model.
        warmup_steps: steps of growth; 4,000 in the paper.
        factor: multiplies the whole; 1 in the paper.

    Returns:
        The learning rate.

    Raises:
        ValueError: a step or a warm-up below 1.
    """
    if step < 1 or warmup_steps < 1:
        raise ValueError(f"step and warmup_steps count from 1, got step={step}, warmup_steps={warmup_steps}")
    return factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)
