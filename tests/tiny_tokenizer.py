"""Small tokenizers of both kinds, made on the spot, and what tests do with any of them."""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

SAMPLES = [
    "Hello world",
    "  two spaces",
    "a  b   c",
    "trailing ",
    "",
    " ",
    "\n",
    "naïve façade",
    "日本語のテキスト",
    "😀 👩\u200d👩\u200d👧",
    "x\ufffdy\ufffd",
]
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "日本語のテキスト 日本語",
    "naïve façade",
    "a  b",
] * 3


def byte_level():
    """A small tokenizer of OPT's kind, trained on the spot."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    return library


def byte_fallback():
    """A small tokenizer of LLaMA's kind: a mark for each space, bytes for what is not in the vocabulary."""
    pieces = [
        "<s>",
        "</s>",
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz",
        "▁a",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    library = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens(["<s>", "</s>", "<unk>"])
    return library


LIBRARIES = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


def stream_pieces(tokenizer, ids):
    """The pieces of a stream, what is left at its end included."""
    stream = tokenizer.stream()
    return [*(stream.push(i) for i in ids), stream.flush()]
