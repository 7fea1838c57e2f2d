"""Text at both ends of the token loop: prompts to ids, and text through up to a stop string."""

import numbers
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pjax.model_config import ModelConfig

MIN_PROMPT_BUCKET = 16
"""Prompts are padded to a power of two from here on: a program is compiled per bucket, and below this a
longer one costs nothing that can be measured."""


class TextStream(Protocol):
    """Turns ids into text as they come; never gives out half a character."""

    def push(self, token_id: int, /) -> str:
        """Returns the text that has become certain."""
        ...

    def flush(self) -> str:
        """Returns what was held back."""
        ...


class Tokenizer(Protocol):
    """What the token loop needs of a tokenizer."""

    def encode(self, text: str, /) -> list[int]:
        """Returns the ids of a text."""
        ...

    def stream(self) -> TextStream:
        """Returns a decoder for ids that come one at a time."""
        ...


def encode_prompts(
    prompts: Any, tokenizer: Tokenizer | None, config: ModelConfig
) -> tuple[list[list[int]], bool]:
    """Makes ids of whatever form prompts have.

    An empty prompt, text or ids, becomes the BOS id alone if there is one.

    Args:
        prompts: a text, its ids in 0..vocab-1, or a list of either.
        tokenizer: None if no prompt is a text.
        config: of the model, for its vocabulary, BOS id and context.

    Returns:
        (ids of each prompt, whether `prompts` was only one)

    Raises:
        ValueError: no prompts, a prompt that is no text and no ids, ids out of range, a text without
            tokenizer, an empty prompt without BOS id, or a prompt longer than the context.
    """
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    is_batch = isinstance(prompts, list | tuple)
    if not (is_batch or isinstance(prompts, str)) or (is_batch and not prompts):
        raise ValueError(
            f"prompts: expected a text, its token ids, or a list of either that is not empty, got {prompts!r}"
        )
    is_single = isinstance(prompts, str) or not any(isinstance(p, Sequence | np.ndarray) for p in prompts)
    parts = [prompts] if is_single else prompts
    return [_encode(part, row, tokenizer, config) for row, part in enumerate(parts)], is_single


def _encode(prompt: Any, row: int, tokenizer: Tokenizer | None, config: ModelConfig) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"prompts: prompt {row} is a text, but there is no tokenizer; give token ids")
        ids = tokenizer.encode(prompt)
    elif isinstance(prompt, list | tuple | np.ndarray):
        ids = list(prompt)
    else:
        raise ValueError(f"prompts: expected a text or a list of ids as prompt {row}, got {prompt!r}")
    if not ids:
        if config.bos_id is None:
            raise ValueError(
                f"prompts: prompt {row} is empty and the model has no BOS id to begin with; "
                f"expected at least one token"
            )
        ids = [config.bos_id]
    if len(ids) > config.context:
        raise ValueError(
            f"prompts: prompt {row} has {len(ids)} tokens, expected at most the model's context of "
            f"{config.context}; shorten it"
        )
    return [_check_id(value, row, i, config.vocab) for i, value in enumerate(ids)]


def _check_id(value: Any, row: int, position: int, vocab: int) -> int:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool | np.bool_)
    if not is_integer or not 0 <= int(value) < vocab:
        raise ValueError(
            f"prompts: expected token ids from 0 to {vocab - 1}, got {value!r} at position {position} "
            f"of prompt {row}"
        )
    return int(value)


def pad_prompts(prompts: Sequence[Sequence[int]], context: int) -> tuple[np.ndarray, np.ndarray]:
    """Puts prompts of several lengths into one array, as wide as their bucket.

    Args:
        prompts: ids of each, at least one and at most `context`.
        context: the most that the bucket may be.

    Returns:
        (ids int32 [batch, seq], padded on the right; lengths int32 [batch])
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    seq = min(next_bucket(MIN_PROMPT_BUCKET, int(lengths.max())), context)
    ids = np.zeros((len(prompts), seq), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    return ids, lengths


def next_bucket(unit: int, least: int) -> int:
    """The first of unit, 2 * unit, 4 * unit, ... that is at least `least`."""
    return unit << ((max(least, 1) - 1) // unit).bit_length()


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the stop strings as a tuple.

    Raises:
        ValueError: one is empty, or no text.
    """
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"stop: expected a text or a list of texts, none of them empty, got {stop!r}")
    return tuple(stops)


class StopFilter:
    """Lets text through up to the first stop string, and holds back what may become one.

    The stop string that is complete first wins, however the text is cut into pieces.

    Args:
        stops: strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]):
        self.is_stopped = False
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> str:
        """Returns the text that has become certain with one more piece."""
        text = self._held + text
        starts = [(text.find(stop), stop) for stop in self._stops]
        found = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)[1]]
        num_sure = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[num_sure:]
        return text[:num_sure]

    def flush(self) -> str:
        """Returns what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of a stop string."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
