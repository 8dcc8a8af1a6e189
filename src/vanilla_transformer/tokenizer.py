"""The shared source-target vocabulary: byte-pair encoding over bytes (section 5.1; Sennrich et al. 2016).

The paper learned one BPE of about 37,000 tokens over both languages. Here the pairs are of bytes, not characters, so
that any text comes back as it went in and no word is ever unknown. The result is a stock fast tokenizer:
`AutoTokenizer` loads it with no code of ours.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL_TOKENS = [PAD, BOS, EOS, UNK]  # ids 0, 1, 2, 3, as the configuration's defaults have them
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256


def train_tokenizer(texts: Iterable[str], vocab_size: int, show_progress: bool = False) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE.

    Args:
        texts: sentences of both languages, in any order: lines of files, or a column of a `datasets.Dataset`.
        vocab_size: tokens at the most, special tokens and the 256 bytes counted. Little text may give fewer.
        show_progress: whether to draw a progress bar.

    Returns:
        A fast tokenizer: `tokenizer(text)` ends in `</s>`, `tokenizer(text_target=text)` gives labels that do, and
        a literal `</s>` in a text is text.

    Raises:
        ValueError: a vocabulary too small for all bytes, or no text.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size must be at least {SMALLEST_VOCABULARY} ({len(SPECIAL_TOKENS)} special tokens and 256 bytes), "
            f"got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(_counted(texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, SPECIAL_TOKENS.index(EOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def _counted(texts):
    """Pass texts on, and refuse if there were none: the tokenizer would be of single bytes."""
    empty = True
    for text in texts:
        empty = False
        yield text
    if empty:
        raise ValueError("there is no text to train a tokenizer on: texts is empty")
