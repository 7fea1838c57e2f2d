"""Text to token ids and back, in whole or as a stream of text that is already certain."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pjax.formats.files import expand_path, read_json

_USUAL_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
"""Entries of a vocab.json that no merge can make, in OPT and its relatives."""

_REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, or not one yet."""

_MAX_HELD = 8
"""Ids that may wait for a character. It has at most four bytes; twice that also lets tokens that
straddle two characters come to an end by themselves, and bounds the cost of a push."""

_MAX_PENDING_BYTES = 3
"""Bytes of an unfinished character, and so the most tokens it can be spread over."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and its rule for the beginning of a text.

    Attributes:
        library: does the work.
        bos_id: put before every text; None if the library does it, or nobody.
    """

    library: tokenizers.Tokenizer
    bos_id: int | None

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, begun by the BOS id if the model wants one.

        Args:
            text: any string that UTF-8 can express; "" gives the BOS id alone, or nothing.

        Raises:
            ValueError: the text holds half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text: half a surrogate pair at character {error.start}; expected text."
            ) from error
        if self.bos_id is None:
            return self.library.encode(text).ids
        return [self.bos_id, *self.library.encode(text, add_special_tokens=False).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, without the special ones; what `stream` gives, joined.

        Args:
            ids: of any length; ids beyond the vocabulary are left out.
        """
        stream = self.stream()
        pieces = [stream.push(int(i)) for i in ids]
        return "".join(pieces) + stream.flush()

    def stream(self) -> "StreamDecoder":
        """Returns a decoder for ids that come one at a time."""
        return StreamDecoder(self)

    def decode_window(self, ids: Sequence[int]) -> str:
        """Returns the library's text for a few ids, where an unfinished character is U+FFFD."""
        return self.library.decode(ids, skip_special_tokens=True)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text."""
        added = self.library.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)


class StreamDecoder:
    """Turns ids into text as they come; never gives out half a character.

    It decodes a short window of the last ids and gives out what is new in it. The window begins with
    ids whose text is already out, since a decoder treats the first word of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Begins a text of this tokenizer."""
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_known = 0  # Ids at the front of the window whose text was complete.
        self._num_sent = 0  # Characters of the window's text that are out.

    def push(self, token_id: int) -> str:
        """Returns the text that has become certain with one more id, "" if none has.

        Args:
            token_id: the next id.
        """
        library = self._tokenizer.library
        if token_id in self._tokenizer.special_ids or library.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode_window(self._window)
        if not text.endswith(_REPLACEMENT):
            return self._give_out(text)
        if len(self._window) - self._num_known > _MAX_HELD:
            return self._give_up(text)
        return ""

    def flush(self) -> str:
        """Returns what was held back; the stream is then as new."""
        rest = self._tokenizer.decode_window(self._window)[self._num_sent :]
        self._window, self._num_known, self._num_sent = [], 0, 0
        return rest

    def _give_out(self, text: str) -> str:
        """Makes the ids since the last complete text the context of the next ones."""
        piece = text[self._num_sent :]
        window = self._window[self._num_known :]
        window_text = self._tokenizer.decode_window(window)
        if window_text:
            self._window, self._num_known, self._num_sent = window, len(window), len(window_text)
        else:  # A lone space vanishes at the front of a window; the next id joins it.
            self._num_sent = len(text)
        return piece

    def _give_up(self, text: str) -> str:
        """Shortens the window to what may still become a character, and lets the rest be as it is."""
        self._window = self._window[-_MAX_PENDING_BYTES:]
        window_text = self._tokenizer.decode_window(self._window)
        num_pending = len(window_text) - len(window_text.rstrip(_REPLACEMENT))
        piece = text[self._num_sent : len(text) - num_pending]
        self._num_known, self._num_sent = 0, len(window_text) - num_pending
        return piece


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a model folder: tokenizer.json, else vocab.json with merges.txt.

    A BOS id is put first if tokenizer_config.json says so (`add_bos_token`); else as tokenizer.json's
    post-processor does; without either, if config.json has a `bos_token_id`.

    Args:
        path: the model's folder.

    Raises:
        FileNotFoundError: no such folder, or no tokenizer in it.
        ValueError: a broken file, or a kind of tokenizer that is not supported.
    """
    folder = expand_path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"The tokenizer's folder {folder} does not exist, or is no folder.")
    settings = _read_if_there(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        library = _load_json(folder / "tokenizer.json")
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        library = _load_merges(folder, settings)
    elif (folder / "tokenizer.model").is_file():
        raise ValueError(
            f"{folder / 'tokenizer.model'}: SentencePiece models are not supported yet; "
            f"put the model's tokenizer.json beside it, or give prompts as token ids."
        )
    else:
        raise FileNotFoundError(
            f"{folder} has no tokenizer (tokenizer.json, or vocab.json with merges.txt): "
            f"text cannot be read or written; prompts given as token ids still work."
        )
    return Tokenizer(library, _bos_id(folder, library, settings))


def _read_if_there(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _load_json(file: Path) -> tokenizers.Tokenizer:
    read_json(file)  # Says better than the library what is wrong with a file that is no JSON.
    try:
        library = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises this class itself, no narrower one.
        raise ValueError(f"{file} is not a tokenizer that the library `tokenizers` reads: {error}") from error
    library.no_truncation()  # A file may carry the limits of its training; a prompt is never cut.
    library.no_padding()
    return library


def _load_merges(folder: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    read_json(folder / "vocab.json")
    try:
        library = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*files))
    except Exception as error:  # As above.
        raise ValueError(f"{files[0]} and {files[1]} do not fit together: {error}") from error
    prefix_space = settings.get("add_prefix_space") is True
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    library.decoder = tokenizers.decoders.ByteLevel()
    named = [_content(settings.get(f"{kind}_token")) for kind in ("bos", "eos", "unk", "pad")]
    specials = dict.fromkeys([*_USUAL_SPECIALS, *filter(None, named)])
    library.add_special_tokens([s for s in specials if library.token_to_id(s) is not None])
    return library


def _bos_id(folder: Path, library: tokenizers.Tokenizer, settings: dict[str, Any]) -> int | None:
    wanted = settings.get("add_bos_token")
    if wanted:
        token = _content(settings.get("bos_token"))
        bos_id = None if token is None else library.token_to_id(token)
        if bos_id is None:
            file = folder / "tokenizer_config.json"
            raise ValueError(f"{file}: bos_token: expected a token of the vocabulary, found {token!r}.")
        return bos_id
    if wanted is False:
        library.post_processor = tokenizers.processors.Sequence([])
        return None
    if library.post_processor is not None:
        return None
    bos_id = _read_if_there(folder / "config.json").get("bos_token_id")
    return bos_id if isinstance(bos_id, int) and library.id_to_token(bos_id) is not None else None


def _content(token: Any) -> str | None:
    """The text of a special token, which a file gives as a string or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
