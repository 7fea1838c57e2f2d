"""How byte-level vocabularies cut a text into words, by the name that GGUF files give it."""

from typing import NamedTuple

import tokenizers
from tokenizers import pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"

_WORD_OR = r"[^\r\n\p{L}\p{N}]?\p{L}+|"

_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = rf"{_ENDINGS}|{_WORD_OR}\p{{N}}{{1,3}}{_REST}"

_QWEN2 = rf"{_ENDINGS}|{_WORD_OR}\p{{N}}{_REST}"

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(endings: str, digits: str) -> str:
    """Words that end where small letters turn into capitals."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{_UPPER}*{_LOWER}+{endings}|{start}{_UPPER}+{_LOWER}*{endings}"
    return rf"{words}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")

_DIGITS_APART = (r"\p{N}", _GPT2)

_CJK = "[一-龥ࠀ-一가-퟿]+"

_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


class PreTokenizer(NamedTuple):
    """How a text is cut before it is encoded.

    Attributes:
        patterns: regular expressions; what one matches becomes a word, and the next cuts the words further.
        composed: whether letters and their accents are composed first (Unicode NFC).
        whole_words: whether a word of the vocabulary is taken as it is, whatever the merges make of it.
        adds_bos: whether texts begin with the BOS id where the file does not say.
    """

    patterns: tuple[str, ...]
    composed: bool = False
    whole_words: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The library's object for it."""
        splits = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in self.patterns]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


GPT2 = PreTokenizer((_GPT2,))

_LLAMA3_LIKE = PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True)

_NAMED = {
    GPT2: ("gpt-2", "mpt", "olmo", "jais", "phi-2"),
    PreTokenizer((*_FALCON[:2], r"\p{N}+", _FALCON[2])): ("default",),
    PreTokenizer(_FALCON): ("falcon",),
    PreTokenizer(_DIGITS_APART): (
        "smollm",
        "starcoder",
        "refact",
        "command-r",
        "codeshell",
        "exaone",
        "minerva-7b",
    ),
    _LLAMA3_LIKE: ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
    PreTokenizer((_LLAMA3,)): ("dbrx", "smaug-bpe", "chatglm-bpe"),
    PreTokenizer((_QWEN2,), composed=True): ("qwen2", "deepseek-r1-qwen", "megrez"),
    PreTokenizer((_QWEN2,)): ("stablelm2",),
    PreTokenizer((_cased("", ""),), whole_words=True, adds_bos=True): ("tekken",),
    PreTokenizer((_cased(f"{_ENDINGS}?", "{1,3}"),)): ("gpt-4o", "llama4"),
    PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")): ("deepseek-coder",),
    PreTokenizer((_BLOOM,)): ("bloom", "poro-chat", "gpt3-finnish"),
    PreTokenizer((_BLOOM, r"\p{N}")): ("viking",),
}

PRE_TOKENIZERS = {name: kind for kind, names in _NAMED.items() for name in names}
"""Name in `tokenizer.ggml.pre` to what llama.cpp does under it."""
