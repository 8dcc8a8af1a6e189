"""The paper's training (section 5) on Accelerate: one process or many, killed at any moment and resumed.

A step's gradient is of the summed loss of all batches of all processes, divided once by the number of their target
words. How a global batch is split therefore changes nothing.
"""

import json
import shutil
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import nn
from tqdm import tqdm

from .checkpoint import checkpoints, load_state, save_checkpoint, step_of
from .data import Collator, PairDataset, TokenBatchSampler, pair_lengths
from .evaluation import perplexity, score, translate
from .loss import label_smoothed_loss
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .prepare import Corpus
from .recipe import Recipe
from .schedule import learning_rate


class SummedLoss(nn.Module):
    """The model with its loss, in one module, as data-parallel wrappers need it.

    Args:
        model: what is trained.
    """

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor], label_smoothing: float = 0.0):
        """Loss of one batch.

        Args:
            batch: `input_ids` (B, S), `attention_mask` (B, S), `labels` (B, T) padded on the right with -100.
            label_smoothing: section 5.4.

        Returns:
            The summed loss and the number of target words.
        """
        labels = batch["labels"]
        hidden_states = self.model.model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            decoder_input_ids=self.model.prepare_decoder_input_ids_from_labels(labels),
            use_cache=False,
        ).last_hidden_state  # (B, T, D)
        return label_smoothed_loss(hidden_states, self.model.lm_head.weight, labels, label_smoothing)


def train(
    recipe: Recipe,
    corpus: Corpus,
    run: str | Path,
    trackers: list[str] | None = None,
    workers: int = 0,
    restart: bool = False,
    show_progress: bool = True,
) -> Path:
    """Train a model, going on from the newest checkpoint where the folder holds one of the same training.

    Args:
        recipe: the knobs.
        corpus: what to train on.
        run: folder for `checkpoints/`, `recipe.json` and `log.jsonl`.
        trackers: experiment trackers by Accelerate's names, such as "tensorboard".
        workers: processes that prepare batches, beside the one that trains.
        restart: remove the checkpoints, the record and the log of a training in this folder, if there is any.
        show_progress: whether to draw a progress bar.

    Returns:
        The last checkpoint's folder.

    Raises:
        FileExistsError: the folder holds a finished training.
        ValueError: the folder holds a training of another recipe, corpus or number of processes, or a `recipe.json`
            that is none of ours.
        FloatingPointError: the loss is not finite.
    """
    run = Path(run)
    accelerator = Accelerator(mixed_precision=recipe.mixed_precision, log_with=trackers, project_dir=run)
    if restart and accelerator.is_main_process:  # what a training writes, and nothing else that may lie there
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        for name in ("recipe.json", "log.jsonl"):
            (run / name).unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    identity = {"recipe": recipe.to_dict(), "corpus": corpus.fingerprint}
    newest = _claim(run, identity, recipe.steps)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        run.mkdir(parents=True, exist_ok=True)
        (run / "recipe.json").write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
    if trackers:
        accelerator.init_trackers(run.name)

    set_seed(recipe.seed)
    config = recipe.model_config(vocab_size=len(corpus.tokenizer))
    if newest is None:
        model = VanillaTransformerForConditionalGeneration(config)
    else:
        model = VanillaTransformerForConditionalGeneration.from_pretrained(newest, dtype=torch.float32)
    module = SummedLoss(model)
    optimizer = torch.optim.Adam(
        module.parameters(), lr=0.0, betas=tuple(recipe.adam_betas), eps=recipe.adam_epsilon, fused=True
    )
    module, optimizer = accelerator.prepare(module, optimizer)
    # Each rank drops out other units; the weights above came from one seed on all.
    torch.manual_seed(recipe.seed + accelerator.process_index)
    sampler = TokenBatchSampler(
        *pair_lengths(corpus.train),
        recipe.batch_tokens,
        seed=recipe.seed,
        rank=accelerator.process_index,
        ranks=accelerator.num_processes,
        accumulation=recipe.gradient_accumulation,
    )
    first_step = 1
    if newest is not None:
        state = load_state(newest)
        if len(state["random"]) != accelerator.num_processes:
            raise ValueError(
                f"{newest} was trained by {len(state['random'])} processes and cannot go on with "
                f"{accelerator.num_processes}: launch as many again"
            )
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(state["sampler"])
        _set_random_state(accelerator.device, state["random"][accelerator.process_index])
        first_step = state["step"] + 1
    collate = Collator(config.vocab_size, config.pad_token_id)
    batches = _endless(
        torch.utils.data.DataLoader(
            PairDataset(corpus.train),
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=workers,
            # Of its own, as every epoch draws from it, and dropout's generator must not notice where epochs begin.
            generator=torch.Generator(),
            pin_memory=accelerator.device.type == "cuda",
        ),
        sampler,
    )

    module.train()
    loss_sum, words, padded, since = 0.0, 0, 0, time.perf_counter()
    with tqdm(
        total=recipe.steps,
        initial=first_step - 1,
        desc="training",
        unit="step",
        disable=not (show_progress and accelerator.is_main_process),
    ) as progress:
        for step in range(first_step, recipe.steps + 1):
            micro_batches = [next(batches) for _ in range(recipe.gradient_accumulation)]
            own_words = sum(int(batch["labels"].ne(-100).sum()) for batch in micro_batches)
            step_words = int(accelerator.reduce(torch.tensor(own_words, device=accelerator.device), reduction="sum"))
            rate = learning_rate(step, config.d_model, recipe.warmup_steps, recipe.learning_rate_factor)
            for group in optimizer.param_groups:
                group["lr"] = rate
            step_loss = _accumulate_gradients(accelerator, module, micro_batches, step_words, recipe.label_smoothing)
            if not torch.isfinite(step_loss):
                raise FloatingPointError(
                    f"the loss of step {step} is {step_loss.item()}: lower learning_rate_factor or raise warmup_steps; "
                    f"the last good checkpoint is {next(reversed(checkpoints(run)), 'none yet')}"
                )
            if recipe.max_gradient_norm is not None:
                accelerator.clip_grad_norm_(module.parameters(), recipe.max_gradient_norm)
            optimizer.step()
            optimizer.zero_grad()
            sampler.batches_done += recipe.gradient_accumulation

            loss_sum, words = loss_sum + step_loss.item(), words + step_words
            padded += sum(batch["labels"].numel() for batch in micro_batches) * accelerator.num_processes
            progress.update()
            progress.set_postfix(loss=f"{step_loss.item() / step_words:.3f}", lr=f"{rate:.1e}", refresh=False)
            if step % recipe.save_every and step != recipe.steps:
                continue

            seconds = time.perf_counter() - since
            figures = {
                "step": step,
                "epoch": sampler.epoch,
                "learning_rate": rate,
                "training_loss": loss_sum / words,
                "words_per_second": words / seconds,
                "padding": 1 - words / padded,
                "seconds": seconds,
            }
            if corpus.validation is not None:
                figures |= _evaluate(accelerator, model, corpus, collate, recipe)
            states = gather_object([_random_state(accelerator.device)])
            if accelerator.is_main_process:
                _report(progress, run, figures)
                save_checkpoint(
                    run,
                    step,
                    lambda folder: (model.save_pretrained(folder), corpus.tokenizer.save_pretrained(folder)),
                    {
                        "step": step,
                        "optimizer": optimizer.state_dict(),
                        "sampler": sampler.state_dict(),
                        "random": states,
                    },
                    recipe.keep_last,
                )
            accelerator.log({name: value for name, value in figures.items() if name != "step"}, step=step)
            accelerator.wait_for_everyone()
            module.train()
            loss_sum, words, padded, since = 0.0, 0, 0, time.perf_counter()
    accelerator.end_training()
    return checkpoints(run)[-1]


def _claim(run, identity, steps):
    """The checkpoint to go on from, or `None` to begin; refuses a folder that holds another or a finished training."""
    existing = checkpoints(run)
    recorded = run / "recipe.json"
    if not recorded.exists():
        if existing:
            raise ValueError(
                f"{run} holds checkpoints but no recipe.json to say of what: choose another folder, or --restart"
            )
        return None
    try:
        known = json.loads(recorded.read_text(encoding="utf-8"))
        known["recipe"], known["corpus"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{recorded} is no record of a training: choose another folder") from error
    if not existing:
        return None
    if known["corpus"] != identity["corpus"]:
        raise ValueError(f"{run} holds a training on another corpus or tokenizer: choose another folder, or --restart")
    differing = sorted(name for name in identity["recipe"] if known["recipe"].get(name) != identity["recipe"][name])
    if differing:
        name = differing[0]
        raise ValueError(
            f"{run} holds a training by another recipe ({name} was {known['recipe'].get(name)!r} and is now "
            f"{identity['recipe'][name]!r}): choose another folder, or --restart"
        )
    if step_of(existing[-1]) >= steps:
        raise FileExistsError(f"{run} holds a finished training of {steps} steps: choose another folder, or --restart")
    return existing[-1]


def _random_state(device):
    """The state of the generators that dropout draws from, one tensor a generator."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_state(device, states):
    """Go on drawing from where `_random_state` was taken."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _endless(loader, sampler):
    """Batches of one epoch after the other; the sampler's place moves on as steps are done, not as batches are read."""
    while True:
        yield from loader
        sampler.load_state_dict({"epoch": sampler.epoch + 1, "batches_done": 0})


def _accumulate_gradients(accelerator, module, micro_batches, step_words, label_smoothing):
    """Backward through every micro-batch of a step; returns the summed loss of all processes, a scalar tensor."""
    total = torch.zeros((), device=accelerator.device)
    for i, batch in enumerate(micro_batches):
        batch = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
        is_last = i == len(micro_batches) - 1
        with torch.enable_grad() if is_last else accelerator.no_sync(module):
            with accelerator.autocast():
                loss, _ = module(batch, label_smoothing)
            # Data-parallel wrappers average over processes what is to be summed.
            accelerator.backward(loss * accelerator.num_processes / max(step_words, 1))
        total += loss.detach()
    return accelerator.reduce(total, reduction="sum")


@torch.no_grad()
def _evaluate(accelerator, model, corpus, collate, recipe):
    """Validation loss, perplexity and BLEU; every process takes its share of the batches."""
    model.eval()
    sampler = TokenBatchSampler(*pair_lengths(corpus.validation), max(recipe.batch_tokens, 4096))
    dataset = PairDataset(corpus.validation)
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in sampler.plan(0)[accelerator.process_index :: accelerator.num_processes]:
        inputs = collate(dataset.__getitems__(batch.tolist()))
        inputs = {name: tensor.to(accelerator.device) for name, tensor in inputs.items()}
        loss, words = SummedLoss(model)(inputs)
        sums += torch.stack((loss, words)).double().cpu()
    nats, words = accelerator.reduce(sums.to(accelerator.device, torch.float32), reduction="sum").tolist()
    figures = {"validation_loss": nats / words, "validation_perplexity": perplexity(nats, words)}
    if recipe.validation_bleu_sentences and accelerator.is_main_process:
        sample = corpus.validation[: recipe.validation_bleu_sentences]
        translations = translate(model, corpus.tokenizer, sample["source"], num_beams=1)
        figures["validation_bleu"] = score(translations, sample["target"], recipe.tgt_lang).bleu
    return figures


def _report(progress, run, figures):
    """One line for the reader and one for the log."""
    with open(run / "log.jsonl", "a", encoding="utf-8") as log:
        log.write(json.dumps(figures) + "\n")
    progress.write("  ".join(f"{name} {value:.5g}" for name, value in figures.items()))
