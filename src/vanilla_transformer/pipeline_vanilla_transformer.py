"""`pipeline("translation")`: text in, translation out. transformers dropped the task in version 5; this one is ours.

Shapes: B texts of a batch, S source tokens, R hypotheses a text, T target tokens.
"""

import itertools
import re
from collections.abc import Iterable, Iterator

import torch
from transformers import Pipeline

BATCH_SIZE = 32
SORTED_AT_ONCE = 16  # batches' worth of a stream that is read ahead to be sorted by length
TASK = re.compile(r"translation_(?P<src_lang>\w+?)_to_(?P<tgt_lang>\w+)")


class TranslationPipeline(Pipeline):
    """Translates a text, a list, a `datasets` column or a stream, sentences of like length together.

    The languages are those of the model. Where its configuration declares them, a `src_lang` or `tgt_lang` given here,
    or in the task's name ("translation_en_to_de"), has to agree.

    Args:
        model: a sequence-to-sequence model.
        tokenizer: its tokenizer.
        src_lang, tgt_lang (`str`, *optional*): the languages wanted.
        batch_size (`int`, *optional*): texts translated together, 32 unless given.
        kwargs: arguments of `generate`, such as `num_beams`, for all calls; and those of every pipeline.
    """

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False

    def __call__(self, inputs: str | Iterable[str], *, batch_size: int | None = None, num_workers=None, **kwargs):
        """Translate.

        Args:
            inputs: a text; or a list or a `datasets` column of them; or a generator or torch dataset.
            batch_size: texts translated together.
            num_workers: not used, as tokenising costs next to nothing.
            src_lang, tgt_lang, truncation: as for `preprocess`.
            kwargs: arguments of `generate`.

        Returns:
            For a text, `[{"translation_text": …}]`. For a list or column, a dict each. For a stream, an iterator over
            lists of one dict. With `num_return_sequences` above 1, a list of that many dicts a text, best first, each
            with its `score`. Blank text gives blank text.

        Raises:
            ValueError: something that is no text, or languages that are not the model's.
        """
        preprocess, generation, _ = self._sanitize_parameters(**kwargs)
        preprocess, generation = {**self._preprocess_params, **preprocess}, {**self._forward_params, **generation}
        size = next((size for size in (batch_size, self._batch_size) if size is not None), BATCH_SIZE)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"batch_size must be a whole number of at least 1, got {size!r}")
        if isinstance(inputs, str):
            return next(self._translate([inputs], size, preprocess, generation))
        if isinstance(inputs, dict | bytes) or not hasattr(inputs, "__iter__") and not hasattr(inputs, "__getitem__"):
            raise ValueError(f"inputs must be a text or texts, such as a list or a column, got {inputs!r:.80}")
        is_stream = not hasattr(inputs, "__len__") or isinstance(inputs, torch.utils.data.Dataset)
        results = self._translate(inputs, size, preprocess, generation, size * SORTED_AT_ONCE if is_stream else None)
        if is_stream:
            return results
        return [result[0] if len(result) == 1 and "score" not in result[0] else result for result in results]

    def _sanitize_parameters(self, src_lang=None, tgt_lang=None, truncation=None, **generation):
        """Part arguments into those of `preprocess`, `_forward` and `postprocess`; the languages are checked here."""
        named = TASK.fullmatch(self.task or "")
        for name, wanted in (("src_lang", src_lang), ("tgt_lang", tgt_lang)):
            wanted = wanted or (named and named[name])
            known = getattr(self.model.config, name, None)
            if wanted and known and wanted != known:
                raise ValueError(
                    f"{name}={wanted!r} was asked for, but this model translates from "
                    f"{self.model.config.src_lang!r} to {self.model.config.tgt_lang!r}"
                )
        return {} if truncation is None else {"truncation": truncation}, generation, {}

    def _translate(self, inputs, size, preprocess, generation, window=None) -> Iterator[list[dict]]:
        """Yield every text's hypotheses in the order of the texts, reading `window` texts ahead (`None` for all)."""
        inputs = iter(inputs)
        while texts := list(itertools.islice(inputs, window)):
            ids = [self.preprocess(text, **preprocess) for text in texts]
            copies = self._hypotheses_wanted(generation)
            blank = {"translation_text": ""} if copies == 1 else {"translation_text": "", "score": 0.0}
            results = [[dict(blank) for _ in range(copies)] for _ in texts]
            # The longest go first: a text that cannot be translated stops the work before it has begun.
            order = sorted((i for i in range(len(texts)) if ids[i]), key=lambda i: -len(ids[i]))
            for start in range(0, len(order), size):
                batch = order[start : start + size]
                outputs = self.forward(self._pad([ids[i] for i in batch]), copies=copies, **generation)
                for i, result in zip(batch, self.postprocess(outputs), strict=True):
                    results[i] = result
            yield from results

    def _hypotheses_wanted(self, generation) -> int:
        """R, from the call, its generation config or the model's."""
        configs = (generation.get("generation_config"), self.model.generation_config)
        values = (generation.get("num_return_sequences"), *(getattr(c, "num_return_sequences", None) for c in configs))
        wanted = next((value for value in values if value is not None), 1)
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
            raise ValueError(f"num_return_sequences must be a whole number of at least 1, got {wanted!r}")
        return wanted

    def preprocess(self, text: str, truncation: bool = False) -> list[int]:
        """Tokenise one text; what looks like a special token in it is text.

        Args:
            text: any; nothing is cut off unless asked for.
            truncation: cut a text that is longer than the model's table of learned positions. Sinusoidal positions
                have no end, and nothing is cut.

        Returns:
            S ids ending in `</s>`; none for blank text.

        Raises:
            ValueError: no text.
        """
        if not isinstance(text, str):
            raise ValueError(f"a text to translate must be a str, got {type(text).__name__}: {text!r:.80}")
        if not text.strip():
            return []
        ids = self.tokenizer(text, split_special_tokens=True)["input_ids"]
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if getattr(self.model.config, "position_encoding", "learned") != "learned":
            longest = None
        if truncation and longest is not None and len(ids) > longest:
            ids = [*ids[: longest - 1], ids[-1]]
        return ids

    def _pad(self, ids) -> dict[str, torch.Tensor]:
        """B lists of ids -> `input_ids` (B, S) and `attention_mask` (B, S), padded on the right."""
        longest = max(map(len, ids))
        pad = self.model.config.pad_token_id
        return {
            "input_ids": torch.tensor([row + [pad] * (longest - len(row)) for row in ids]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids]),
        }

    def _forward(self, inputs: dict[str, torch.Tensor], copies: int = 1, **generation) -> dict:
        """Generate.

        Args:
            inputs: `input_ids` (B, S) and `attention_mask` (B, S).
            copies: R; above 1, scores are computed as well.
            generation: arguments of `generate`.

        Returns:
            `sequences` (B * R, T), `copies`, and with R above 1 `scores` (B * R,).
        """
        wants_scores = copies > 1
        generation = {**generation, "return_dict_in_generate": wants_scores, "output_scores": wants_scores}
        output = self.model.generate(**inputs, **generation)
        if not wants_scores:
            return {"sequences": output, "copies": copies}
        scores = getattr(output, "sequences_scores", None)
        if scores is None:  # sampled: log P of what was drawn
            steps = self.model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
            drawn = output.sequences[:, -steps.shape[1] :].ne(self.model.config.pad_token_id)
            scores = steps.masked_fill(~drawn, 0.0).sum(dim=-1)
        return {"sequences": output.sequences, "copies": copies, "scores": scores}

    def postprocess(self, outputs: dict) -> list[list[dict]]:
        """Turn ids into text.

        Args:
            outputs: what `_forward` returned.

        Returns:
            B lists of R dicts.
        """
        texts = self.tokenizer.batch_decode(
            outputs["sequences"], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        results = [{"translation_text": text} for text in texts]
        for result, score in zip(results, outputs.get("scores", ()), strict=False):
            result["score"] = float(score)
        copies = outputs["copies"]
        return [results[i : i + copies] for i in range(0, len(results), copies)]
