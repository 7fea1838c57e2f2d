"""A SentencePiece model (tokenizer.model) as a codec."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pjax.formats.files import describe_content
from pjax.formats.tokenizer.fast import AddedToken


@dataclasses.dataclass(frozen=True)
class SentencePieceCodec:
    """See `Codec`.

    Attributes:
        first: a `sentencepiece.SentencePieceProcessor`; it begins a text with a space if the model says so.
        added: tokens that are found in a text before the library sees it.
        space_after_tokens: whether the text after one of them begins with a space, as a text does.
    """

    first: Any
    added: tuple[AddedToken, ...]
    space_after_tokens: bool

    @functools.cached_property
    def later(self) -> Any:
        """The processor for text after an added token."""
        if self.space_after_tokens:
            return self.first
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

        model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made at its import
        model.ParseFromString(self.first.serialized_model_proto())
        model.normalizer_spec.add_dummy_prefix = False
        return SentencePieceProcessor(model_proto=model.SerializeToString())

    @functools.cached_property
    def _by_id(self) -> dict[int, AddedToken]:
        return {token.id: token for token in self.added}

    @functools.cached_property
    def _controls(self) -> tuple[AddedToken, ...]:
        """The model's own tokens that no text can make: they are found only where they are written out."""
        ids = (i for i in range(self.first.get_piece_size()) if self.first.is_control(i))
        return tuple(AddedToken(i, self.first.id_to_piece(i)) for i in ids)

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        tokens = self._controls + self.added
        return frozenset({self.first.unk_id(), *(token.id for token in tokens if token.special)})

    def is_text(self, token_id: int) -> bool:
        """Whether an id stands for text: it exists, and is no special one."""
        return token_id not in self._special_ids and self.has(token_id)

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token, None if there is no such token."""
        for known in self.added:
            if known.content == token:
                return known.id
        found = self.first.piece_to_id(token)
        return found if self.first.id_to_piece(found) == token else None

    def has(self, token_id: int) -> bool:
        """Whether there is such an id."""
        return 0 <= token_id < self.first.get_piece_size() or token_id in self._by_id

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; the model's own special tokens are no part of it."""
        return self._encode(text, self._find_added)

    def encode_marked(self, text: str) -> list[int]:
        """Returns the ids of a text in which every special token is written out."""
        return self._encode(text, self._find_all)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without the special ones; U+FFFD for half a character."""
        parts, run, processor = [], [], self.first
        for token_id in ids:
            if token_id in self._by_id:
                parts.append(processor.decode(run))
                run, processor = [], self.later
                if not self._by_id[token_id].special:
                    parts.append(self._by_id[token_id].content)
            elif token_id not in self._special_ids:
                run.append(token_id)
        return "".join(parts) + processor.decode(run)

    @functools.cached_property
    def _find_added(self) -> Callable[[str], list[str]]:
        return _splitter(self.added)

    @functools.cached_property
    def _find_all(self) -> Callable[[str], list[str]]:
        return _splitter(self._controls + self.added)

    def _encode(self, text: str, split: Callable[[str], list[str]]) -> list[int]:
        ids, processor = [], self.first
        for index, part in enumerate(split(text)):
            if index % 2:
                ids.append(self.id_of(part))
                processor = self.later
            elif part:
                ids += processor.encode(part)
        return ids


def _splitter(tokens: Sequence[AddedToken]) -> Callable[[str], list[str]]:
    """Cuts a text into [text, token, text, ..., text]; of two tokens at one place the longer is taken."""
    if not tokens:
        return lambda text: [text]
    contents = sorted((token.content for token in tokens), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, contents))})").split


def load_sentencepiece(
    file: Path, added: Sequence[AddedToken], space_after_tokens: bool
) -> SentencePieceCodec:
    """Loads a tokenizer.model.

    Args:
        file: the model.
        added: tokens of the files beside it.
        space_after_tokens: see `SentencePieceCodec`.

    Raises:
        ValueError: the package is missing, the file is no such model, or a token has two ids.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise ValueError(
            f"{file} needs the package sentencepiece: pip install 'pjax[sentencepiece]'; "
            "a tokenizer.json beside it needs nothing."
        ) from error
    content = file.read_bytes()
    try:
        first = sentencepiece.SentencePieceProcessor()
        first.load_from_serialized_proto(content)
    except RuntimeError as error:
        raise ValueError(
            f"{file}: expected a SentencePiece model; the file {describe_content(content)}."
        ) from error
    for token in added:
        size = first.get_piece_size()
        if token.id < size and first.id_to_piece(token.id) != token.content:
            raise ValueError(
                f"{file}: id {token.id} is {first.id_to_piece(token.id)!r}, but the files beside it "
                f"call it {token.content!r}: they do not belong together."
            )
    return SentencePieceCodec(first, tuple(added), space_after_tokens)
