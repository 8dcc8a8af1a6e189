"""Reading bitext of every kind, batches by the budget of tokens, and padding."""

import gzip
import json
import pickle
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch

from vanilla_transformer import data
from vanilla_transformer.data import (
    Collator,
    PairDataset,
    TokenBatchSampler,
    pair_lengths,
    pairs_with_text,
    read_bitext,
    read_dataset,
    read_jsonl,
    read_lines,
    read_parallel_files,
    read_tsv,
    tokenize,
)
from vanilla_transformer.tokenizer import train_tokenizer

PAIRS = [("a dog", "ein Hund"), ("two cats .", "zwei Katzen ."), ("grass", "Gras")]


def write(path, content):
    """Write a file, gzipped where its name says so."""
    content = content if isinstance(content, bytes) else content.encode("utf-8")
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_pairs(folder, sources, targets, ending=""):
    """Two parallel files."""
    source = write(folder / f"a.en{ending}", "".join(line + "\n" for line in sources))
    return source, write(folder / f"b.de{ending}", "".join(line + "\n" for line in targets))


def bitext_of(folder, source, target=None):
    return read_bitext(source, target, "en", "de", folder)


def as_pairs(dataset):
    assert dataset.column_names == ["source", "target"]
    return list(zip(dataset["source"], dataset["target"], strict=True))


# Reading


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_parallel_files_are_read_plain_and_gzipped(tmp_path, ending):
    files = write_pairs(tmp_path, *zip(*PAIRS, strict=True), ending)
    assert list(read_parallel_files(*files)) == PAIRS
    assert as_pairs(bitext_of(tmp_path, *files)) == PAIRS


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_tsv_is_read_plain_and_gzipped(tmp_path, ending):
    file = write(tmp_path / f"x.tsv{ending}", "".join(f"{s}\t{t}\n" for s, t in PAIRS))
    assert list(read_tsv(file)) == PAIRS
    assert as_pairs(bitext_of(tmp_path, file)) == PAIRS


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("nested", [False, True])
def test_jsonl_of_both_shapes_is_read_plain_and_gzipped(tmp_path, nested, ending):
    records = [{"de": t, "id": 7, "en": s} for s, t in PAIRS]
    lines = [json.dumps({"translation": record} if nested else record) for record in records]
    file = write(tmp_path / f"x.jsonl{ending}", "\n".join(lines))
    assert list(read_jsonl(file, "en", "de")) == PAIRS
    assert as_pairs(bitext_of(tmp_path, file)) == PAIRS


def test_a_byte_order_mark_is_no_text(tmp_path):
    assert list(read_lines(write(tmp_path / "a", "\ufeffone\n\ufefftwo\n"))) == ["one", "\ufefftwo"]


def test_lines_end_at_newlines_alone(tmp_path):
    file = write(tmp_path / "a", " one\u2028still\x85\x0b\x0cone \r\n\ttwo\nthree without an end")
    assert list(read_lines(file)) == [" one\u2028still\x85\x0b\x0cone ", "\ttwo", "three without an end"]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("splits", [False, True])
def test_datasets_on_disk_are_read(tmp_path, nested, splits):
    rows = [{"en": s, "de": t} for s, t in PAIRS]
    dataset = datasets.Dataset.from_list([{"id": 7, **({"translation": row} if nested else row)} for row in rows])
    if splits:
        dataset = datasets.DatasetDict({"train": dataset.select([0]), "validation": dataset})
    dataset.save_to_disk(tmp_path / "corpus")
    split = "validation" if splits else "train"  # a dataset without splits is one of training
    assert as_pairs(read_dataset(str(tmp_path / "corpus"), "en", "de", split)) == PAIRS
    assert as_pairs(read_dataset(str(tmp_path / "corpus"), "de", "en", split)) == [(t, s) for s, t in PAIRS]
    if not splits:
        with pytest.raises(ValueError, match="no split 'validation'"):
            read_dataset(str(tmp_path / "corpus"), "en", "de", "validation")


def test_what_is_no_folder_is_read_from_the_hub(monkeypatch):
    def load(*name_and_config, split):
        assert (name_and_config, split) == (("wmt/wmt14", "de-en"), "train")
        return datasets.Dataset.from_list([{"translation": {"en": s, "de": t}} for s, t in PAIRS])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert as_pairs(read_dataset("wmt/wmt14", "en", "de", "train", "de-en")) == PAIRS


def test_a_dataset_without_the_split_or_the_language_is_refused(tmp_path):
    dataset = datasets.Dataset.from_dict({"en": ["a"], "de": ["b"]})
    datasets.DatasetDict({"train": dataset, "dev": dataset}).save_to_disk(tmp_path / "corpus")
    with pytest.raises(ValueError, match=r"no split 'validation', only \['dev', 'train'\]"):
        read_dataset(str(tmp_path / "corpus"), "en", "de", "validation")
    with pytest.raises(ValueError, match="no column 'fr'.*check src_lang and tgt_lang"):
        read_dataset(str(tmp_path / "corpus"), "en", "fr", "train")


# Refusing


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        (5, 2, "b.de has 2 lines and .*a.en has 5"),
        (0, 3, "a.en has 0 lines and .*b.de has 3"),
        (3, 4, "has 3 .* has 4"),
    ],
)
def test_files_of_unequal_length_are_refused_with_both_numbers(tmp_path, sources, targets, message):
    files = write_pairs(tmp_path, ["x"] * sources, ["y"] * targets)
    with pytest.raises(ValueError, match=message):
        bitext_of(tmp_path, *files)


def bitext_with(sources, targets):
    return datasets.Dataset.from_dict({"source": sources, "target": targets})


@pytest.mark.parametrize("at_once", [2, 10_000])
def test_empty_sides_are_refused_with_their_lines_or_left_out(monkeypatch, at_once):
    monkeypatch.setattr(data, "READ_AT_ONCE", at_once)
    bitext = bitext_with(["a", "", "c", " \t", "e", "f", None], ["a", "b", "c", "d", "", "f", "g"])
    with pytest.raises(ValueError, match=r"4 pairs of my.en have an empty side \(lines 2, 4, 5, 7\)"):
        pairs_with_text(bitext, "my.en")
    assert pairs_with_text(bitext, "my.en", drop_empty=True).tolist() == [0, 2, 5]


def test_of_many_empty_lines_the_first_are_named():
    with pytest.raises(ValueError, match=r"7 pairs .* \(lines 2, 3, 4, 5, 6, …\)"):
        pairs_with_text(bitext_with(["a"] + [""] * 7, ["b"] * 8), "my.en")


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("side", [0, 1])
def test_bytes_that_are_not_utf8_are_refused_with_file_and_line(tmp_path, side, ending):
    files = list(write_pairs(tmp_path, ["a", "b"], ["c", "d"], ending))
    files[side] = write(tmp_path / f"latin1.txt{ending}", "first\nGr\u00fc\u00dfe\n".encode("latin-1"))
    with pytest.raises(ValueError, match=rf"latin1.txt{ending}, line 2: not UTF-8"):
        bitext_of(tmp_path, *files)


@pytest.mark.parametrize(("line", "columns"), [("only one", 1), ("a\tb\tc", 3), ("", 1)])
def test_tsv_lines_without_two_columns_are_refused_with_their_number(tmp_path, line, columns):
    file = write(tmp_path / "x.tsv", f"a\tb\n{line}\nc\td\n")
    with pytest.raises(ValueError, match=f"x.tsv, line 2: expected source<TAB>target, got {columns} columns"):
        bitext_of(tmp_path, file)


@pytest.mark.parametrize(
    "line",
    [
        "{broken",
        "",
        "[1, 2]",
        '"text"',
        "null",
        '{"en": "a", "fr": "b"}',
        '{"translation": "a"}',
        '{"translation": {"en": "a"}}',
        '{"en": "a", "de": null}',
        '{"en": 3, "de": "b"}',
        '{"en": ["a"], "de": "b"}',
    ],
)
def test_jsonl_lines_without_two_texts_are_refused_with_their_number(tmp_path, line):
    file = write(tmp_path / "x.jsonl", f'{{"en": "a", "de": "b"}}\n{line}\n')
    with pytest.raises(ValueError, match="x.jsonl, line 2: expected a JSON object with the keys 'en' and 'de'"):
        bitext_of(tmp_path, file)


def test_a_file_that_is_not_there_is_named(tmp_path):
    source, target = write_pairs(tmp_path, ["a"], ["b"])
    with pytest.raises(FileNotFoundError, match="there is no file .*absent.de"):
        bitext_of(tmp_path, source, tmp_path / "absent.de")
    with pytest.raises(FileNotFoundError, match="there is no file .*absent.tsv"):
        bitext_of(tmp_path, tmp_path / "absent.tsv")


def test_a_text_file_without_a_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a.en has no target beside it, and only .tsv and .jsonl"):
        bitext_of(tmp_path, write_pairs(tmp_path, ["a"], ["b"])[0])


@pytest.mark.parametrize("sources", [[], ["", " "]])
def test_no_pairs_at_all_are_refused(tmp_path, sources):
    bitext = bitext_of(tmp_path, *write_pairs(tmp_path, sources, sources))
    with pytest.raises(ValueError, match="my.en holds no pairs of sentences"):
        pairs_with_text(bitext, "my.en", drop_empty=True)


# Tokenising


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([text for pair in PAIRS for text in pair], vocab_size=270)


@pytest.mark.parametrize("keep_text", [False, True])
def test_tokenised_pairs_end_in_the_end_symbol(tokenizer, keep_text):
    bitext = datasets.Dataset.from_dict({"source": [s for s, _ in PAIRS], "target": [t for _, t in PAIRS]})
    ids = tokenize(bitext, tokenizer, keep_text=keep_text)
    assert ids.column_names == ["source", "target"] * keep_text + ["input_ids", "labels"]
    assert ids.features["input_ids"].feature.dtype == ids.features["labels"].feature.dtype == "int32"
    for (source, target), row in zip(PAIRS, ids, strict=True):
        assert row["input_ids"] == tokenizer(source)["input_ids"] and row["input_ids"][-1] == 2
        assert row["labels"] == tokenizer(target)["input_ids"] and row["labels"][-1] == 2


def tokenised(*rows):
    """A tokenised corpus of these (input_ids, labels)."""
    return datasets.Dataset.from_dict({"input_ids": [list(s) for s, _ in rows], "labels": [list(t) for _, t in rows]})


def test_lengths_of_pairs_are_counted_in_selections_and_joined_corpora():
    corpus = tokenised(([1, 2], [1, 2, 3]), ([1], [2]), ([1, 2, 3, 4], [1, 2]))
    for dataset, expected in [
        (corpus, ([2, 1, 4], [3, 1, 2])),
        (corpus.select([2, 0]), ([4, 2], [2, 3])),
        (corpus.select(range(1, 3)), ([1, 4], [1, 2])),
        (corpus.select([2, 0]).select([1]), ([2], [3])),
        (corpus.select([]), ([], [])),
        (datasets.concatenate_datasets([corpus, corpus.select([1])]), ([2, 1, 4, 1], [3, 1, 2, 1])),
    ]:
        assert tuple(lengths.tolist() for lengths in pair_lengths(dataset)) == expected


# Batches


def lengths(pairs=500, seed=1):
    """Source lengths of 3 to 60, and targets that differ by up to a third."""
    random = np.random.default_rng(seed)
    source = random.integers(3, 61, pairs)
    return source, np.maximum(1, (source * random.uniform(0.7, 1.3, pairs)).astype(np.int64))


def test_every_pair_is_seen_once_an_epoch():
    sampler = TokenBatchSampler(*lengths(), 400)
    for epoch in range(3):
        sampler.load_state_dict({"epoch": epoch, "batches_done": 0})
        assert sorted(i for batch in sampler for i in batch) == list(range(500))


@pytest.mark.parametrize("batch_tokens", [80, 400, 5000])
def test_no_batch_passes_the_budget_on_either_side_padding_counted(batch_tokens):
    source, target = lengths()
    batches = TokenBatchSampler(source, target, batch_tokens).plan(0)
    assert max(len(batch) * source[batch].max() for batch in batches) <= batch_tokens
    assert max(len(batch) * target[batch].max() for batch in batches) <= batch_tokens


def test_batches_are_as_large_as_the_budget_allows():
    sizes = sorted(len(batch) for batch in TokenBatchSampler(np.full(10, 5), np.full(10, 3), 20).plan(0))
    assert sizes == [2, 4, 4]
    assert len(TokenBatchSampler(*lengths(), 10**6).plan(0)) == 1


def padding(source, target, batch_tokens, epoch=0):
    """Share of an epoch's cells, both sides together, that hold no token."""
    plan = TokenBatchSampler(source, target, batch_tokens).plan(epoch)
    return 1 - (source.sum() + target.sum()) / sum(
        len(batch) * (source[batch].max() + target[batch].max()) for batch in plan
    )


def caption_lengths(pairs):
    """Made lengths like Multi30k's: 15 tokens on average with a deviation of 5, correlated by 0.86."""
    random = np.random.default_rng(1)
    source = random.lognormal(2.66, 0.3, pairs)
    return source.astype(np.int32) + 1, (source * random.lognormal(0.0, 0.16, pairs)).astype(np.int32) + 1


# One batch of some twenty holds too many lengths for less; at random padding is about one half.
@pytest.mark.parametrize(
    ("pairs", "batch_tokens", "most"), [(29_000, 25_000, 0.1), (29_000, 6_250, 0.05), (300_000, 25_000, 0.025)]
)
def test_padding_of_sentences_like_captions_is_little(pairs, batch_tokens, most):
    source, target = caption_lengths(pairs)
    assert 14 < source.mean() < 16 and 4 < source.std() < 6 and 0.8 < np.corrcoef(source, target)[0, 1] < 0.9
    for epoch in (0, 1):
        assert padding(source, target, batch_tokens, epoch) < most


def test_batches_are_little_more_than_the_fewest_possible():
    source, target = caption_lengths(29_000)
    fewest = np.maximum(source, target).sum() / 6_250
    assert fewest <= len(TokenBatchSampler(source, target, 6_250).plan(0)) < 1.05 * fewest


PLAN_AT_SIZE = """
import resource, sys, time
import numpy as np
from vanilla_transformer.data import TokenBatchSampler

lengths = np.random.default_rng(0).integers(2, 60, (2, 4_500_000), dtype=np.int32)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
before, begin = peak(), time.perf_counter()
TokenBatchSampler(*lengths, 25_000).plan(0)
print(time.perf_counter() - begin, peak() - before)
"""


@pytest.mark.slow
def test_an_epoch_of_four_and_a_half_million_pairs_is_planned_in_seconds_and_little_memory():
    done = subprocess.run([sys.executable, "-c", PLAN_AT_SIZE], capture_output=True, text=True, check=True)
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds < 10 and megabytes < 500


def test_batches_of_one_length_do_not_follow_each_other():
    source, target = lengths(5000)
    longest = [target[batch].max() for batch in TokenBatchSampler(source, target, 1000).plan(0)]
    assert longest != sorted(longest)
    assert abs(np.corrcoef(longest[:-1], longest[1:])[0, 1]) < 0.3


def test_the_order_follows_from_seed_and_epoch_alone():
    def order(seed, epoch):
        sampler = TokenBatchSampler(*lengths(), 400, seed=seed)
        sampler.load_state_dict({"epoch": epoch, "batches_done": 0})
        return list(sampler)

    first = order(0, 0)
    np.random.seed(5), torch.manual_seed(5)
    other = TokenBatchSampler(*lengths(), 400, seed=0)
    other.plan(3)
    assert list(other) == list(other) == order(0, 0) == first
    assert order(0, 1) != first and order(1, 0) != first and order(1, 0) != order(0, 1)


def test_pairs_of_one_length_meet_others_each_epoch():
    sampler = TokenBatchSampler(np.full(20, 5), np.full(20, 5), 20)
    first, second = ({frozenset(batch.tolist()) for batch in sampler.plan(epoch)} for epoch in (0, 1))
    assert first != second


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_ranks_get_equally_many_batches_that_no_other_has(ranks, accumulation):
    samplers = [TokenBatchSampler(*lengths(), 400, 0, rank, ranks, accumulation) for rank in range(ranks)]
    batches = [list(sampler) for sampler in samplers]
    assert {len(of_rank) for of_rank in batches} == {
        len(samplers[0].plan(0)) // (len(samplers) * accumulation) * accumulation
    }
    seen = [i for of_rank in batches for batch in of_rank for i in batch]
    assert len(seen) == len(set(seen))
    left_over = len(samplers[0].plan(0)) - sum(map(len, batches))
    assert 0 <= left_over < ranks * accumulation


def test_what_is_left_over_is_another_each_epoch():
    sampler = TokenBatchSampler(*lengths(), 400, accumulation=40)
    tails = []
    for epoch in (0, 1):
        sampler.load_state_dict({"epoch": epoch, "batches_done": 0})
        tails.append(set(range(500)) - {i for batch in sampler for i in batch})
    assert tails[0] and tails[1] and tails[0] != tails[1]


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 7])
def test_a_sampler_goes_on_in_the_middle_of_an_epoch(epoch, done):
    straight = TokenBatchSampler(*lengths(), 400, seed=3, rank=1, ranks=2)
    straight.load_state_dict({"epoch": epoch, "batches_done": 0})
    expected = list(straight)
    straight.batches_done = done
    resumed = TokenBatchSampler(*lengths(), 400, seed=3, rank=1, ranks=2)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert list(resumed) == expected[done:]
    resumed.load_state_dict({"epoch": epoch, "batches_done": len(expected)})
    assert list(resumed) == []


@pytest.mark.parametrize("side", [0, 1])
def test_a_budget_below_the_longest_sentence_is_refused(side):
    both = [np.array([3, 4]), np.array([3, 4])]
    both[side] = np.array([3, 31])
    with pytest.raises(ValueError, match="batch_tokens=30 is smaller than the longest sentence of 31 tokens"):
        TokenBatchSampler(*both, 30)
    assert len(TokenBatchSampler(*both, 31).plan(0)) == 2


@pytest.mark.parametrize(("ranks", "accumulation"), [(3, 1), (1, 3), (2, 2)])
def test_fewer_batches_than_a_step_takes_are_refused(ranks, accumulation):
    sampler = TokenBatchSampler(np.full(10, 5), np.full(10, 5), 25, ranks=ranks, accumulation=accumulation)
    with pytest.raises(ValueError, match="makes 2 batches of 25 tokens, too few for one step"):
        list(sampler)


def test_a_corpus_without_pairs_is_refused():
    with pytest.raises(ValueError, match="makes 0 batches"):
        list(TokenBatchSampler(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 25))


# Padding

COLLATE = Collator(vocab_size=10, pad_token_id=0)


def test_a_batch_is_padded_on_the_right():
    corpus = PairDataset(tokenised(([9], [9]), ([5, 6, 2], [7, 2]), ([8, 2], [4, 5, 6, 2])))
    assert len(corpus) == 3
    batch = COLLATE(corpus.__getitems__([2, 1]))
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[8, 2, 0], [5, 6, 2]],
        "attention_mask": [[1, 1, 0], [1, 1, 1]],
        "labels": [[4, 5, 6, 2], [7, 2, -100, -100]],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_a_loader_gives_the_batches_of_the_sampler():
    corpus = tokenised(*(([i % 7 + 3] * (i % 4) + [2], [i % 5 + 3] * (i % 3) + [2]) for i in range(30)))
    corpus = datasets.concatenate_datasets([corpus.select(range(20, 30)), corpus.select(range(20))])
    sampler = TokenBatchSampler(*pair_lengths(corpus), 12)
    loader = torch.utils.data.DataLoader(PairDataset(corpus), batch_sampler=sampler, collate_fn=COLLATE)
    for indices, batch in zip(list(sampler), loader, strict=True):
        rows = [
            row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        assert rows == [corpus[i]["input_ids"] for i in indices]
        assert [row[row != -100].tolist() for row in batch["labels"]] == [corpus[i]["labels"] for i in indices]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_order_does_not_depend_on_the_number_of_workers(workers):
    corpus = tokenised(*(([3] * (i % 4) + [2], [i % 5 + 3] * (i % 3) + [2]) for i in range(30)))

    def batches(num_workers):
        sampler = TokenBatchSampler(*pair_lengths(corpus), 12)
        pairs = PairDataset(corpus, number_pairs=True)
        loader = torch.utils.data.DataLoader(pairs, batch_sampler=sampler, collate_fn=COLLATE, num_workers=num_workers)
        return [batch["pairs"].tolist() for batch in loader]

    assert batches(workers) == batches(0) == list(TokenBatchSampler(*pair_lengths(corpus), 12))


def test_batches_number_their_pairs_when_asked_and_only_then():
    corpus = tokenised(([1], [1]), ([1, 2], [1]), ([1], [1, 2]))
    batch = COLLATE(PairDataset(corpus, number_pairs=True).__getitems__([2, 0]))
    assert batch["pairs"].tolist() == [2, 0] and batch["pairs"].dtype == torch.int64
    assert set(COLLATE(PairDataset(corpus).__getitems__([2, 0]))) == {"input_ids", "attention_mask", "labels"}


def test_a_worker_is_sent_the_place_of_the_corpus_and_not_its_content(tmp_path):
    tokenised(*(([i] * 50, [i, i + 1]) for i in range(1000))).save_to_disk(tmp_path / "corpus")
    corpus = PairDataset(datasets.load_from_disk(tmp_path / "corpus"))
    sent = pickle.dumps(corpus)
    assert len(sent) < 10_000
    assert pickle.loads(sent).__getitems__([7, 900]).equals(corpus.__getitems__([7, 900]))


def test_an_empty_batch_is_empty():
    batch = COLLATE(PairDataset(tokenised(([1], [1]))).__getitems__([]))
    assert batch["input_ids"].numel() == batch["labels"].numel() == 0


@pytest.mark.parametrize("wrong", [10, 500, -1])
@pytest.mark.parametrize("column", ["input_ids", "labels"])
def test_ids_outside_the_vocabulary_are_refused_with_id_and_size(column, wrong):
    row = {"input_ids": [[3, 2]], "labels": [[3, 2]], column: [[9, wrong, 2]]}
    table = PairDataset(datasets.Dataset.from_dict(row)).__getitems__([0])
    with pytest.raises(ValueError, match=f"{column} holds the id {wrong}, but .* vocabulary has 10 tokens, 0 to 9"):
        COLLATE(table)


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:-20], lambda whole: b"no gzip", lambda whole: whole[:40] + whole]
)
def test_a_damaged_gzip_file_is_refused_by_its_name(tmp_path, damage):
    whole = gzip.compress("".join(f"line {i * i}\n" for i in range(2000)).encode())
    (tmp_path / "text.gz").write_bytes(damage(whole))
    with pytest.raises(ValueError, match="text.gz is damaged or no gzip file"):
        list(read_lines(tmp_path / "text.gz"))
