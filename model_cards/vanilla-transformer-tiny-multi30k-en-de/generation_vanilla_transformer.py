"""The paper's decoding on top of transformers' `generate`: beam search with a length penalty (section 6.1).

A hypothesis Y of |Y| generated tokens (its `</s>` counted; the start symbol and a given decoder prefix not) scores
log P(Y | X) / lp(Y) with lp(Y) = ((5 + |Y|) / 6)^alpha, the form of Wu et al. 2016 (arXiv:1609.08144), equation (14),
which the paper used with alpha = 0.6 and a beam of 4. It may grow to 50 tokens more than its source has.

Shapes: B sentences, N beams, R returned hypotheses a sentence, T tokens.
"""

import copy
import math
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, GenerationMixin, StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput
from transformers.modeling_outputs import BaseModelOutput

NUM_BEAMS = 4
GNMT_ALPHA = 0.6
MAX_NEW_TOKENS_OVER_SOURCE = 50


class SourceLengthLimit(StoppingCriteria):
    """Stops each sentence at a length of its own, whatever its batch mates are.

    Args:
        limits: (B,) the most tokens to generate for each sentence.
    """

    def __init__(self, limits: torch.Tensor):
        self.limits = limits
        self.prompt_length = 1  # the start symbol; `_get_stopping_criteria` sets it where a prefix was given

    def __call__(self, input_ids: torch.LongTensor, scores, **kwargs) -> torch.BoolTensor:
        """Say which rows have reached their limit.

        Args:
            input_ids: (B * k, T) the decoder's tokens so far, k rows a sentence.
            scores: not used.

        Returns:
            (B * k,) True for rows that end here.
        """
        limits = self.limits.repeat_interleave(input_ids.shape[0] // len(self.limits)).to(input_ids.device)
        return input_ids.shape[1] - self.prompt_length >= limits


@dataclass
class BeamScore:
    """How finished hypotheses are ranked. It takes the place of the number `length_penalty` during a beam search.

    Args:
        gnmt_alpha: alpha in lp(Y), or `None` for transformers' own form, |Y|^length_penalty.
        length_penalty: the exponent of that form.
        limits: (B, 1) the most tokens to generate for each sentence, or `None` where one limit holds for all.
        num_return_sequences: R, how many hypotheses of a sentence are asked for.
    """

    gnmt_alpha: float | None
    length_penalty: float
    limits: torch.Tensor | None
    num_return_sequences: int

    def penalty(self, length):
        """lp for a length in generated tokens, a number or a tensor of them."""
        if self.gnmt_alpha is None:
            return length**self.length_penalty
        return ((5 + length) / 6) ** self.gnmt_alpha


class VanillaTransformerGenerationMixin(GenerationMixin):
    """`generate` with the paper's defaults; all that transformers' own can do is still there."""

    def _set_generation_defaults(self):
        """Give a generation config, new or loaded, the paper's values where it has none."""
        config = self.generation_config
        config._from_model_config = False  # it holds more than the model's configuration knows
        # `Seq2SeqTrainer` writes transformers' defaults into it, a limit of 20 tokens and a length penalty among them,
        # where nothing was set. To unset what equals a default changes nothing else.
        filled = {k: v for k, v in GenerationConfig._get_default_generation_params().items() if k != "num_beams"}
        if all(getattr(config, name, None) is not None for name, value in filled.items() if value is not None):
            for name, value in filled.items():
                if getattr(config, name, None) == value:
                    setattr(config, name, None)
        for name, value in (
            ("gnmt_alpha", GNMT_ALPHA),
            ("max_new_tokens_over_source", MAX_NEW_TOKENS_OVER_SOURCE),
        ):
            if not hasattr(config, name):
                setattr(config, name, value)
        if config.num_beams is None:
            config.num_beams = NUM_BEAMS

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor=None,
        stopping_criteria=None,
        **kwargs,
    ):
        """Translate: transformers' `generate`, with the paper's length penalty and limit.

        Args:
            inputs: (B, S) source ids; `input_ids`, `inputs_embeds` or `encoder_outputs` by name serve as well.
            generation_config: replaces the model's, field by field.
            logits_processor, stopping_criteria: as in transformers, as are all further arguments.
            gnmt_alpha (`float`): alpha of the length penalty, 0.6 unless the generation config says otherwise.
            length_penalty (`float`): turns the above off, and has transformers' meaning, |Y|^length_penalty.
            max_new_tokens_over_source (`int`): a sentence may grow to its own source tokens (mask 1, `</s>` counted)
                plus this, 50 unless the generation config says otherwise. An explicit `max_length` or
                `max_new_tokens` holds in its place.

        Returns:
            (B * R, T) token ids padded with `pad_token_id`, or transformers' output object where
            `return_dict_in_generate=True`.

        Raises:
            ValueError: an id outside the vocabulary, a limit or alpha that is no number.
        """
        self._set_generation_defaults()
        source = next(
            (x for x in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None), None
        )
        if kwargs.get("encoder_outputs") is not None:
            # A copy, as transformers repeats its rows in place for every beam; and a tuple serves as well.
            memory = kwargs["encoder_outputs"]
            memory = dict(memory) if isinstance(memory, BaseModelOutput) else {"last_hidden_state": memory[0]}
            kwargs["encoder_outputs"] = BaseModelOutput(**memory)
            source = memory["last_hidden_state"] if source is None else source
        for name, ids in (("input_ids", source), ("decoder_input_ids", kwargs.get("decoder_input_ids"))):
            if isinstance(ids, torch.Tensor) and not ids.is_floating_point():
                self._check_ids(name, ids)
        if source is None:
            return super().generate(inputs, generation_config, logits_processor, stopping_criteria, **kwargs)
        if source.shape[0] == 0:
            return self._no_translations(source.device, generation_config, kwargs)

        # What is settled here goes where the caller put the rest, so that transformers sees one source of settings.
        settled = {"gnmt_alpha": self._settle_gnmt_alpha(generation_config, kwargs)}
        if all(self._given(name, generation_config, kwargs) is None for name in ("max_length", "max_new_tokens")):
            limits = self._source_length_limits(source, generation_config, kwargs)
            settled["max_new_tokens"] = int(limits.max())
            stopping_criteria = StoppingCriteriaList([*(stopping_criteria or []), SourceLengthLimit(limits)])
        if generation_config is None:
            kwargs.update(settled)
        else:
            generation_config = copy.deepcopy(generation_config)
            kwargs.pop("gnmt_alpha", None)
            for name, value in settled.items():
                setattr(generation_config, name, value)
        return super().generate(inputs, generation_config, logits_processor, stopping_criteria, **kwargs)

    def _given(self, name, generation_config, kwargs):
        """A setting's value where it is set: in the call, in the config of the call, or in the model's config."""
        values = (kwargs.get(name), getattr(generation_config, name, None), getattr(self.generation_config, name, None))
        return next((value for value in values if value is not None), None)

    def _settle_gnmt_alpha(self, generation_config, kwargs):
        """alpha, or False where `length_penalty` is set as near to the call as alpha, or nearer.

        Not `None`, which transformers would take for not set.
        """
        for level in (kwargs, vars(generation_config or GenerationConfig()), vars(self.generation_config)):
            if level.get("length_penalty") is not None:
                return False
            if level.get("gnmt_alpha") is not None:
                return _number("gnmt_alpha", level["gnmt_alpha"])
        return False

    def _no_translations(self, device, generation_config, kwargs):
        """What `generate` gives for an empty batch."""
        sequences = torch.full((0, 1), self.config.decoder_start_token_id, dtype=torch.long, device=device)
        if not self._given("return_dict_in_generate", generation_config, kwargs):
            return sequences
        if self._given("num_beams", generation_config, kwargs) == 1:
            return GenerateEncoderDecoderOutput(sequences=sequences)
        return GenerateBeamEncoderDecoderOutput(sequences=sequences, sequences_scores=torch.zeros(0, device=device))

    def _source_length_limits(self, source, generation_config, kwargs):
        """(B,) the most tokens to generate for each sentence: its source tokens plus `max_new_tokens_over_source`."""
        over_source = kwargs.pop("max_new_tokens_over_source", None)
        if over_source is None:
            over_source = self._given("max_new_tokens_over_source", generation_config, {})
        if _number("max_new_tokens_over_source", over_source) < 0:
            raise ValueError(f"max_new_tokens_over_source must be at least 0, got {over_source}")
        mask = kwargs.get("attention_mask")
        if mask is None:
            lengths = torch.full(source.shape[:1], source.shape[1], device=source.device)
        else:
            lengths = mask.ne(0).sum(-1)
        limits = lengths + over_source
        rows = self.config.max_position_embeddings
        if self.config.position_encoding == "learned":
            prefix = kwargs.get("decoder_input_ids")
            limits = limits.clamp(max=rows - (1 if prefix is None else prefix.shape[1]))
        return limits.clamp(min=1)

    def _check_ids(self, name, ids):
        """Refuse ids outside the vocabulary before a kernel does, with its less helpful words."""
        if ids.numel() == 0:
            return
        lowest, highest = (int(i) for i in torch.aminmax(ids))
        if lowest < 0 or highest >= self.config.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(
                f"{name} holds the id {wrong}, but the vocabulary has {self.config.vocab_size} tokens, 0 to "
                f"{self.config.vocab_size - 1}: was the text tokenised with this model's tokenizer?"
            )

    def _get_stopping_criteria(self, generation_config, stopping_criteria, **kwargs):
        """As transformers has it; tells the length limit where the generated part of a row begins."""
        criteria = super()._get_stopping_criteria(generation_config, stopping_criteria, **kwargs)
        for criterion in criteria:
            if isinstance(criterion, SourceLengthLimit):
                criterion.prompt_length = generation_config.max_length - generation_config.max_new_tokens
        return criteria

    def _beam_search(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        """transformers' beam search with our ranking, and with `pad_token_id` after the end of every hypothesis."""
        limits = next((c.limits for c in stopping_criteria if isinstance(c, SourceLengthLimit)), None)
        generation_config.length_penalty = BeamScore(
            gnmt_alpha=None if generation_config.gnmt_alpha is False else generation_config.gnmt_alpha,
            length_penalty=generation_config.length_penalty,
            limits=None if limits is None else limits.unsqueeze(-1).to(input_ids.device),
            num_return_sequences=generation_config.num_return_sequences,
        )
        return_dict = generation_config.return_dict_in_generate
        generation_config.return_dict_in_generate = True
        output = super()._beam_search(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        # transformers takes a pad id of 0 for none and fills with `</s>`; a beam index of -1 marks what was filled.
        if generation_config._pad_token_tensor is not None:
            generated = output.sequences[:, input_ids.shape[1] :]
            generated.masked_fill_(output.beam_indices.lt(0), int(generation_config._pad_token_tensor))
        return output if return_dict else output.sequences

    def _update_finished_beams(self, topk_log_probs, cur_len, decoder_prompt_len, length_penalty, **kwargs):
        """As transformers has it, with candidates scored by our penalty: dividing by their length to the 0 is all that
        is left for its own to do."""
        score = length_penalty
        return super()._update_finished_beams(
            topk_log_probs=topk_log_probs / score.penalty(cur_len + 1 - decoder_prompt_len),
            cur_len=cur_len,
            decoder_prompt_len=decoder_prompt_len,
            length_penalty=0.0,
            **kwargs,
        )

    def _check_early_stop_heuristic(
        self,
        is_early_stop_heuristic_unsatisfied,
        running_beam_scores,
        beam_scores,
        is_sent_finished,
        cur_len,
        max_length,
        decoder_prompt_len,
        early_stopping,
        length_penalty,
    ):
        """Say for which sentences an open beam can still win.

        With `early_stopping=False` this is exact, as log-probabilities only fall: the best that the best open beam can
        reach is its present log P under the kindest penalty between the next length and the sentence's limit, and it
        has to beat the worst hypothesis that would be returned. `True` and "never" keep transformers' meaning.

        Args:
            is_early_stop_heuristic_unsatisfied: (B, 1) the sentences for which it could before this step.
            running_beam_scores: (B, N) log P of the open beams, best first.
            beam_scores: (B, N) scores of the finished hypotheses, best first.
            is_sent_finished: (B, N) which of those exist.
            cur_len, decoder_prompt_len, max_length: tokens by now, before generation, and at the most.

        Returns:
            (B, 1) booleans.
        """
        score = length_penalty
        length = cur_len - decoder_prompt_len
        limit = score.limits
        if limit is None:
            limit = torch.full_like(running_beam_scores[:, :1], max_length - decoder_prompt_len, dtype=torch.long)
        best_open = running_beam_scores[:, :1]
        if early_stopping is False:
            best_possible = torch.maximum(best_open / score.penalty(length + 1), best_open / score.penalty(limit))
            last = score.num_return_sequences - 1
            to_beat = beam_scores[:, last : last + 1].masked_fill(~is_sent_finished[:, last : last + 1], -1e9)
        else:
            grows = (score.length_penalty if score.gnmt_alpha is None else score.gnmt_alpha) > 0
            best_possible = best_open / score.penalty(limit if early_stopping == "never" and grows else length)
            to_beat = beam_scores.masked_fill(~is_sent_finished, -1e9).amin(dim=-1, keepdim=True)
        return is_early_stop_heuristic_unsatisfied & (best_possible > to_beat) & (length < limit)


def _number(name, value):
    """The value, refused unless it is a number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return value
