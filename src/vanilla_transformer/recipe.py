"""A training run's knobs, read from YAML. The defaults are the paper's base model (section 5)."""

from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path

import yaml
from huggingface_hub.dataclasses import strict

from .configuration_vanilla_transformer import VanillaTransformerConfig


@strict
@dataclass(kw_only=True)
class Recipe:
    """What distinguishes one training from another; a file says only where it differs from these defaults.

    Args:
        src_lang, tgt_lang: languages, "en" and "de" say.
        vocab_size: of the shared BPE (5.1).
        max_length: tokens of the longest sentence to train on; longer pairs are left out and counted.
        model: fields of `VanillaTransformerConfig` that differ from the base model.
        batch_tokens: source and target tokens of one batch on one process, padding counted (5.1: about 25,000).
        gradient_accumulation: batches that make one step of one process.
        steps: optimizer steps (5.2: 100,000 for base, 300,000 for big).
        warmup_steps, learning_rate_factor: of equation (3); the factor is 1 in the paper.
        adam_betas, adam_epsilon: of the optimizer (5.3).
        label_smoothing: of the loss (5.4).
        max_gradient_norm: gradients are clipped to it; none in the paper.
        mixed_precision: "no", "bf16" or "fp16"; `None` leaves it to `accelerate launch`.
        compile: run the layers through `torch.compile`; pays on GPUs.
        activation_checkpointing: keep no layer's inner activations, compute them again in the backward pass: less
            memory, a third more time.
        seed: of initialisation, dropout and the order of batches.
        log_every: steps between lines of the log.
        save_every: steps between checkpoints, at which the model is evaluated, too.
        keep_last: newest checkpoints kept, which are those that are averaged in the end (6.1: 5 for base, 20 for big).
        keep_best: best checkpoints kept beside them, by `best_by`.
        best_by: "validation_loss" or "validation_bleu".
        patience: evaluations in a row without a better `best_by` after which training stops; `None` for never.
        validation_bleu_sentences: how many validation sentences are translated (greedily) for BLEU at every
            checkpoint; 0 for none.

    Raises:
        StrictDataclassError: a value of the wrong type or out of range; the message names it.
    """

    src_lang: str
    tgt_lang: str
    vocab_size: int = 37000
    max_length: int = 256
    model: dict = field(default_factory=dict)
    batch_tokens: int = 25000
    gradient_accumulation: int = 1
    steps: int = 100_000
    warmup_steps: int = 4000
    learning_rate_factor: float | int = 1.0
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    adam_epsilon: float = 1e-9
    label_smoothing: float | int = 0.1
    max_gradient_norm: float | int | None = None
    mixed_precision: str | None = None
    compile: bool = False
    activation_checkpointing: bool = False
    seed: int = 0
    log_every: int = 100
    save_every: int = 1000
    keep_last: int = 5
    keep_best: int = 1
    best_by: str = "validation_loss"
    patience: int | None = None
    validation_bleu_sentences: int = 200

    def validate_ranges(self):
        """Counts are positive and rates are rates.

        Raises:
            ValueError: naming the knob and its value.
        """
        counts = ("vocab_size", "max_length", "batch_tokens", "gradient_accumulation", "steps", "warmup_steps")
        for name in (*counts, "log_every", "save_every", "keep_last", "patience"):
            value = getattr(self, name)
            # A bool is an int to Python, and to older versions of @strict.
            if value is not None and (isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("learning_rate_factor", "adam_epsilon", "max_gradient_norm"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("seed", "keep_best", "validation_bleu_sentences"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.best_by not in ("validation_loss", "validation_bleu"):
            raise ValueError(f"best_by must be 'validation_loss' or 'validation_bleu', got {self.best_by!r}")
        if self.best_by == "validation_bleu" and not self.validation_bleu_sentences:
            raise ValueError("best_by='validation_bleu' needs validation_bleu_sentences above 0")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas must be two numbers of at least 0 and below 1, got {self.adam_betas}")
        if self.mixed_precision not in (None, "no", "bf16", "fp16"):
            raise ValueError(f"mixed_precision must be 'no', 'bf16' or 'fp16', got {self.mixed_precision!r}")

    def model_config(self, vocab_size: int | None = None) -> VanillaTransformerConfig:
        """The configuration of the model that this recipe trains.

        Args:
            vocab_size: what the trained tokenizer came to; `None` for the recipe's own figure.

        Returns:
            `VanillaTransformerConfig`.

        Raises:
            ValueError, StrictDataclassError: a field under `model` that does not exist or does not fit.
        """
        known = set(VanillaTransformerConfig.__annotations__)
        for key in self.model:
            if key in ("vocab_size", "src_lang", "tgt_lang"):
                raise ValueError(f"{key} under model is the recipe's own knob: set it there")
            if key not in known:
                raise ValueError(_unknown("field under model", key, known))
        return VanillaTransformerConfig(
            vocab_size=self.vocab_size if vocab_size is None else vocab_size,
            src_lang=self.src_lang,
            tgt_lang=self.tgt_lang,
            **self.model,
        )

    def to_dict(self) -> dict:
        """All knobs by name."""
        return asdict(self)


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe.

    Args:
        path: a YAML file of `Recipe`'s arguments.

    Returns:
        `Recipe`, its model's configuration checked as well.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a key that does not exist, with the nearest that does, or a file that is no mapping.
        StrictDataclassError: a value of the wrong type or out of range.
    """
    with open(path, encoding="utf-8") as file:
        try:
            knobs = yaml.safe_load(file)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(knobs, dict):
        raise ValueError(f"{path}: a recipe is a mapping of knobs to values, got {type(knobs).__name__}")
    known = {f.name for f in fields(Recipe)}
    for key in knobs:
        if key not in known:
            raise ValueError(f"{path}: {_unknown('knob', key, known)}")
    missing = [name for name in ("src_lang", "tgt_lang") if name not in knobs]
    if missing:
        raise ValueError(f"{path}: the recipe does not say {' and '.join(missing)}")
    recipe = Recipe(**knobs)
    recipe.model_config()
    return recipe


def _unknown(what, key, known):
    """A message that names the nearest key that exists."""
    nearest = get_close_matches(str(key), known, n=1, cutoff=0.5)
    return f"unknown {what} {key!r}" + (
        f": did you mean {nearest[0]!r}?" if nearest else f", known are {sorted(known)}"
    )
