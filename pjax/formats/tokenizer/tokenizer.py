"""Text to token ids and back, in whole or as a stream of text that is already certain."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, or not one yet."""

_MAX_HELD = 8
"""Ids that may wait for a character. It has at most four bytes; twice that also lets tokens that
straddle two characters come to an end by themselves, and bounds the cost of a push."""

_MAX_PENDING_BYTES = 3
"""Bytes of an unfinished character, and so the most tokens it can be spread over."""


class Codec(Protocol):
    """What a library knows of a vocabulary."""

    def has(self, token_id: int, /) -> bool:
        """Whether there is such an id."""
        ...

    def is_text(self, token_id: int, /) -> bool:
        """Whether an id stands for text: it exists, and is no special one."""
        ...

    def encode(self, text: str, /) -> list[int]:
        """Returns the ids of a text, with what the library itself puts around it."""
        ...

    def encode_marked(self, text: str, /) -> list[int]:
        """Returns the ids of a text in which every special token is written out."""
        ...

    def decode(self, ids: Sequence[int], /) -> str:
        """Returns the text of ids that exist, those of text only; U+FFFD for half a character."""
        ...


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, its rule for the beginning of a text, and its model's way to write a chat.

    Attributes:
        codec: does the work.
        bos_id: put before every text; None if the codec does it, or nobody.
        chat_template: Jinja source that writes messages as one text, or None.
        named_tokens: "bos_token", "eos_token" and others that a template may use, to their text.
    """

    codec: Codec
    bos_id: int | None = None
    chat_template: str | None = None
    named_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, begun by the BOS id if the model wants one.

        Args:
            text: any string that UTF-8 can express; "" gives the BOS id alone, or nothing.

        Raises:
            ValueError: the text holds half of a surrogate pair.
        """
        begin = [] if self.bos_id is None else [self.bos_id]
        return begin + self.codec.encode(_checked(text))

    def encode_marked(self, text: str) -> list[int]:
        """Returns the ids of a text that writes its special tokens itself, BOS too, as a chat template does.

        Args:
            text: as of `encode`.

        Raises:
            ValueError: as `encode`.
        """
        return self.codec.encode_marked(_checked(text))

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
        return StreamDecoder(self.codec)


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text: half a surrogate pair at character {error.start}; expected text.") from error
    return text


class StreamDecoder:
    """Turns ids into text as they come; never gives out half a character.

    It decodes a short window of the last ids and gives out what is new in it. The window begins with
    ids whose text is already out, since a decoder treats the first word of a text differently.
    """

    def __init__(self, codec: Codec):
        """Begins a text of this vocabulary."""
        self._codec = codec
        self._window: list[int] = []
        self._num_known = 0  # Ids at the front of the window whose text was complete.
        self._num_sent = 0  # Characters of the window's text that are out.

    def push(self, token_id: int) -> str:
        """Returns the text that has become certain with one more id, "" if none has.

        Args:
            token_id: the next id.
        """
        if not self._codec.is_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._codec.decode(self._window)
        if not text.endswith(_REPLACEMENT):
            return self._give_out(text)
        if len(self._window) - self._num_known > _MAX_HELD:
            return self._give_up(text)
        return ""

    def flush(self) -> str:
        """Returns what was held back; the stream is then as new."""
        rest = self._codec.decode(self._window)[self._num_sent :]
        self._window, self._num_known, self._num_sent = [], 0, 0
        return rest

    def _give_out(self, text: str) -> str:
        """Makes the ids since the last complete text the context of the next ones."""
        piece = text[self._num_sent :]
        window = self._window[self._num_known :]
        window_text = self._codec.decode(window)
        if window_text:
            self._window, self._num_known, self._num_sent = window, len(window), len(window_text)
        else:  # A lone space vanishes at the front of a window; the next id joins it.
            self._num_sent = len(text)
        return piece

    def _give_up(self, text: str) -> str:
        """Shortens the window to what may still become a character, and lets the rest be as it is."""
        self._window = self._window[-_MAX_PENDING_BYTES:]
        window_text = self._codec.decode(self._window)
        num_pending = len(window_text) - len(window_text.rstrip(_REPLACEMENT))
        piece = text[self._num_sent : len(text) - num_pending]
        self._num_known, self._num_sent = 0, len(window_text) - num_pending
        return piece
