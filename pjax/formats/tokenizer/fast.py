"""The library `tokenizers` as a codec."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import tokenizers

_TOO_LARGE = 1 << 32
"""The library keeps ids in 32 bits."""


class AddedToken(NamedTuple):
    """A token that is found in a text as a whole, before anything else.

    Attributes:
        id: its id.
        content: its text.
        special: whether it stands for no text.
        lstrip: whether it takes the white space before it.
        rstrip: whether it takes the white space after it.
    """

    id: int
    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False


@dataclasses.dataclass(frozen=True)
class FastCodec:
    """See `Codec`.

    Attributes:
        library: does the work.
    """

    library: tokenizers.Tokenizer

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self.library.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    def is_text(self, token_id: int) -> bool:
        """Whether an id stands for text: it exists, and is no special one."""
        return token_id not in self._special_ids and self.has(token_id)

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token, None if there is no such token."""
        return self.library.token_to_id(token)

    def has(self, token_id: int) -> bool:
        """Whether there is such an id."""
        return 0 <= token_id < _TOO_LARGE and self.library.id_to_token(token_id) is not None

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, with those that the library's post-processor puts around it."""
        return self.library.encode(text).ids

    def encode_marked(self, text: str) -> list[int]:
        """Returns the ids of a text in which every special token is written out."""
        return self.library.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without the special ones; U+FFFD for half a character."""
        return self.library.decode(ids, skip_special_tokens=True)


@contextlib.contextmanager
def refused_as(message: str) -> Iterator[None]:
    """Turns what the library raises about a file into a ValueError.

    Args:
        message: names the file, and says what it is not; the library's own words follow.

    Raises:
        ValueError: instead of any error of the library.
    """
    try:
        yield
    except BaseException as error:
        # The library raises Exception itself, nothing narrower; and a panic in Rust is not even that.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{message}: {error}") from error


def add_tokens(library: tokenizers.Tokenizer, added: Iterable[AddedToken], source: str) -> None:
    """Adds tokens to a library, each under the id that its file gives it.

    Args:
        library: is changed.
        added: those that are in the vocabulary already must have their id there.
        source: names the file in messages.

    Raises:
        ValueError: the library would give a token another id.
    """
    for token in sorted(added):
        entry = tokenizers.AddedToken(
            token.content, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=token.special
        )
        (library.add_special_tokens if token.special else library.add_tokens)([entry])
        found = library.token_to_id(token.content)
        if found != token.id:
            raise ValueError(
                f"{source}: the token {token.content!r} should have the id {token.id}, but the vocabulary "
                f"leaves it {found}: the files do not belong together, or one is missing."
            )
