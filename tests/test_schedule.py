"""Equation (3) against literal numbers."""

import pytest

from vanilla_transformer.schedule import learning_rate


@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, 1.746928107421711e-07), (2000, 3.4938562148434216e-04), (4000, 6.987712429686843e-04), (16000, 3.4938562e-04)],
)
def test_the_papers_schedule_has_these_values(step, expected):
    assert learning_rate(step, d_model=512) == pytest.approx(expected, rel=1e-7)


def test_a_recipe_of_other_numbers_has_this_value():
    # 2.53 / sqrt(128) * min(1 / sqrt(2000), ...) at the peak
    assert learning_rate(2000, d_model=128, warmup_steps=2000, factor=2.53) == pytest.approx(5.0003e-3, rel=1e-4)


@pytest.mark.parametrize("warmup_steps", [1, 7, 4000])
def test_the_rate_is_greatest_at_the_end_of_the_warm_up(warmup_steps):
    rates = [learning_rate(step, 64, warmup_steps) for step in range(1, 3 * warmup_steps + 1)]
    assert rates.index(max(rates)) + 1 == warmup_steps
    assert rates[:warmup_steps] == sorted(rates[:warmup_steps])
    assert rates[warmup_steps - 1 :] == sorted(rates[warmup_steps - 1 :], reverse=True)


@pytest.mark.parametrize("step", [1, 400, 9000])
def test_the_factor_multiplies_every_rate(step):
    assert learning_rate(step, 512, 4000, factor=3.0) == pytest.approx(3 * learning_rate(step, 512, 4000), rel=1e-12)


@pytest.mark.parametrize(("step", "warmup_steps"), [(0, 4000), (-1, 4000), (1, 0), (1, -5)])
def test_steps_below_1_are_refused(step, warmup_steps):
    with pytest.raises(ValueError, match=f"step={step}, warmup_steps={warmup_steps}"):
        learning_rate(step, 512, warmup_steps)
