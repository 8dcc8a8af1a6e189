"""The paper's training (section 5) on Accelerate: one process or many, killed at any moment and resumed.

A step's gradient is of the summed loss of all batches of all processes, divided once by the number of their target
tokens. How a global batch is split therefore changes nothing.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, broadcast_object_list, gather_object, set_seed
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from tqdm import tqdm

from . import claim, cpu, journal
from .checkpoint import checkpoints, load_state, save_checkpoint, step_of, write_text
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .data import Collator, PairDataset, TokenBatchSampler, pair_lengths
from .evaluation import perplexity, score, translate
from .loss import label_smoothed_loss
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .prepare import Corpus
from .recipe import Recipe
from .schedule import learning_rate

# Whole tensors on the main process's CPU, under plain names, however the wrappers hold them.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
NOT_FINITE = "not_finite.json"
VERSIONS = ("torch", "transformers", "accelerate", "datasets", "tokenizers")


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
            The summed loss and the number of target tokens.
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
    trackers: Sequence[str] = ("tensorboard",),
    workers: int = 0,
    restart: bool = False,
    accept_changes: bool = False,
    show_progress: bool = True,
) -> Path:
    """Train a model, going on from the newest checkpoint where the folder holds one of the same training.

    Args:
        recipe: the knobs.
        corpus: what to train on.
        run: folder for `checkpoints/`, `recipe.json`, `log.jsonl`, `tracking/`, and in the end `report.json` and
            `curves.png`. All processes must see it.
        trackers: experiment trackers by Accelerate's names.
        workers: processes that prepare batches, beside each one that trains.
        restart: remove what an earlier training wrote into this folder, if there was any.
        accept_changes: go on from a checkpoint of another recipe, corpus or number of processes; where that moves the
            place in the corpus, with the next epoch.
        show_progress: whether to draw a progress bar.

    Returns:
        The last checkpoint's folder.

    Raises:
        BlockingIOError: another training is running in the folder.
        FileExistsError: the folder holds a finished training.
        ValueError: the folder holds a training of another recipe, corpus or number of processes, a `recipe.json`
            that is none of ours, or a damaged checkpoint; a corpus that the model or the recipe cannot take.
        FloatingPointError: the loss or the gradient is not finite.
        OSError: a checkpoint could not be written.
    """
    run = Path(run)
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # so that processes find each other without being told
        mixed_precision=recipe.mixed_precision,
        log_with=list(trackers) or None,
        project_config=ProjectConfiguration(project_dir=run, logging_dir=run / "tracking"),
    )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError("mixed_precision='fp16' needs a GPU: use 'bf16' or 'no' on a CPU")
    missing = {*trackers} - {str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with}
    if missing:
        raise ValueError(f"trackers {sorted(missing)} are not installed: install them, or pass others")
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and plugin.mixed_precision_policy is not None:
        # Accelerate would round the sums, of losses and of gradients, to half precision.
        plugin.mixed_precision_policy = replace(
            plugin.mixed_precision_policy, output_dtype=torch.float32, reduce_dtype=torch.float32
        )
    knobs = {**recipe.to_dict(), "mixed_precision": accelerator.mixed_precision}  # the launcher's, if not the recipe's
    identity = {"recipe": knobs, "corpus": corpus.fingerprint, "processes": accelerator.num_processes}
    if accelerator.device.type == "cpu":
        for setting in (cpu.keep_freed_memory(), cpu.use_fastest_exact_products()):
            accelerator.print(setting)
    with _main_holds_lock(accelerator, run):
        newest = _on_main(accelerator, lambda: _find_newest(run, identity, recipe.steps, restart, accept_changes))
        training = Training(recipe, corpus, run, accelerator, identity, newest, workers, accept_changes)
        # Only now, when nothing is left to be refused, is the folder touched.
        _on_main(accelerator, lambda: _take_over(run, identity, newest))
        accelerator.init_trackers(
            run.name,
            config={
                name: value if isinstance(value, (bool, int, float)) else str(value)
                for name, value in identity["recipe"].items()
            },
            init_kwargs={"tensorboard": {"purge_step": training.step + 1}},
        )
        with tqdm(
            total=recipe.steps,
            initial=training.step,
            desc="training",
            unit="step",
            disable=not (show_progress and accelerator.is_main_process),
        ) as progress:
            try:
                while training.step < recipe.steps and not training.is_out_of_patience():
                    training.take_step()
                    progress.update()
                    progress.set_postfix_str(training.describe_step(), refresh=False)
                    saves = training.step % recipe.save_every == 0 or training.step == recipe.steps
                    if not saves and training.step % recipe.log_every:
                        continue
                    figures = training.figures() | (training.validate() if saves else {})
                    training.log(figures)
                    if saves:
                        training.save(figures)
                        if accelerator.is_main_process:
                            progress.write("  ".join(f"{name} {value:.5g}" for name, value in figures.items()))
                    training.begin_counting()
            except OSError as error:  # a full disk, say
                raise OSError(f"{error}; training stopped at step {training.step}, {_last_good(run)}") from error
        report = training.report()
        _on_main(accelerator, lambda: journal.write_report(run, report))
    # The wrapped module goes before the process group: as its last owner, it can wait for ever for gloo's thread.
    del training
    accelerator.free_memory()
    accelerator.end_training()
    return checkpoints(run)[-1]


class Training:
    """A training in progress: the model, its optimizer, its place in the corpus, and what has been counted.

    Args:
        recipe, corpus, run, workers, accept_changes: as of `train`.
        accelerator: of this process.
        identity: what `claim` compares.
        newest: the checkpoint to go on from, or `None` to begin.
    """

    def __init__(self, recipe, corpus, run, accelerator, identity, newest, workers, accept_changes):
        self.recipe, self.corpus, self.run = recipe, corpus, run
        self.accelerator, self.identity = accelerator, identity
        if recipe.patience is not None and corpus.validation is None:
            raise ValueError(f"patience={recipe.patience} needs a validation split, and the corpus has none")
        set_seed(recipe.seed)
        self.config = recipe.model_config(vocab_size=len(corpus.tokenizer))
        lengths = pair_lengths(corpus.train)
        self._refuse_beyond_positions(lengths)
        self.sampler = TokenBatchSampler(
            *lengths,
            recipe.batch_tokens,
            seed=recipe.seed,
            rank=accelerator.process_index,
            ranks=accelerator.num_processes,
            accumulation=recipe.gradient_accumulation,
        )
        next(iter(self.sampler))  # raises where the corpus makes too few batches for a step
        if newest is None:
            model = VanillaTransformerForConditionalGeneration(self.config)
        else:
            model = _load_model(newest, self.config, corpus.tokenizer)
        if recipe.activation_checkpointing:
            # Named anew in transformers 5.24.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        if recipe.compile:
            model.model.compile(dynamic=True)
        module = SummedLoss(model)
        optimizer = torch.optim.Adam(
            module.parameters(), lr=0.0, betas=tuple(recipe.adam_betas), eps=recipe.adam_epsilon, fused=True
        )
        self.module, self.optimizer = accelerator.prepare(module, optimizer)
        # Each rank drops out other units; the weights above came from one seed on all.
        torch.manual_seed(recipe.seed + accelerator.process_index)
        self.step = 0
        self.totals = {"seconds": 0.0, "target_tokens": 0, "skipped_steps": 0}
        self.best = {"value": None, "step": None, "evaluations_since": 0}
        if newest is not None:
            self._go_on_from(newest, accept_changes)
        self.collate = Collator(self.config.vocab_size, self.config.pad_token_id)
        self.batches = _endless(
            torch.utils.data.DataLoader(
                PairDataset(corpus.train, number_pairs=True),
                batch_sampler=self.sampler,
                collate_fn=self.collate,
                num_workers=workers,
                # Of its own, as every epoch draws from it, and dropout's generator must not notice where epochs begin.
                generator=torch.Generator(),
                pin_memory=accelerator.device.type == "cuda",
            ),
            self.sampler,
        )
        self.module.train()
        self.begin_counting()

    def _refuse_beyond_positions(self, lengths):
        """Refuse a corpus with longer sentences than a table of learned positions has rows."""
        longest, rows = max(int(side.max(initial=0)) for side in lengths), self.config.max_position_embeddings
        if self.config.position_encoding == "learned" and longest > rows:
            raise ValueError(
                f"the corpus has a sentence of {longest} tokens and the model max_position_embeddings={rows} learned "
                "positions: raise that, or prepare the corpus with a lower max_length"
            )

    def _go_on_from(self, checkpoint, accept_changes):
        """Take up optimizer, place, random numbers and counts where a checkpoint left them."""
        state = load_state(checkpoint)
        if not accept_changes:
            claim.refuse_changes(checkpoint, state["identity"], self.identity)
        set_optimizer_state_dict(
            self.module,
            self.optimizer.optimizer,
            state["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )
        for group in self.optimizer.param_groups:  # the recipe's, where changes are accepted
            group |= {"betas": tuple(self.recipe.adam_betas), "eps": self.recipe.adam_epsilon}
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step, self.totals, self.best = state["step"], state["totals"], state["best"]
        if accept_changes:
            self.best["evaluations_since"] = 0
        recipe = state["identity"]["recipe"]
        if (recipe["best_by"], state["identity"]["corpus"]) != (self.recipe.best_by, self.identity["corpus"]):
            self.best = {"value": None, "step": None, "evaluations_since": 0}  # measured otherwise
        if _place(state["identity"]) == _place(self.identity):
            self.sampler.load_state_dict(state["sampler"])
            _set_random_state(self.accelerator.device, state["random"][self.accelerator.process_index])
        else:
            self.sampler.load_state_dict({"epoch": state["sampler"]["epoch"] + 1, "batches_done": 0})

    def begin_counting(self):
        """Count tokens, loss and seconds from here on, for the next line of the log."""
        self.window = {"loss": 0.0, "norm": 0.0, "steps": 0, "target": 0, "source": 0, "cells": 0}
        self.since = time.perf_counter()

    def take_step(self):
        """One update of the weights from the next global batch.

        Raises:
            FloatingPointError: the loss or, without a gradient scaler, the gradient is not finite; the weights are as
                they were.
        """
        recipe, accelerator, begin = self.recipe, self.accelerator, time.perf_counter()
        self.step += 1
        micro_batches = [next(self.batches) for _ in range(recipe.gradient_accumulation)]
        pairs = [batch.pop("pairs") for batch in micro_batches]
        counts = torch.tensor([_count(batch) for batch in micro_batches]).sum(0).to(accelerator.device)
        target, source, cells = accelerator.reduce(counts, reduction="sum").tolist()
        self.rate = learning_rate(self.step, self.config.d_model, recipe.warmup_steps, recipe.learning_rate_factor)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        losses = accumulate_gradients(accelerator, self.module, micro_batches, target, recipe.label_smoothing)
        accelerator.unscale_gradients()
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        norm = _whole(get_total_norm(gradients))
        loss, norm_value = torch.stack((accelerator.reduce(losses.sum(), reduction="sum"), norm)).tolist()
        if not math.isfinite(loss):
            self._stop(f"the loss of step {self.step} is {loss}", losses, pairs)
        if not math.isfinite(norm_value) and accelerator.scaler is None:
            self._stop(f"the gradient of step {self.step} has the norm {norm_value}", losses, pairs)
        if recipe.max_gradient_norm is not None:
            clip_grads_with_norm_(self.module.parameters(), recipe.max_gradient_norm, norm)
        scale = None if accelerator.scaler is None else accelerator.scaler.get_scale()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sampler.batches_done += recipe.gradient_accumulation
        if scale is not None and accelerator.scaler.get_scale() < scale:  # fp16 overflowed: no update this time
            self.totals["skipped_steps"] += 1
        else:
            self.window["norm"] += norm_value
            self.window["steps"] += 1
        for name, value in {"loss": loss, "target": target, "source": source, "cells": cells}.items():
            self.window[name] += value
        seconds = time.perf_counter() - begin
        self.totals["seconds"] += seconds
        self.totals["target_tokens"] += target
        self.latest = {"loss": loss / max(target, 1), "norm": norm_value, "tokens/s": target / seconds}
        self.latest["padding"] = 1 - (target + source) / max(cells, 1)

    def _stop(self, what, losses, pairs):
        """Raise for a loss or gradient that is not finite, and write down from which pairs it came."""
        is_bad = (~losses.isfinite()).tolist()
        own = [(bad, number) for batch, bad in zip(pairs, is_bad, strict=True) for number in batch.tolist()]
        everybodys = gather_object(own)
        any_bad = any(bad for bad, _ in everybodys)  # else it is the gradient, and may be any batch's
        numbers = [number for bad, number in everybodys if bad or not any_bad]
        path = self.run / NOT_FINITE
        if self.accelerator.is_main_process:
            write_text(path, json.dumps({"step": self.step, "pairs": numbers}) + "\n")
        raise FloatingPointError(
            f"{what}; its sentences are the pairs {', '.join(map(str, numbers[:5]))}{', …' * (len(numbers) > 5)} of "
            f"the corpus, counted from 0 (all {len(numbers)} in {path}): lower learning_rate_factor or raise "
            f"warmup_steps; {_last_good(self.run)}"
        )

    def describe_step(self) -> str:
        """The latest step in half a line: loss in nats a token, what it is as a perplexity, speed, padding, …"""
        latest = self.latest
        text = (
            f"loss {latest['loss']:.3f}, ppl {perplexity(latest['loss'], 1):.4g}, {latest['tokens/s']:,.0f} tokens/s, "
            f"padding {latest['padding']:.0%}, lr {self.rate:.1e}, norm {latest['norm']:.2g}"
        )
        return text + (f", skipped {self.totals['skipped_steps']}" if self.totals["skipped_steps"] else "")

    def figures(self) -> dict:
        """What was counted since `begin_counting`; the loss is the smoothed one, and the perplexity is its exp."""
        window, seconds = self.window, time.perf_counter() - self.since
        return {
            "step": self.step,
            "epoch": self.sampler.epoch,
            "learning_rate": self.rate,
            "training_loss": window["loss"] / max(window["target"], 1),
            "training_perplexity": perplexity(window["loss"], max(window["target"], 1)),
            "gradient_norm": window["norm"] / max(window["steps"], 1),
            "target_tokens_per_second": window["target"] / seconds,
            "padding": 1 - (window["target"] + window["source"]) / max(window["cells"], 1),
            "seconds": seconds,
            "skipped_steps": self.totals["skipped_steps"],
        }

    def log(self, figures: dict):
        """Give the log and the trackers a line.

        Args:
            figures: what was measured, by name; "step" among them.
        """
        _on_main(self.accelerator, lambda: journal.write_line(self.run, figures))
        values = {name: value for name, value in figures.items() if name != "step"}
        self.accelerator.log(values, step=figures["step"])

    def validate(self) -> dict:
        """Validation loss, perplexity and BLEU of the model as it is, and whether it is the best so far.

        Returns:
            Figures by name; none without a validation split.
        """
        validation, recipe = self.corpus.validation, self.recipe
        if validation is None:
            return {}
        nats, tokens = self._validation_loss()
        figures = {"validation_loss": nats / tokens, "validation_perplexity": perplexity(nats, tokens)}
        if recipe.validation_bleu_sentences:
            sample = validation[: recipe.validation_bleu_sentences]
            weights = get_model_state_dict(self.module, options=WHOLE)

            def bleu():
                model = _model_of(self.config, weights).to(self.accelerator.device)
                translations = translate(model, self.corpus.tokenizer, sample["source"], num_beams=1)
                return score(translations, sample["target"], recipe.tgt_lang).bleu

            figures["validation_bleu"] = _on_main(self.accelerator, bleu)
        value, best = figures[recipe.best_by], self.best["value"]
        if best is None or (value > best if recipe.best_by == "validation_bleu" else value < best):
            self.best = {"value": value, "step": self.step, "evaluations_since": 0}
        else:
            self.best["evaluations_since"] += 1
        return figures

    @torch.no_grad()
    def _validation_loss(self):
        """Summed cross-entropy of the validation split and its target tokens; each process takes a share."""
        self.module.eval()
        lengths = pair_lengths(self.corpus.validation)
        budget = max(self.recipe.batch_tokens, *(int(side.max()) for side in lengths))
        batches = TokenBatchSampler(*lengths, budget).plan(0)
        dataset = PairDataset(self.corpus.validation)
        rank, ranks, device = self.accelerator.process_index, self.accelerator.num_processes, self.accelerator.device
        sums = torch.zeros(2, dtype=torch.float64)
        for start in range(0, len(batches), ranks):  # as many on each rank, for sharded models gather in every forward
            batch = batches[min(start + rank, len(batches) - 1)]
            inputs = self.collate(dataset.__getitems__(batch.tolist()))
            loss, tokens = self.module({name: tensor.to(device) for name, tensor in inputs.items()})
            if start + rank < len(batches):
                sums += torch.stack((loss, tokens)).double().cpu()
        self.module.train()
        return (
            torch.stack([torch.tensor(s, dtype=torch.float64) for s in gather_object([sums.tolist()])]).sum(0).tolist()
        )

    def save(self, figures: dict):
        """Save a checkpoint of this step.

        Args:
            figures: what was measured at it.

        Raises:
            OSError: it could not be written.
        """
        weights = get_model_state_dict(self.module, options=WHOLE)
        optimizer = get_optimizer_state_dict(self.module, self.optimizer.optimizer, options=WHOLE)
        states = gather_object([_random_state(self.accelerator.device)])

        def write():
            model = _model_of(self.config, weights)
            scaler = self.accelerator.scaler
            save_checkpoint(
                self.run,
                self.step,
                lambda folder: (model.save_pretrained(folder), self.corpus.tokenizer.save_pretrained(folder)),
                {
                    "step": self.step,
                    "identity": self.identity,
                    "versions": {name: version(name) for name in VERSIONS},
                    "optimizer": optimizer,
                    "scaler": scaler.state_dict() if scaler is not None else None,
                    "sampler": self.sampler.state_dict(),
                    "random": states,
                    "totals": self.totals,
                    "best": self.best,
                },
                figures,
                self.recipe.keep_last,
                self.recipe.keep_best,
                self.recipe.best_by,
            )

        _on_main(self.accelerator, write)

    def is_out_of_patience(self) -> bool:
        """Whether the model has not become better for as many evaluations as the recipe waits."""
        return self.recipe.patience is not None and self.best["evaluations_since"] >= self.recipe.patience

    def report(self) -> dict:
        """What the training came to."""
        best = (
            {}
            if self.best["step"] is None
            else {
                "best_by": self.recipe.best_by,
                "best_value": self.best["value"],
                "best_step": self.best["step"],
            }
        )
        saved = [str(folder) for folder in checkpoints(self.run)]
        return {
            "steps": self.step,
            "stopped_early": self.step < self.recipe.steps,
            "training_seconds": self.totals["seconds"],
            "target_tokens": self.totals["target_tokens"],
            "skipped_steps": self.totals["skipped_steps"],
            **best,
            "last": next(reversed(journal.read_log(self.run)), {}),
            "checkpoints": saved,
        }


def accumulate_gradients(
    accelerator: Accelerator,
    module: nn.Module,
    micro_batches: list[dict[str, torch.Tensor]],
    step_tokens: int,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Backward through every micro-batch of a step.

    Args:
        accelerator: of this process.
        module: `SummedLoss`, as `accelerator.prepare` gave it.
        micro_batches: this process's share of the global batch.
        step_tokens: target tokens of the global batch; where there are none the gradient is 0.
        label_smoothing: section 5.4.

    Returns:
        The summed loss of each micro-batch of this process, (A,).
    """
    losses = []
    for i, batch in enumerate(micro_batches):
        batch = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
        is_last = i == len(micro_batches) - 1
        with torch.enable_grad() if is_last else accelerator.no_sync(module):
            with accelerator.autocast():
                loss, _ = module(batch, label_smoothing)
            # Data-parallel wrappers average over processes what is to be summed.
            accelerator.backward(loss * accelerator.num_processes / max(step_tokens, 1))
        losses.append(loss.detach())
    return torch.stack(losses)


def _find_newest(run, identity, steps, restart, accept_changes):
    """The checkpoint to go on from, or `None` to begin; refuses a folder that is another training's or finished."""
    if restart:
        claim.read_record(run)  # refuses a folder of somebody else's
        return None
    newest = claim.newest_to_go_on_from(run, identity, accept_changes)
    done = 0 if newest is None else step_of(newest)
    if (run / journal.REPORT).exists() and (not accept_changes or done >= steps):
        raise FileExistsError(f"{run} holds a finished training of {done} steps: choose another folder, or --restart")
    return newest


def _take_over(run, identity, newest):
    """Remove what an earlier training wrote beyond its newest checkpoint, or all of it, and write down whose it is."""
    for name in (journal.REPORT, journal.CURVES, NOT_FINITE):
        (run / name).unlink(missing_ok=True)
    if newest is None:  # what a training writes, and nothing else that may lie there
        for folder in (*(run / "checkpoints").glob("step-*"), *(run / "checkpoints").glob(".step-*"), run / "tracking"):
            shutil.rmtree(folder, ignore_errors=True)
    claim.record(run, identity)
    journal.forget_after(run, 0 if newest is None else step_of(newest))


def _last_good(run):
    """For messages: where to go on from."""
    return f"the last good checkpoint is {next(reversed(checkpoints(run)), 'none yet')}"


@contextmanager
def _main_holds_lock(accelerator, run):
    """The main process holds the folder's lock; all fail where it cannot."""
    held = []
    _on_main(accelerator, lambda: held.append(claim.lock(run)))
    try:
        yield
    finally:
        for lock in held:
            lock.release()


def _on_main(accelerator, act: Callable):
    """What `act` returns on the main process, on all; where it raises, all do, so that none waits for the others."""
    outcome = [None]
    if accelerator.is_main_process:
        try:
            outcome = [act()]
        except Exception as error:
            broadcast_object_list([error])
            raise
    broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _load_model(checkpoint, config, tokenizer):
    """The model of a checkpoint, in float32, with the dropout of a recipe that may be another."""
    try:
        known = VanillaTransformerConfig.from_pretrained(checkpoint)
        vocabulary = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        if vocabulary != json.loads(tokenizer.backend_tokenizer.to_str())["model"]:
            raise ValueError(f"{checkpoint} has another vocabulary than the corpus, and cannot go on with that")
        for name in sorted(VanillaTransformerConfig.__annotations__):
            if "dropout" not in name and getattr(known, name) != getattr(config, name):
                raise ValueError(
                    f"{checkpoint} is a model with {name}={getattr(known, name)!r} and cannot go on with "
                    f"{getattr(config, name)!r}: choose another folder, or --restart"
                )
        return VanillaTransformerForConditionalGeneration.from_pretrained(
            checkpoint, config=config, dtype=torch.float32
        )
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{checkpoint} is damaged ({error}): choose another folder, or --restart") from error


def _model_of(config, weights):
    """A model on the CPU that holds these weights, named as `SummedLoss` names them."""
    with torch.device("meta"):  # neither memory nor random numbers for weights that are replaced
        model = VanillaTransformerForConditionalGeneration(config)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()}, assign=True)
    model.tie_weights()
    return model


def _place(identity):
    """What must be the same for a place in the corpus to mean the same."""
    recipe = identity["recipe"]
    knobs = [recipe[name] for name in ("batch_tokens", "gradient_accumulation", "seed")]
    return identity["corpus"], identity["processes"], knobs


def _count(batch):
    """Target tokens, source tokens, and places for either, padding counted."""
    labels, mask = batch["labels"], batch["attention_mask"]
    return int(labels.ne(-100).sum()), int(mask.sum()), labels.numel() + mask.numel()


def _whole(norm):
    """A norm over sharded gradients, gathered from the processes."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


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
