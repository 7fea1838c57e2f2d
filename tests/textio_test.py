"""Stop strings against a search of the whole text, whatever the pieces; and every form of prompt."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pjax.textio import StopFilter, check_stop, encode_prompts, next_bucket, pad_prompts
from tests.tiny_model import tiny_config

CONFIG = tiny_config(vocab=100, context=8, bos_id=1)


class Letters:
    """Encodes a text as the numbers of its letters, with or without a BOS id."""

    def __init__(self, bos: list[int]):
        self.bos = bos

    def encode(self, text):
        return [*self.bos, *(ord(c) - ord("a") for c in text)]


def filtered(pieces, stops):
    """(what comes out of a StopFilter, joined; whether it stopped)."""
    stop_filter, out = StopFilter(stops), ""
    for piece in pieces:
        out += stop_filter.push(piece)
        if stop_filter.is_stopped:
            return out, True
    return out + stop_filter.flush(), False


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4)))
def test_stops_where_the_first_stop_string_is_complete(pieces, stops):
    text = "".join(pieces)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = text
    if ends:
        completed = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        expected = text[: ends[0] - len(completed)]
    assert filtered(pieces, stops) == (expected, bool(ends))


def test_only_a_possible_beginning_is_held_back():
    stop_filter = StopFilter(["END", "</s>"])
    pieces = [stop_filter.push(piece) for piece in ("good E", "N", "ergy <", "/", "b", "</s", "EN", "DX")]
    assert pieces == ["good ", "", "ENergy ", "", "</b", "", "</s", ""]
    assert stop_filter.is_stopped and stop_filter.flush() == ""


def test_stops_match_any_characters():
    assert filtered(["日", "本語", "です"], ["語で"]) == ("日本", True)


@pytest.mark.parametrize("stop, expected", [("x", ("x",)), (["a", "b"], ("a", "b")), ((), ())])
def test_forms_of_stop(stop, expected):
    assert check_stop(stop) == expected


@pytest.mark.parametrize("stop", ["", ["a", ""], [1], 5, None, {"a"}])
def test_wrong_stops_are_refused(stop):
    with pytest.raises(ValueError, match="^stop: expected"):
        check_stop(stop)


@pytest.mark.parametrize(
    "prompts, ids, is_single",
    [
        ("abc", [[9, 0, 1, 2]], True),
        (["abc"], [[9, 0, 1, 2]], False),
        (["a", [3, 4]], [[9, 0], [3, 4]], False),
        ([3, 4], [[3, 4]], True),
        ((3, np.int32(4)), [[3, 4]], True),
        ([[3, 4], (5,)], [[3, 4], [5]], False),
        (np.array([3, 4]), [[3, 4]], True),
        (np.array([[3, 4], [5, 6]]), [[3, 4], [5, 6]], False),
        ([np.array([3, 4])], [[3, 4]], False),
        ("", [[9]], True),
        ([[], "a"], [[1], [9, 0]], False),
    ],
)
def test_forms_of_prompts(prompts, ids, is_single):
    assert encode_prompts(prompts, Letters([9]), CONFIG) == (ids, is_single)


def test_an_empty_text_begins_with_the_models_bos_if_the_tokenizer_has_none():
    assert encode_prompts("", Letters([]), CONFIG) == ([[1]], True)


@pytest.mark.parametrize("prompts", ["", [""], [[]]])
def test_an_empty_prompt_without_bos_is_refused(prompts):
    with pytest.raises(ValueError, match="prompt 0 is empty and the model has no BOS id"):
        encode_prompts(prompts, Letters([]), tiny_config(bos_id=None))


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([], "expected a text, its token ids, or a list"),
        (None, "expected a text, its token ids, or a list"),
        (7, "expected a text, its token ids, or a list"),
        (b"abc", "expected a text, its token ids, or a list"),
        ([1, [2]], "expected a text or a list of ids as prompt 0, got 1"),
        ([[2], b"a"], "expected a text or a list of ids as prompt 1"),
        ([5, 100], "from 0 to 99, got 100 at position 1 of prompt 0"),
        ([[1], [2, -1]], "got -1 at position 1 of prompt 1"),
        ([True], "got True at position 0"),
        ([1.0], "got 1.0 at position 0"),
        ([[1, "2"]], "got '2' at position 1"),
        ([[1, None]], "got None at position 1"),
        ([1] * 9, "9 tokens, expected at most the model's context of 8"),
        (["a", "abcdefghi"], "prompt 1 has 9 tokens, expected at most the model's context of 8"),
    ],
)
def test_wrong_prompts_are_refused(prompts, message):
    with pytest.raises(ValueError, match="^prompts: ") as error:
        encode_prompts(prompts, Letters([]), CONFIG)
    assert message in str(error.value)


def test_a_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="prompt 1 is a text, but there is no tokenizer"):
        encode_prompts([[1], "a"], None, CONFIG)


def test_prompts_are_padded_on_their_right():
    ids, lengths = pad_prompts([[5, 6, 7], [8] * 17], context=100)
    assert ids.shape == (2, 32) and ids.dtype == np.int32 and lengths.tolist() == [3, 17]
    assert ids[0, :3].tolist() == [5, 6, 7] and ids[1, :17].tolist() == [8] * 17


@pytest.mark.parametrize(
    "longest, context, width", [(1, 100, 16), (16, 100, 16), (17, 100, 32), (33, 40, 40), (3, 8, 8)]
)
def test_buckets_of_prompts(longest, context, width):
    assert pad_prompts([[1] * longest], context)[0].shape == (1, width)


def test_buckets_double():
    assert [next_bucket(256, n) for n in (0, 1, 256, 257, 512, 513, 1025)] == [
        256, 256, 256, 512, 512, 1024, 2048,
    ]  # fmt: skip
