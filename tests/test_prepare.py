"""From text to a prepared corpus: counts, refusals, and nothing half-written."""

import json
import shutil

import datasets
import numpy as np
import pytest
from tokenizers import processors

from vanilla_transformer import prepare as preparation
from vanilla_transformer.prepare import Bitext, fingerprint, load_corpus, prepare
from vanilla_transformer.recipe import Recipe
from vanilla_transformer.tokenizer import train_tokenizer

SOURCES = [f"a dog and {i} cats" for i in range(12)]
TARGETS = [f"ein Hund und {i} Katzen" for i in range(12)]


def text(folder, name="train", sources=SOURCES, targets=TARGETS):
    """Two files of a split."""
    for ending, lines in (("en", sources), ("de", targets)):
        (folder / f"{name}.{ending}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Bitext(str(folder / f"{name}.en"), str(folder / f"{name}.de"))


def run(folder, train, validation=None, *, vocab_size=270, max_length=60, **arguments):
    recipe = Recipe(src_lang="en", tgt_lang="de", vocab_size=vocab_size, max_length=max_length)
    return prepare(recipe, train, validation, folder / "out", show_progress=False, **arguments)


def texts_of(corpus, column):
    """The text behind a column of the training split."""
    return corpus.tokenizer.batch_decode(list(corpus.train[column]), skip_special_tokens=True)


@pytest.fixture
def raw(tmp_path):
    """A folder for text, beside which `out` is made."""
    (tmp_path / "raw").mkdir()
    return tmp_path / "raw"


def test_a_prepared_corpus_holds_the_tokenised_text(tmp_path, raw):
    report = run(tmp_path, text(raw), text(raw, "validation", SOURCES[:3], TARGETS[:3]))
    corpus = load_corpus(tmp_path / "out")
    assert corpus.train.column_names == ["input_ids", "labels"]
    assert texts_of(corpus, "input_ids") == SOURCES
    assert texts_of(corpus, "labels") == TARGETS
    assert list(corpus.validation["source"]) == SOURCES[:3] and list(corpus.validation["target"]) == TARGETS[:3]
    assert corpus.validation[2]["labels"] == corpus.train[2]["labels"]
    assert report == json.loads((tmp_path / "out" / "corpus.json").read_text())
    assert report["fingerprint"] == corpus.fingerprint
    assert report["vocab_size"] == len(corpus.tokenizer) == 270
    assert report["train"] == {
        "pairs": 12,
        "too_long": 0,
        "too_long_pairs": [],
        "source_tokens": sum(map(len, corpus.train["input_ids"])),
        "target_tokens": sum(map(len, corpus.train["labels"])),
    }


def test_both_sides_of_the_training_text_teach_the_tokenizer_and_nothing_else(tmp_path, raw):
    run(tmp_path, text(raw), text(raw, "validation", ["zzzz zzzz"] * 50, ["zzzz"] * 50), vocab_size=400)
    assert load_corpus(tmp_path / "out").tokenizer.tokenize("zz cats Katzen") == ["z", "z", "Ġcats", "ĠKatzen"]


def test_pairs_that_are_too_long_are_left_out_counted_and_named(tmp_path, raw):
    sources, targets = list(SOURCES), list(TARGETS)
    sources[1] = sources[7] = "\u00e4" * 40
    targets[4] = "\u00e4" * 30  # 60 bytes and </s>: one too many
    targets[9] = "\u00e4" * 29 + "x"
    report = run(tmp_path, text(raw, "train", sources, targets), vocab_size=260)["train"]
    corpus = load_corpus(tmp_path / "out")
    kept = [i for i in range(12) if i not in (1, 4, 7)]
    assert (report["pairs"], report["too_long"], report["too_long_pairs"]) == (9, 3, [2, 5, 8])
    assert texts_of(corpus, "labels") == [targets[i] for i in kept]
    assert report["target_tokens"] == sum(len(targets[i].encode()) + 1 for i in kept)


def test_pairs_that_are_too_long_are_named_by_their_lines_in_the_text_whatever_was_dropped_before(tmp_path, raw):
    sources = ["a", "", "x" * 90, "b", "", "y" * 90]
    report = run(tmp_path, text(raw, "train", sources, ["z"] * 6), vocab_size=260, drop_empty=True)["train"]
    assert (report["pairs"], report["too_long_pairs"]) == (2, [3, 6])
    assert texts_of(load_corpus(tmp_path / "out"), "input_ids") == ["a", "b"]


def test_a_corpus_of_long_pairs_alone_is_refused(tmp_path, raw):
    with pytest.raises(ValueError, match="no pair of the train split has at most max_length=3 tokens on both sides"):
        run(tmp_path, text(raw), max_length=3)


def test_an_existing_output_is_refused_unless_asked(tmp_path, raw):
    train = text(raw)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(FileExistsError, match="out exists already"):
        run(tmp_path, train)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]
    with pytest.raises(FileExistsError, match="none of ours to overwrite"):  # it holds no corpus
        run(tmp_path, train, overwrite=True)
    (tmp_path / "out" / "corpus.json").write_text("{}")
    run(tmp_path, train, overwrite=True)
    assert not (tmp_path / "out" / "precious").exists()
    assert len(load_corpus(tmp_path / "out").train) == 12


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        (["ok", ""], r"1 pairs of .*validation.en have an empty side \(lines 2\)"),
        (["ok"], "validation.de has 2 lines and .*validation.en has 1|validation.en has 1 lines and .* has 2"),
        (["x" * 90, "y" * 90], "no pair of the validation split"),
    ],
)
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_nothing_half_written(tmp_path, raw, validation, message, existing):
    train = text(raw)
    if existing:
        run(tmp_path, train)
    before = sorted(tmp_path.rglob("*"))
    bad = text(raw, "validation", validation, ["gut", "gut"])
    with pytest.raises(ValueError, match=message):
        run(tmp_path, train, bad, overwrite=existing)
    assert sorted(path for path in tmp_path.rglob("*") if not path.name.startswith("validation.")) == before


@pytest.mark.parametrize("num_proc", [None, 2])
def test_success_leaves_nothing_but_the_output(tmp_path, raw, num_proc):
    train = text(raw)
    before = set(tmp_path.rglob("*"))
    run(tmp_path, train, num_proc=num_proc)
    assert {
        path for path in set(tmp_path.rglob("*")) - before if tmp_path / "out" not in (path, *path.parents)
    } == set()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"corpus.json", "tokenizer", "train"}


def test_empty_lines_are_dropped_when_asked(tmp_path, raw):
    train = text(raw, "train", ["a", "", "c"], ["x", "y", "z"])
    assert run(tmp_path, train, drop_empty=True)["train"]["pairs"] == 2


def test_a_given_tokenizer_is_used_as_it_is(tmp_path, raw):
    given = train_tokenizer(["something else entirely"] * 3, vocab_size=265)
    given.save_pretrained(tmp_path / "given")
    report = run(tmp_path, text(raw), tokenizer=tmp_path / "given")
    corpus = load_corpus(tmp_path / "out")
    assert report["vocab_size"] == 265
    assert corpus.tokenizer.get_vocab() == given.get_vocab()
    assert list(corpus.train["input_ids"]) == given(SOURCES)["input_ids"]


def test_the_fingerprint_changes_with_the_text_and_the_tokenizer_alone(tmp_path, raw):
    def prepared(train, validation=None, **arguments):
        return run(tmp_path, train, validation, overwrite=True, **arguments)["fingerprint"]

    first = prepared(text(raw))
    assert prepared(text(raw, "same")) == first
    swapped = [TARGETS[1], TARGETS[0], *TARGETS[2:]]
    others = [
        prepared(text(raw, "train", SOURCES, swapped), tokenizer=tmp_path / "out" / "tokenizer"),
        prepared(text(raw, "train", SOURCES[:-1], TARGETS[:-1])),
        prepared(text(raw), text(raw, "validation", SOURCES[:2], TARGETS[:2])),
        prepared(text(raw), text(raw, "validation", SOURCES[:2], TARGETS[1:3])),
        prepared(text(raw), vocab_size=265),
    ]
    assert len({first, *others}) == 6


def test_a_fingerprint_changes_with_any_part():
    corpus = datasets.Dataset.from_dict({"a": [[1, 2], [3]], "b": ["x", "y"]})
    others = [
        datasets.Dataset.from_dict({"a": [[1, 2], [4]], "b": ["x", "y"]}),
        datasets.Dataset.from_dict({"a": [[1], [2, 3]], "b": ["x", "y"]}),
        datasets.Dataset.from_dict({"a": [[1, 2], [3]], "b": ["x", "z"]}),
        datasets.Dataset.from_dict({"a": [[1, 2], [3]], "b": ["xy", ""]}),
        datasets.Dataset.from_dict({"a": [[1, 2], [3]], "c": ["x", "y"]}),
        corpus.select([1, 0]),
        corpus.select([0]),
    ]
    digests = [fingerprint(corpus, "text"), fingerprint(corpus, "texs"), fingerprint(corpus), fingerprint("text")]
    assert len({*digests, *(fingerprint(dataset, "text") for dataset in others)}) == 11


@pytest.mark.parametrize("at_once", [1, 2, 10_000])
def test_a_fingerprint_is_of_the_content_however_it_lies_in_pieces(monkeypatch, at_once):
    rows = {"a": [[1, 2], [3], [4, 5, 6], [7], [1, 2]], "b": ["x", "äöü", "", "zz", "x"]}
    corpus = datasets.Dataset.from_dict(rows)
    expected = fingerprint(corpus)
    monkeypatch.setattr(preparation, "READ_AT_ONCE", at_once)
    for same in (
        corpus,
        corpus.select([0, 1, 2, 3, 0]),
        datasets.concatenate_datasets([corpus.select(range(2)), corpus.select(range(2, 5))]),
        datasets.concatenate_datasets(
            [corpus.select([1, 0]).select([1]), corpus.select(range(1, 4)), corpus.select([0])]
        ),
    ):
        assert fingerprint(same) == expected


def exchange_the_training_text(out, other):
    shutil.rmtree(out / "train")
    shutil.copytree(other / "train", out / "train")


def exchange_the_validation_text(out, other):
    shutil.rmtree(out / "validation")
    shutil.copytree(other / "validation", out / "validation")


def remove_the_validation_text(out, other):
    shutil.rmtree(out / "validation")


def exchange_the_tokenizer(out, other):
    shutil.copy(other / "tokenizer" / "tokenizer.json", out / "tokenizer")


def exchange_the_record(out, other):
    shutil.copy(other / "corpus.json", out)


def change_one_id(out, other):
    (file,) = (out / "train").glob("*.arrow")
    whole = file.read_bytes()
    at = whole.index(np.array([*load_corpus(out).train[3]["labels"]], dtype=np.int32).tobytes())
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])


@pytest.mark.parametrize(
    "damage",
    [
        exchange_the_training_text,
        exchange_the_validation_text,
        remove_the_validation_text,
        exchange_the_tokenizer,
        exchange_the_record,
        change_one_id,
    ],
)
def test_a_corpus_that_was_changed_after_it_was_prepared_is_refused(tmp_path, raw, damage):
    out, other = tmp_path / "out", tmp_path / "other"
    run(tmp_path, text(raw), text(raw, "validation", SOURCES[1:4], TARGETS[1:4]), vocab_size=265)
    out.rename(other)
    run(tmp_path, text(raw, "train", TARGETS, SOURCES), text(raw, "validation", SOURCES[:3], TARGETS[:3]))
    load_corpus(out)
    damage(out, other)
    with pytest.raises(ValueError, match="out is not as `prepare` wrote it.*run `prepare` again"):
        load_corpus(out)


def on_disk(folder, rows):
    datasets.Dataset.from_list(rows).save_to_disk(folder / "corpus")
    return Bitext(str(folder / "corpus"), split="train")


def test_a_dataset_on_disk_is_prepared_and_left_as_it_is(tmp_path, raw):
    train = on_disk(raw, [{"translation": {"en": s, "de": t}} for s, t in zip(SOURCES, TARGETS, strict=True)])
    before = sorted(raw.rglob("*"))
    assert run(tmp_path, train)["train"]["pairs"] == 12
    corpus = load_corpus(tmp_path / "out")
    assert texts_of(corpus, "labels") == TARGETS
    assert sorted(raw.rglob("*")) == before


@pytest.mark.parametrize("empty", ["", "  ", None])
@pytest.mark.parametrize("side", ["en", "de"])
def test_empty_sides_of_a_dataset_are_refused_or_dropped_as_those_of_files(tmp_path, raw, side, empty):
    train = on_disk(raw, [{"en": "a", "de": "b"}, {"en": "c", "de": "d"} | {side: empty}, {"en": "e", "de": "f"}])
    with pytest.raises(ValueError, match="1 pairs of .*corpus have an empty side .*2"):
        run(tmp_path, train)
    assert run(tmp_path, train, drop_empty=True)["train"]["pairs"] == 2


def test_several_processes_tokenise_to_the_same_corpus(tmp_path, raw):
    first = run(tmp_path, text(raw))
    rows = load_corpus(tmp_path / "out").train[:]
    assert run(tmp_path, text(raw), num_proc=2, overwrite=True) == first
    assert load_corpus(tmp_path / "out").train[:] == rows


@pytest.mark.parametrize("files", [[], ["train", "tokenizer"]])
def test_a_folder_that_holds_no_prepared_corpus_is_refused(tmp_path, files):
    for name in files:
        (tmp_path / name).mkdir()
    with pytest.raises(FileNotFoundError, match="holds no prepared corpus"):
        load_corpus(tmp_path)


@pytest.mark.parametrize("changes", [{"eos_token": "<unk>"}, {"pad_token": "<unk>"}, {"add_eos": False}], ids=str)
def test_a_tokenizer_whose_symbols_stand_elsewhere_is_refused(tmp_path, raw, changes):
    tokenizer = train_tokenizer(SOURCES, vocab_size=270)
    if changes.pop("add_eos", True):
        for name, token in changes.items():
            setattr(tokenizer, name, token)
    else:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()
    tokenizer.save_pretrained(tmp_path / "foreign")
    with pytest.raises(ValueError, match="has pad, bos and eos at"):
        run(tmp_path, text(raw), tokenizer=tmp_path / "foreign")
    assert not (tmp_path / "out").exists()
