"""The shared vocabulary: any text comes back, special tokens stay special, and AutoTokenizer needs nothing of ours."""

import json
import random
import subprocess
import sys

import datasets
import pytest
from transformers import AutoTokenizer

from vanilla_transformer.tokenizer import train_tokenizer

SENTENCES = ["a man rides a horse .", "ein Mann reitet auf einem Pferd .", "two dogs </s> <pad>", "zwei Hunde"] * 5

HARD_TEXTS = [
    "",
    " ",
    "   leading, trailing and   many spaces   ",
    "tab\tline\nbreak\r\nreturn\rend\n",
    "NUL \x00 and \x1f controls",
    "n't do this , or that . it 's fine !",
    "e\u0301 is not \u00e9, o\u0308 is not \u00f6",
    "Zażółć gęślą jaźń, Straße, ŒUVRE, İstanbul",
    "日本語の文章 한국어 中文",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 𝕊𝕡𝕒𝕔𝕖",
    "שלום עולם \u202eevil\u202c العربية",
    "no\u00a0break, zero\u200bwidth, line\u2028separator, next\u0085line, \ufeffmark, \ufffd",
    "\U0010ffff\ue000",
    "</s>",
    "<pad> in <s> the </s></s> middle <unk>",
]


def random_texts(count):
    """Texts of any code points but surrogates, which are no text."""
    draw = random.Random(0)
    points = [p for limit in (0x80, 0x800, 0x10000, 0x110000) for p in draw.choices(range(limit), k=500)]
    points = [p for p in points if not 0xD800 <= p < 0xE000]
    return ["".join(map(chr, draw.choices(points, k=draw.randint(1, 30)))) for _ in range(count)]


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(SENTENCES, vocab_size=300)


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    trained.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["trained", "loaded"])
def tokenizer(request, trained, folder):
    return trained if request.param == "trained" else AutoTokenizer.from_pretrained(folder)


def test_special_tokens_have_the_ids_0_to_3(tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<s>", "</s>", "<unk>"]) == [0, 1, 2, 3]
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert ids == (0, 1, 2, 3)


@pytest.mark.parametrize("text", HARD_TEXTS, ids=ascii)
def test_hard_texts_come_back_as_they_went_in(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(ids) == text + "</s>"


def test_random_texts_come_back_as_they_went_in(tokenizer):
    texts = random_texts(300)
    assert tokenizer.batch_decode(tokenizer(texts)["input_ids"], skip_special_tokens=True) == texts


def test_a_text_ends_in_one_end_symbol_and_begins_with_no_start_symbol(tokenizer):
    encoded = tokenizer("a man")
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert encoded["input_ids"][-1] == 2
    assert not {0, 1, 2, 3} & set(encoded["input_ids"][:-1])
    assert tokenizer("")["input_ids"] == [2]


def test_text_target_gives_labels_that_end_in_the_end_symbol(tokenizer):
    labels = tokenizer(text_target=["zwei Hunde", "ein Mann"])["input_ids"]
    assert labels == tokenizer(["zwei Hunde", "ein Mann"])["input_ids"]
    assert [ids[-1] for ids in labels] == [2, 2]
    both = tokenizer("two dogs", text_target="zwei Hunde")
    assert both["labels"] == labels[0]


@pytest.mark.parametrize("literal", ["</s>", "<pad>", "<s>", "<unk>"])
def test_special_tokens_written_in_a_text_are_text(tokenizer, literal):
    for encoded in (tokenizer(f"two {literal}dogs"), tokenizer(text_target=f"two {literal}dogs")):
        assert not {0, 1, 2, 3} & set(encoded["input_ids"][:-1])
        assert encoded["input_ids"][-1] == 2


def test_batches_are_padded_on_the_right(tokenizer):
    batch = tokenizer(["two dogs on a hill", "two"], padding=True)
    short = len(tokenizer("two")["input_ids"])
    longest = len(batch["input_ids"][0])
    assert batch["input_ids"][1][short:] == [0] * (longest - short)
    assert batch["attention_mask"][1] == [1] * short + [0] * (longest - short)


def test_the_vocabulary_is_as_large_as_asked_for(trained):
    assert len(trained) == 300
    assert sorted(trained.get_vocab().values()) == list(range(300))


def test_bytes_that_are_often_neighbours_become_one_token():
    tokenizer = train_tokenizer(["ab ab"] * 3, vocab_size=1000)
    assert len(tokenizer) == 4 + 256 + 2  # "ab" and " ab": little text gives fewer than were asked for
    assert tokenizer.tokenize("ab abc") == ["ab", "Ġab", "c"]


def test_a_column_of_a_dataset_teaches_the_same_vocabulary(trained):
    column = datasets.Dataset.from_dict({"text": SENTENCES})["text"]
    assert train_tokenizer(column, vocab_size=300).get_vocab() == trained.get_vocab()


def test_the_saved_tokenizer_is_a_stock_one(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] in ("PreTrainedTokenizerFast", "TokenizersBackend")
    assert "auto_map" not in config
    assert config["clean_up_tokenization_spaces"] is False
    assert not list(folder.glob("*.py"))


def test_auto_tokenizer_loads_it_without_our_package(folder, trained):
    code = (
        "import json, sys; sys.modules['vanilla_transformer'] = None\n"
        "from transformers import AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "ids = tokenizer(text_target=sys.argv[2])['input_ids']\n"
        "print(json.dumps([ids, tokenizer.decode(ids, skip_special_tokens=True)]))"
    )
    text = "  two </s> dogs, 日本 👍🏽 "
    done = subprocess.run([sys.executable, "-c", code, str(folder), text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [trained(text)["input_ids"], text]


@pytest.mark.parametrize("vocab_size", [0, 259])
def test_a_vocabulary_too_small_for_all_bytes_is_refused(vocab_size):
    with pytest.raises(ValueError, match=rf"vocab_size must be at least 260 .*got {vocab_size}"):
        train_tokenizer(SENTENCES, vocab_size=vocab_size)


def test_the_smallest_vocabulary_is_bytes_alone():
    tokenizer = train_tokenizer(SENTENCES, vocab_size=260)
    assert len(tokenizer) == 260
    assert len(tokenizer("zwei")["input_ids"]) == 5


@pytest.mark.parametrize("nothing", [[], iter(())])
def test_no_text_is_refused(nothing):
    with pytest.raises(ValueError, match="no text to train a tokenizer on"):
        train_tokenizer(nothing, vocab_size=300)
