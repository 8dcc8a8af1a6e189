"""Decoding: cached as uncached, scores that can be recomputed, exact beam search, and limits a sentence."""

import itertools
import json

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from vanilla_transformer import VanillaTransformerForConditionalGeneration

PAD, START, END = 0, 1, 2
PENALTIES = [
    {},
    {"gnmt_alpha": 0},
    {"gnmt_alpha": 1.0},
    {"length_penalty": 0.0},
    {"length_penalty": 1.0},
    {"length_penalty": 2.0},
    {"length_penalty": -1.0},
]
SCORES = {"return_dict_in_generate": True, "output_scores": True}
ENDLESS = {"suppress_tokens": [PAD, START, END]}  # no sentence ends by itself


def penalised(log_p, length, penalty):
    """A hypothesis' score, as documented, from its log-probability and its generated tokens."""
    if "length_penalty" in penalty:
        return log_p / length ** penalty["length_penalty"]
    return log_p / ((5 + length) / 6) ** penalty.get("gnmt_alpha", 0.6)


def without_padding(row, prefix=1):
    """The generated tokens of a row: up to its `</s>`, or to its padding where there is none."""
    tokens = row.tolist()[prefix:]
    if END in tokens:
        return tokens[: tokens.index(END) + 1]
    while tokens and tokens[-1] == PAD:
        tokens.pop()
    return tokens


def sentences(batch):
    """The sources of a padded batch, each a (1, S) tensor of its own without padding."""
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids[mask.bool()].unsqueeze(0) for ids, mask in rows]


@torch.no_grad()
def next_words(model, source, prefixes):
    """(N, T, W) log-probabilities of what follows the start symbol and each token but the last, by teacher forcing."""
    shifted = torch.tensor([[START, *prefix[:-1]] for prefix in prefixes])
    logits = model(input_ids=source.expand(len(shifted), -1), decoder_input_ids=shifted, use_cache=False).logits
    return logits.log_softmax(-1)


def log_probabilities(model, source, hypotheses):
    """(N, T) log-probabilities of N hypotheses' tokens, all of one length, for one (1, S) source."""
    return next_words(model, source, hypotheses).gather(-1, torch.tensor(hypotheses).unsqueeze(-1)).squeeze(-1)


def every_hypothesis(model, source, limit):
    """Log-probability of every sequence that ends with `</s>` within the limit, or is cut there."""
    sequences = list(itertools.product(range(model.config.vocab_size), repeat=limit))
    found = {}
    for tokens, log_p in zip(sequences, log_probabilities(model, source, sequences).cumsum(-1).tolist(), strict=True):
        length = tokens.index(END) + 1 if END in tokens else limit
        found[tokens[:length]] = log_p[length - 1]
    return found


def plain_beam_search(model, source, limit, num_beams, penalty, stop_when_full=False):
    """Beam search without shortcuts: every step, the best candidates end or go on; nothing stops it but the limit."""
    open_beams, finished = [((), 0.0)], []
    for length in range(1, limit + 1):
        after = next_words(model, source, [[*tokens, PAD] for tokens, _ in open_beams])[:, -1].tolist()
        candidates = [
            ((*tokens, word), log_p + step)
            for (tokens, log_p), steps in zip(open_beams, after, strict=True)
            for word, step in enumerate(steps)
        ]
        candidates = sorted(candidates, key=lambda candidate: -candidate[1])[: 2 * num_beams]
        ends = [tokens[-1] == END or length == limit for tokens, _ in candidates]
        for (tokens, log_p), end in zip(candidates[:num_beams], ends[:num_beams], strict=True):
            if end:
                finished.append((penalised(log_p, length, penalty), tokens))
        open_beams = [c for c, end in zip(candidates, ends, strict=True) if not end][:num_beams]
        if stop_when_full and len(finished) >= num_beams:
            break
    return sorted(finished, reverse=True)


@pytest.fixture
def tiny(make_model):
    """A model of six words that is sure of itself and ends some sentences early and others late."""
    model = make_model(seed=149, vocab_size=6, encoder_layers=1, decoder_layers=1)
    with torch.no_grad():
        model.get_decoder().layers[-1].cross_attn_norm.weight.mul_(2)
        model.get_decoder().layers[-1].ffn_norm.weight.mul_(3)
    return model


def check_hypotheses(output, expected, wanted):
    """The sequences and scores of a (wanted a sentence) output are the best of every sentence's expected ones."""
    expected = [hypothesis for found in expected for hypothesis in sorted(found, reverse=True)[:wanted]]
    assert len(output.sequences) == len(expected)
    for row, score, (best_score, best) in zip(output.sequences, output.sequences_scores, expected, strict=True):
        assert row.tolist()[1:] == [*best, *[PAD] * (len(row) - 1 - len(best))]
        assert score.item() == pytest.approx(best_score, abs=1e-4)


# The cache.


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_cached_equals_uncached_at_every_step(model, batch, num_beams, attention):
    model.set_attn_implementation(attention)
    del batch["labels"]
    settings = {"num_beams": num_beams, "max_new_tokens": 12, "output_logits": True, **SCORES}
    cached = model.generate(**batch, **settings, use_cache=True)
    uncached = model.generate(**batch, **settings, use_cache=False)
    assert torch.equal(cached.sequences, uncached.sequences)
    assert len(cached.logits) == len(uncached.logits) > 3
    for one, other in zip(cached.logits, uncached.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("encoding", ["sinusoidal", "learned", "none"])
@pytest.mark.parametrize("steps", [1, 3])
def test_tokens_fed_with_a_cache_get_the_logits_of_the_whole(make_model, batch, encoding, steps):
    model = make_model(position_encoding=encoding)
    del batch["labels"]
    target = torch.tensor([[1, 5, 8, 3, 9, 4]] * 3)
    whole = model(**batch, decoder_input_ids=target).logits
    memory, parts, cache = model.get_encoder()(**batch), [], None
    name = "cache" if "cache" in model(**batch, decoder_input_ids=target) else "past_key_values"
    for tokens in target.split(steps, dim=1):
        output = model(
            encoder_outputs=memory,
            attention_mask=batch["attention_mask"],
            decoder_input_ids=tokens,
            use_cache=True,
            **{name: cache},
        )
        cache = output[name]
        parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)


def test_the_cache_is_taken_under_both_of_its_names(model, batch):
    del batch["labels"]
    start, step = torch.full((3, 1), START), torch.full((3, 1), 5)
    logits = []
    for name in ("cache", "past_key_values"):
        output = model(**batch, decoder_input_ids=start)
        cache = output["cache"] if "cache" in output else output["past_key_values"]
        logits.append(model(**batch, decoder_input_ids=step, **{name: cache}).logits)
    assert torch.equal(*logits)
    whole = model(**batch, decoder_input_ids=torch.cat([start, step], 1)).logits
    torch.testing.assert_close(logits[0], whole[:, 1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"num_heads": 3, "d_k": 5, "d_v": 7}, {"decoder_layers": 3}], ids=str)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_static_cache_decodes_as_a_dynamic_one(make_model, batch, changes, num_beams):
    model = make_model(**changes)
    del batch["labels"]
    settings = {"num_beams": num_beams, "max_new_tokens": 9}
    expected = model.generate(**batch, **settings)
    assert torch.equal(model.generate(**batch, **settings, cache_implementation="static"), expected)


# Scores.


def test_greedy_is_a_beam_of_1(model, batch):
    del batch["labels"]
    greedy = model.generate(**batch, num_beams=1, max_new_tokens_over_source=5)
    for source, row in zip(sentences(batch), greedy, strict=True):
        [(_, expected)] = plain_beam_search(model, source, source.shape[1] + 5, 1, {})[:1]
        assert without_padding(row) == list(expected)


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_scores_can_be_recomputed_by_teacher_forcing(model, batch, penalty):
    del batch["labels"]
    output = model.generate(**batch, **penalty, **SCORES, num_beams=4, num_return_sequences=3, max_new_tokens=8)
    assert len(output.sequences) == 9
    for i, (row, score) in enumerate(zip(output.sequences, output.sequences_scores, strict=True)):
        tokens = without_padding(row)
        log_p = log_probabilities(model, sentences(batch)[i // 3], [tokens]).sum().item()
        assert score.item() == pytest.approx(penalised(log_p, len(tokens), penalty), abs=1e-4)


def test_scores_are_the_sums_of_the_transition_scores(model, batch):
    del batch["labels"]
    output = model.generate(**batch, **SCORES, num_return_sequences=2, max_new_tokens=8)
    steps = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    for row, log_p, score in zip(output.sequences, steps.sum(-1), output.sequences_scores, strict=True):
        assert score.item() == pytest.approx(penalised(log_p.item(), len(without_padding(row)), {}), abs=1e-4)


@pytest.mark.parametrize("num_beams", [2, 5])
def test_the_n_best_are_sorted_and_differ(model, batch, num_beams):
    del batch["labels"]
    output = model.generate(**batch, **SCORES, num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=8)
    scores = output.sequences_scores.view(3, num_beams)
    assert (scores[:, :-1] >= scores[:, 1:]).all() and (scores < 0).all() and (scores > -100).all()
    for rows in output.sequences.split(num_beams):
        assert len({tuple(row) for row in rows.tolist()}) == num_beams
    best = model.generate(**batch, num_beams=num_beams, max_new_tokens=8)
    for row, other in zip(best, output.sequences[::num_beams], strict=True):
        assert without_padding(row) == without_padding(other)


@pytest.mark.parametrize("route", ["call", "config of the call", "config of the model"])
@pytest.mark.parametrize("penalty", [{"length_penalty": 1.0}, {"gnmt_alpha": 0.0}, {"gnmt_alpha": 1.5}], ids=str)
def test_a_penalty_holds_wherever_it_is_set(model, batch, route, penalty):
    del batch["labels"]
    settings = {"max_new_tokens": 8, "num_beams": 4, **SCORES}
    if route == "call":
        output = model.generate(**batch, **settings, **penalty)
    elif route == "config of the call":
        output = model.generate(**batch, generation_config=GenerationConfig(**settings, **penalty))
    else:
        for name, value in penalty.items():
            setattr(model.generation_config, name, value)
        output = model.generate(**batch, **settings)
    for source, row, score in zip(sentences(batch), output.sequences, output.sequences_scores, strict=True):
        tokens = without_padding(row)
        log_p = log_probabilities(model, source, [tokens]).sum().item()
        assert score.item() == pytest.approx(penalised(log_p, len(tokens), penalty), abs=1e-4)


# Exactness.


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.parametrize("wanted", [1, 5])
def test_a_wide_beam_finds_what_exhaustive_search_finds(tiny, penalty, wanted):
    source = torch.tensor([[3, 4, 5, 2], [5, 2, 0, 0], [4, 4, 2, 0]])
    mask = source.ne(PAD).long()
    expected = [
        [(penalised(log_p, len(t), penalty), t) for t, log_p in every_hypothesis(tiny, row, 4).items()]
        for row in sentences({"input_ids": source, "attention_mask": mask})
    ]
    settings = {"num_beams": 160, "num_return_sequences": wanted, "max_new_tokens": 4, **penalty, **SCORES}
    check_hypotheses(tiny.generate(source, attention_mask=mask, **settings), expected, wanted)


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_a_wide_beam_finds_what_exhaustive_search_finds_within_every_sentences_own_limit(tiny, penalty):
    source = torch.tensor([[3, 2, 0], [5, 4, 2], [2, 0, 0], [3, 3, 2]])
    mask = source.ne(PAD).long()
    expected = [
        [(penalised(log_p, len(t), penalty), t) for t, log_p in every_hypothesis(tiny, row, row.shape[1] + 1).items()]
        for row in sentences({"input_ids": source, "attention_mask": mask})
    ]
    settings = {"num_beams": 160, "num_return_sequences": 4, "max_new_tokens_over_source": 1, **penalty, **SCORES}
    check_hypotheses(tiny.generate(source, attention_mask=mask, **settings), expected, 4)


def check_narrow_beams(tiny, penalty, early_stopping, own_limits):
    """A beam of 3 gives what the plain search does, be the best or all three asked for."""
    rows = [[3, 2], [4, 2], [5, 3, 2], [5, 4, 2], [3, 3, 4, 2], [4, 5, 5, 2], [5, 5, 5, 2], [2]]
    source = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    limits = [len(row) + 3 if own_limits else 7 for row in rows]
    limit = {"max_new_tokens_over_source": 3} if own_limits else {"max_new_tokens": 7}
    expected = [
        plain_beam_search(tiny, torch.tensor([row]), most, 3, penalty, stop_when_full=early_stopping is True)
        for row, most in zip(rows, limits, strict=True)
    ]
    for wanted in (1, 3):
        settings = {"num_beams": 3, "num_return_sequences": wanted, "early_stopping": early_stopping, **limit}
        output = tiny.generate(source, attention_mask=source.ne(PAD).long(), **settings, **penalty, **SCORES)
        check_hypotheses(output, expected, wanted)


@pytest.mark.parametrize("own_limits", [True, False])
@pytest.mark.parametrize("early_stopping", [False, "never"])
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_a_search_that_stops_early_finds_what_one_that_never_does(tiny, penalty, early_stopping, own_limits):
    check_narrow_beams(tiny, penalty, early_stopping, own_limits)


@pytest.mark.parametrize("own_limits", [True, False])
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_early_stopping_ends_a_search_when_its_beams_are_full(tiny, penalty, own_limits):
    check_narrow_beams(tiny, penalty, True, own_limits)


def test_prefixes_are_constrained_by_a_function(tiny):
    source = torch.tensor([[3, 4, 2], [5, 3, 2]])
    allowed = {0: [[5], [3, END], [4, END], [4, END]], 1: [[3, 4], [3, 4], [3, 4], [END]]}

    def fits(sentence, tokens):
        return all(token in allowed[sentence][i] for i, token in enumerate(tokens))

    output = tiny.generate(
        source,
        prefix_allowed_tokens_fn=lambda sentence, prefix: allowed[sentence][len(prefix) - 1],
        num_beams=30,
        num_return_sequences=3,
        max_new_tokens=4,
        **SCORES,
    )
    expected = [
        [
            (penalised(log_p, len(tokens), {}), tokens)
            for tokens, log_p in every_hypothesis(tiny, source[i : i + 1], 4).items()
            if fits(i, tokens)
        ]
        for i in range(2)
    ]
    check_hypotheses(output, expected, 3)


# Limits.


@pytest.mark.parametrize("num_beams", [1, 4])
def test_a_sentence_may_grow_to_its_own_source_and_50_whatever_its_batch_mates_are(model, batch, num_beams):
    output = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], num_beams=num_beams, **ENDLESS)
    assert output.shape == (3, 1 + 56)
    assert [len(without_padding(row)) for row in output] == [56, 53, 54]
    alone = model.generate(sentences(batch)[1], num_beams=num_beams, **ENDLESS)
    assert alone[0].tolist() == output[1, :54].tolist()


@pytest.mark.parametrize("num_beams", [1, 2])
def test_sampled_sentences_have_the_same_limits(model, batch, num_beams):
    torch.manual_seed(0)
    output = model.generate(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=True,
        num_beams=num_beams,
        num_return_sequences=2,
        max_new_tokens_over_source=4,
        **ENDLESS,
    )
    assert [len(without_padding(row)) for row in output] == [10, 10, 7, 7, 8, 8]
    assert len({tuple(row) for row in output.tolist()}) == 6


@pytest.mark.parametrize("route", ["call", "config of the call", "config of the model"])
@pytest.mark.parametrize(
    ("limit", "lengths"),
    [
        ({"max_new_tokens": 3}, [3, 3, 3]),
        ({"max_new_tokens": 70}, [70, 70, 70]),
        ({"max_length": 5}, [4, 4, 4]),
        ({"max_length": 61}, [60, 60, 60]),
        ({"max_new_tokens_over_source": 2}, [8, 5, 6]),
        ({"max_new_tokens_over_source": 0}, [6, 3, 4]),
        ({"max_new_tokens_over_source": 2, "max_new_tokens": 4}, [4, 4, 4]),
    ],
    ids=str,
)
def test_a_limit_holds_wherever_it_is_set(model, batch, route, limit, lengths):
    del batch["labels"]
    settings = {"num_beams": 1, **ENDLESS}
    if route == "call":
        output = model.generate(**batch, **settings, **limit)
    elif route == "config of the call":
        output = model.generate(**batch, generation_config=GenerationConfig(**settings, **limit))
    else:
        for name, value in limit.items():
            setattr(model.generation_config, name, value)
        output = model.generate(**batch, **settings)
    assert [len(without_padding(row)) for row in output] == lengths


def test_a_hypothesis_cut_by_its_limit_scores_like_any_other(model, batch):
    del batch["labels"]
    output = model.generate(**batch, max_new_tokens_over_source=1, **ENDLESS, **SCORES)
    for source, row, score in zip(sentences(batch), output.sequences, output.sequences_scores, strict=True):
        tokens = without_padding(row)
        assert len(tokens) == source.shape[1] + 1
        log_p = log_probabilities(model, source, [tokens]).sum().item()
        assert score.item() == pytest.approx(penalised(log_p, len(tokens), {}), abs=1e-4)


def test_the_learned_positions_are_a_limit_too(make_model):
    model = make_model(position_encoding="learned", max_position_embeddings=10)
    output = model.generate(torch.tensor([[5, 6, 2]]), **ENDLESS)
    assert 10 <= output.shape[1] <= 11


# Prefixes, padding, batches.


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_prefix_is_continued_and_counts_towards_no_length(model, batch, num_beams):
    del batch["labels"]
    prefix = torch.tensor([[START, 5, 9]] * 3)
    settings = {"num_beams": num_beams, "max_new_tokens_over_source": 2, **ENDLESS, **SCORES}
    output = model.generate(**batch, decoder_input_ids=prefix, **settings)
    assert torch.equal(output.sequences[:, :3], prefix)
    assert [len(without_padding(row, prefix=3)) for row in output.sequences] == [8, 5, 6]
    for i, source in enumerate(sentences(batch)):
        tokens = without_padding(output.sequences[i], prefix=3)
        log_p = log_probabilities(model, source, [[5, 9, *tokens]])[0, 2:].sum().item()
        if num_beams > 1:
            score = output.sequences_scores[i].item()
            assert score == pytest.approx(penalised(log_p, len(tokens), {}), abs=1e-4)


@pytest.mark.parametrize("settings", [{"num_beams": 1}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_prefixes_padded_on_the_left_are_continued_as_they_are_alone(model, batch, settings):
    del batch["labels"]
    prefixes = [[START, 5, 9], [START, 8], [START]]
    padded = torch.tensor([[PAD] * (3 - len(p)) + p for p in prefixes])
    mask = torch.tensor([[0] * (3 - len(p)) + [1] * len(p) for p in prefixes])
    together = model.generate(
        **batch, decoder_input_ids=padded, decoder_attention_mask=mask, max_new_tokens=8, **settings
    )
    for source, prefix, row in zip(sentences(batch), prefixes, together, strict=True):
        alone = model.generate(source, decoder_input_ids=torch.tensor([prefix]), max_new_tokens=8, **settings)
        assert without_padding(row, prefix=3) == without_padding(alone[0], prefix=len(prefix))


@pytest.mark.parametrize("num_beams", [1, 4])
def test_sources_padded_left_or_right_or_alone_give_the_same_translations(model, batch, num_beams):
    del batch["labels"]
    settings = {"num_beams": num_beams, **SCORES}
    right = model.generate(**batch, **settings)
    left_ids = torch.tensor([[5, 6, 7, 8, 9, 2], [0, 0, 0, 4, 12, 2], [0, 0, 10, 3, 11, 2]])
    left = model.generate(left_ids, attention_mask=left_ids.ne(PAD).long(), **settings)
    assert torch.equal(left.sequences, right.sequences)
    if num_beams > 1:
        torch.testing.assert_close(left.sequences_scores, right.sequences_scores, rtol=1e-5, atol=1e-5)
    for i, source in enumerate(sentences(batch)):
        alone = model.generate(source, **settings)
        assert without_padding(alone.sequences[0]) == without_padding(right.sequences[i])


def test_a_source_without_a_mask_has_no_padding(model, batch):
    ids = batch["input_ids"]
    expected = model.generate(ids, attention_mask=torch.ones_like(ids))
    assert torch.equal(model.generate(ids), expected)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_blank_sources_are_translated_and_leave_their_batch_mates_alone(model, batch, num_beams):
    del batch["labels"]
    expected = model.generate(**batch, num_beams=num_beams)
    batch["attention_mask"][1] = 0
    output = model.generate(**batch, num_beams=num_beams)
    for i in (0, 2):
        assert without_padding(output[i]) == without_padding(expected[i])
    assert model.generate(torch.tensor([[END]]), num_beams=num_beams).shape[0] == 1


@pytest.mark.parametrize("settings", [{}, {"num_beams": 1}, {"num_return_sequences": 2}, {"do_sample": True}], ids=str)
def test_an_empty_batch_gives_no_translations(model, settings):
    output = model.generate(torch.zeros(0, 4, dtype=torch.long), **settings)
    assert output.shape[0] == 0 and output.dtype == torch.long
    ones = torch.ones(0, 4, dtype=torch.long)
    assert model.generate(ones, attention_mask=ones, return_dict_in_generate=True, **settings).sequences.shape[0] == 0


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("pad", [0, 12])
@pytest.mark.parametrize("ends", [[2], [2, 10]], ids=str)
def test_after_its_end_a_hypothesis_is_padded_with_the_pad_token(make_model, num_beams, pad, ends):
    model = make_model(pad_token_id=pad, eos_token_id=ends)
    torch.manual_seed(0)
    output = model.generate(torch.randint(3, 12, (16, 5)), num_beams=num_beams, max_new_tokens=20).tolist()
    lengths = set()
    for row in output:
        length = next((i + 1 for i, token in enumerate(row) if token in ends), 21)
        assert set(row[length:]) <= {pad}
        lengths.add(length)
    assert len(lengths) > 1


# What else transformers' generate takes.


@pytest.mark.parametrize("form", ["inputs", "input_ids", "inputs_embeds", "encoder_outputs"])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_a_source_may_come_as_ids_embeddings_or_memory(model, batch, form, num_beams):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    expected = model.generate(ids, attention_mask=mask, num_beams=num_beams)
    source = {
        "inputs": ids,
        "input_ids": ids,
        "inputs_embeds": model.get_input_embeddings()(ids),
        "encoder_outputs": model.get_encoder()(ids, mask),
    }[form]
    assert torch.equal(model.generate(**{form: source}, attention_mask=mask, num_beams=num_beams), expected)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_the_processors_of_transformers_are_obeyed(model, batch, num_beams):
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    settings = {"num_beams": num_beams, "max_new_tokens": 12}
    forced = model.generate(**source, **settings, forced_bos_token_id=9)
    assert forced[:, 1].tolist() == [9, 9, 9]
    at_least = model.generate(**source, **settings, min_new_tokens=6)
    assert all(len(without_padding(row)) >= 6 for row in at_least)
    for row in model.generate(**source, **settings, no_repeat_ngram_size=2, suppress_tokens=[PAD]):
        pairs = list(itertools.pairwise(without_padding(row)))
        assert len(set(pairs)) == len(pairs)
    words = set(at_least[:, 1:].flatten().tolist()) - {PAD, END}
    banned = model.generate(**source, **settings, min_new_tokens=6, bad_words_ids=[[word] for word in words])
    assert words and not words & set(banned[:, 1:].flatten().tolist())


def test_processors_and_criteria_of_the_caller_are_obeyed(model, batch):
    class Only(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([7]), 0.0)

    class AfterThree(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 4)

    output = model.generate(
        batch["input_ids"], logits_processor=[Only()], stopping_criteria=[AfterThree()], num_beams=1
    )
    assert output.tolist() == [[START, 7, 7, 7]] * 3


@pytest.mark.parametrize("num_beams", [1, 4])
def test_attention_weights_and_hidden_states_of_every_step_are_given(model, batch, num_beams):
    model.set_attn_implementation("eager")
    output = model.generate(
        batch["input_ids"],
        num_beams=num_beams,
        max_new_tokens=3,
        min_new_tokens=3,
        output_attentions=True,
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    assert len(output.cross_attentions) == len(output.decoder_hidden_states) == 3
    assert [step[0].shape for step in output.decoder_attentions] == [(3 * num_beams, 2, 1, n) for n in (1, 2, 3)]
    assert output.encoder_attentions[0].shape[1:] == (2, 6, 6)
    assert len(output.encoder_hidden_states) == len(output.decoder_hidden_states[0]) == 3


def test_a_streamer_gets_the_tokens_one_by_one(model):
    class Collect(BaseStreamer):
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    streamer = Collect()
    output = model.generate(torch.tensor([[5, 6, 7, 2]]), num_beams=1, streamer=streamer)
    assert streamer.ended and streamer.tokens == output[0].tolist()


@pytest.mark.parametrize("assistant_seed", [0, 1])
def test_assisted_decoding_is_greedy_decoding(model, make_model, assistant_seed):
    assistant = make_model(seed=assistant_seed, decoder_layers=1)
    source = torch.tensor([[5, 6, 7, 2]])
    expected = model.generate(source, num_beams=1)
    assert torch.equal(model.generate(source, num_beams=1, assistant_model=assistant), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_beams", [1, 4])
def test_half_precision_decodes(model, batch, dtype, num_beams):
    output = model.to(dtype).generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], num_beams=num_beams, **SCORES
    )
    assert all(len(without_padding(row)) <= most for row, most in zip(output.sequences, (56, 53, 54), strict=True))
    assert output.sequences.min() >= 0 and output.sequences.max() < 13
    if num_beams > 1:
        assert output.sequences_scores.isfinite().all()


# The generation config and bad input.


def test_every_saved_generation_config_holds_the_papers_decoding(model, tmp_path):
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    ours = {"num_beams": 4, "gnmt_alpha": 0.6, "max_new_tokens_over_source": 50}
    assert {name: saved.get(name) for name in ours} == ours
    assert [saved.get(f"{name}_token_id") for name in ("pad", "bos", "eos", "decoder_start")] == [0, 1, 2, 1]
    assert "length_penalty" not in saved and "max_length" not in saved


def test_changed_generation_settings_survive_save_and_load(model, batch, tmp_path):
    ours = {"num_beams": 2, "gnmt_alpha": 0.0, "max_new_tokens_over_source": 3}
    for name, value in ours.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(tmp_path)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert {name: getattr(loaded.generation_config, name) for name in ours} == ours
    output = loaded.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **ENDLESS)
    assert [len(without_padding(row)) for row in output] == [9, 6, 7]
    loaded.save_pretrained(tmp_path / "again")
    again = GenerationConfig.from_pretrained(tmp_path / "again")
    assert {name: getattr(again, name) for name in ours} == ours


@pytest.mark.parametrize("file", ["without our keys", "missing"])
def test_a_model_without_our_generation_settings_decodes_as_the_paper_did(model, batch, tmp_path, file):
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = model.generate(**source, **SCORES)
    model.save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    if file == "missing":
        path.unlink()
    else:
        saved = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in saved.items() if name.endswith("token_id")}))
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    output = loaded.generate(**source, **SCORES)
    assert torch.equal(output.sequences, expected.sequences)
    torch.testing.assert_close(output.sequences_scores, expected.sequences_scores)
    loaded.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert (saved["num_beams"], saved["gnmt_alpha"], saved["max_new_tokens_over_source"]) == (4, 0.6, 50)


def test_a_generation_config_of_the_callers_own_decodes_as_the_paper_where_it_is_silent(model, batch):
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = model.generate(**source, **SCORES)
    output = model.generate(**source, generation_config=GenerationConfig(**SCORES))
    assert torch.equal(output.sequences, expected.sequences)
    assert torch.equal(output.sequences_scores, expected.sequences_scores)


def test_generating_leaves_the_generation_configs_as_they_were(model, batch):
    given = GenerationConfig(num_beams=2, length_penalty=2.0)
    before = model.generation_config.to_dict(), given.to_dict()
    model.generate(batch["input_ids"], generation_config=given)
    model.generate(batch["input_ids"], length_penalty=1.0, max_new_tokens_over_source=3)
    assert (model.generation_config.to_dict(), given.to_dict()) == before


@pytest.mark.parametrize("wrong", [13, 500, -1, -100])
@pytest.mark.parametrize("name", ["inputs", "input_ids", "decoder_input_ids"])
def test_an_id_outside_the_vocabulary_is_refused_with_the_vocabularys_size(model, name, wrong):
    ids = {"input_ids": torch.tensor([[5, 6, 2]]), "decoder_input_ids": torch.tensor([[START, 4]])}
    if name == "inputs":
        ids["inputs"] = ids.pop("input_ids")
    ids[name][0, 1] = wrong
    with pytest.raises(ValueError, match=rf"id {wrong}\b.*13 tokens"):
        model.generate(**ids)


@pytest.mark.parametrize("name", ["gnmt_alpha", "max_new_tokens_over_source"])
@pytest.mark.parametrize("value", ["big", True, [1], float("nan"), float("inf")], ids=repr)
@pytest.mark.parametrize("route", ["call", "config of the call", "config of the model"])
def test_a_setting_that_is_no_number_is_refused(model, name, value, route):
    source = torch.tensor([[5, 6, 2]])
    if route == "config of the model":
        setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match=f"{name} must be a number"):
        if route == "call":
            model.generate(source, **{name: value})
        elif route == "config of the call":
            model.generate(source, generation_config=GenerationConfig(**{name: value}))
        else:
            model.generate(source)


def test_the_trainers_prediction_leaves_the_papers_decoding_in_place(make_model, tmp_path):
    # It fills the model's generation config with transformers' defaults: max_length=20 and length_penalty=1.0.
    model = make_model()
    source, endless = torch.tensor([[5] * 30 + [2]]), {"suppress_tokens": [2]}
    expected = model.generate(source, **endless)
    defaults = model.generation_config._get_default_generation_params()
    model.generation_config.update(**defaults, defaults_only=True)
    assert model.generation_config.max_length == 20
    assert torch.equal(model.generate(source, **endless), expected) and expected.shape == (1, 1 + 31 + 50)
    model.generation_config.update(**defaults, defaults_only=True)
    model.save_pretrained(tmp_path)
    saved = GenerationConfig.from_pretrained(tmp_path)
    assert (saved.max_length, saved.length_penalty, saved.gnmt_alpha, saved.num_beams) == (None, None, 0.6, 4)


def test_encoder_outputs_are_left_as_they_were(model, batch):
    memory = model.get_encoder()(batch["input_ids"], batch["attention_mask"])
    given = {"attention_mask": batch["attention_mask"], "num_beams": 4, "max_new_tokens": 5}
    first = model.generate(encoder_outputs=memory, **given)
    assert memory.last_hidden_state.shape[0] == 3
    assert torch.equal(model.generate(encoder_outputs=memory, **given), first)
    assert torch.equal(model.generate(encoder_outputs=(memory.last_hidden_state,), **given), first)


def test_a_limit_below_the_source_is_refused(model):
    with pytest.raises(ValueError, match="max_new_tokens_over_source must be at least 0, got -1"):
        model.generate(torch.tensor([[5, 6, 2]]), max_new_tokens_over_source=-1)
