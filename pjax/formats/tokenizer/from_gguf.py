"""The tokenizer that a GGUF file carries in its metadata."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from gguf.constants import Keys, TokenType
from tokenizers import decoders, models, normalizers

from pjax.formats.gguf_file import GgufFile
from pjax.formats.tokenizer.fast import AddedToken, FastCodec, add_tokens, refused_as
from pjax.formats.tokenizer.pretokenizers import GPT2, PRE_TOKENIZERS, PreTokenizer
from pjax.formats.tokenizer.tokenizer import Tokenizer

_MARK = "▁"
"""What SentencePiece writes for a space."""

_MAX_TOKEN = 4096
"""Characters; real ones have some hundred spaces. To find its merges takes the square of a token's length."""

_SPECIAL_TYPES = (TokenType.UNKNOWN, TokenType.CONTROL)


class _Vocabulary(NamedTuple):
    """The arrays of the metadata, checked; one entry an id."""

    tokens: tuple[str, ...]
    types: Sequence[int]
    ids: dict[str, int]


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Makes the tokenizer of a GGUF file: SentencePiece's BPE ("llama"), or byte-level BPE ("gpt2").

    Args:
        file: opened.

    Raises:
        FileNotFoundError: there is no tokenizer in it.
        ValueError: a kind that is not supported, or a value that is wrong; it names the key.
    """
    keys = _Metadata(file.path, file.metadata)
    kind = keys.text(Keys.Tokenizer.MODEL)
    if kind is None or Keys.Tokenizer.LIST not in file.metadata:
        raise FileNotFoundError(
            f"{file.path} has no tokenizer (tokenizer.ggml.model and tokens): text cannot be read or "
            f"written; prompts given as token ids still work."
        )
    vocabulary = _read_vocabulary(keys)
    if kind == "llama":
        library, adds_bos = _sentencepiece(keys, vocabulary), True
    elif kind == "gpt2":
        pre_tokenizer = _pre_tokenizer(keys)
        library, adds_bos = _byte_level(keys, vocabulary, pre_tokenizer), pre_tokenizer.adds_bos
    else:
        raise keys.error(Keys.Tokenizer.MODEL, "one of the supported kinds, 'llama' or 'gpt2'")
    named_ids = _named_ids(keys, vocabulary)
    special = set(named_ids.values())
    added = [
        AddedToken(i, token, special=vocabulary.types[i] in _SPECIAL_TYPES or i in special)
        for i, token in enumerate(vocabulary.tokens)
        if vocabulary.ids[token] == i
        and token
        and (vocabulary.types[i] in (*_SPECIAL_TYPES, TokenType.USER_DEFINED) or i in special)
    ]
    add_tokens(library, added, str(file.path))
    bos_id = named_ids.get("bos_token")
    if keys.flag(Keys.Tokenizer.ADD_BOS, adds_bos and bos_id is not None):
        if bos_id is None:
            raise keys.error(Keys.Tokenizer.BOS_ID, f"an id, since {Keys.Tokenizer.ADD_BOS} is true")
    else:
        bos_id = None
    named = {role: vocabulary.tokens[token_id] for role, token_id in named_ids.items()}
    return Tokenizer(FastCodec(library), bos_id, keys.text(Keys.Tokenizer.CHAT_TEMPLATE), named)


class _Metadata(NamedTuple):
    """Checked access to a file's metadata."""

    path: Path
    values: dict[str, Any]

    def error(self, key: str, expected: str) -> ValueError:
        found = repr(self.values[key]) if key in self.values else "no such key"
        found = found if len(found) <= 80 else f"{found[:80]}..."
        return ValueError(f"{self.path}: {key}: expected {expected}, found {found}.")

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        # An empty array has no strings to tell its type by.
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "an array of texts")
        return value

    def numbers(self, key: str, length: int) -> np.ndarray:
        value = self.values.get(key)
        if not isinstance(value, np.ndarray) or value.shape != (length,):
            found = f"{len(value)} values" if isinstance(value, np.ndarray | tuple) else repr(value)
            found = found if key in self.values else "no such key"
            raise ValueError(f"{self.path}: {key}: expected {length} numbers, one a token, found {found}.")
        return value


def _read_vocabulary(keys: _Metadata) -> _Vocabulary:
    tokens = keys.texts(Keys.Tokenizer.LIST)
    if not tokens:
        raise keys.error(Keys.Tokenizer.LIST, "at least one token")
    if max(map(len, tokens)) > _MAX_TOKEN:
        raise keys.error(Keys.Tokenizer.LIST, f"tokens of at most {_MAX_TOKEN} characters")
    ids: dict[str, int] = {}
    for i, token in enumerate(tokens):
        ids.setdefault(token, i)
    if len(ids) < len(tokens):
        logging.warning(
            "%s: %s: %d tokens occur more than once; each is read and written under its first id.",
            keys.path,
            Keys.Tokenizer.LIST,
            len(tokens) - len(ids),
        )
    types: Sequence[int] = [TokenType.NORMAL] * len(tokens)
    if Keys.Tokenizer.TOKEN_TYPE in keys.values:
        types = keys.numbers(Keys.Tokenizer.TOKEN_TYPE, len(tokens)).tolist()
    return _Vocabulary(tokens, types, ids)


def _named_ids(keys: _Metadata, vocabulary: _Vocabulary) -> dict[str, int]:
    """The special tokens that the file calls by their role."""
    roles = {
        "bos_token": Keys.Tokenizer.BOS_ID,
        "eos_token": Keys.Tokenizer.EOS_ID,
        "unk_token": Keys.Tokenizer.UNK_ID,
    }
    found = {role: key for role, key in roles.items() if key in keys.values}
    for key in found.values():
        value = keys.values[key]
        if not isinstance(value, int) or not 0 <= value < len(vocabulary.tokens):
            raise keys.error(key, f"a token id from 0 to {len(vocabulary.tokens) - 1}")
    return {role: keys.values[key] for role, key in found.items()}


def _sentencepiece(keys: _Metadata, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece joins the two neighbours whose union scores best; here that order is one of merges."""
    scores = keys.numbers(Keys.Tokenizer.SCORES, len(vocabulary.tokens)).tolist()
    ids, merges = vocabulary.ids, []
    for i, token in enumerate(vocabulary.tokens):
        if vocabulary.types[i] in (*_SPECIAL_TYPES, TokenType.BYTE):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-scores[i], ids[left], ids[right], left, right))
    merges.sort()
    unknown = next((t for t, kind in zip(*vocabulary[:2], strict=True) if kind == TokenType.UNKNOWN), None)
    library = tokenizers.Tokenizer(
        models.BPE(ids, [merge[3:] for merge in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    begins_with_space = keys.flag(Keys.Tokenizer.ADD_PREFIX, True)
    marks = [normalizers.Replace(" ", _MARK)]
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_MARK), *marks] if begins_with_space else marks
    )
    steps = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if begins_with_space else steps)
    return library


def _byte_level(
    keys: _Metadata, vocabulary: _Vocabulary, pre_tokenizer: PreTokenizer
) -> tokenizers.Tokenizer:
    merges = []
    for merge in keys.texts(Keys.Tokenizer.MERGES):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise ValueError(
                f"{keys.path}: {Keys.Tokenizer.MERGES}: expected two tokens with a space between them, "
                f"found {merge!r}."
            )
        merges.append((left, right))
    with refused_as(f"{keys.path}: {Keys.Tokenizer.MERGES} and {Keys.Tokenizer.LIST} do not fit together"):
        model = models.BPE(vocabulary.ids, merges, ignore_merges=pre_tokenizer.whole_words)
    library = tokenizers.Tokenizer(model)
    begins_with_space = keys.flag(Keys.Tokenizer.ADD_PREFIX, False)
    steps = [normalizers.NFC()] if pre_tokenizer.composed else []
    library.normalizer = normalizers.Sequence(
        [*steps, normalizers.Prepend(" ")] if begins_with_space else steps
    )
    library.pre_tokenizer = pre_tokenizer.build()
    library.decoder = decoders.ByteLevel()
    return library


def _pre_tokenizer(keys: _Metadata) -> PreTokenizer:
    name = keys.text(Keys.Tokenizer.PRE)
    if name is None or name not in PRE_TOKENIZERS:
        logging.warning(
            "%s: %s: %s; texts are cut into words as GPT-2 does, which may not be what the model learned.",
            keys.path,
            Keys.Tokenizer.PRE,
            "no such key" if name is None else f"{name!r} is not known",
        )
        return GPT2
    return PRE_TOKENIZERS[name]
