"""Where texts are cut into words: as the models' own files say, and by hand where no library has the rule."""

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from pjax.formats.tokenizer.pretokenizers import PRE_TOKENIZERS

DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
FALCON = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated"),
    ]
)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        ("smollm", DIGITS),
        ("starcoder", DIGITS),
        ("falcon", FALCON),
    ],
)
def test_words_are_those_of_the_model_s_own_file(name, expected):
    """The model's tokenizer.json names pre-tokenizers that the library has; they cut in the same places."""
    text = "I'll say: it's 000 or (1984)!  \n\n x=0.5;  naïve façade 日本語 ½ ... end \n"
    words = [word for word, _ in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)]
    assert words == [word for word, _ in expected.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    "name, words",
    [
        ("llama-bpe", ["I", "'LL", " it", "'s", " ", "123", "45", "\n\n", " x", "($", "a", "_b", ")"]),
        ("qwen2", ["I", "'LL", " it", "'s", " ", *"12345", "\n\n", " x", "($", "a", "_b", ")"]),
        ("gpt-4o", ["I'LL", " it's", " ", "123", "45", "\n\n", " x", "($", "a", "_b", ")"]),
        ("deepseek-coder", ["I", "'", "LL", " it", "'", "s", " ", *"12345", *"\n\n", " x", "(", *"$a_b)"]),
    ],
)
def test_words_by_hand(name, words):
    """Contractions, digits, ends of lines and signs, where the rules differ."""
    found = PRE_TOKENIZERS[name].build().pre_tokenize_str("I'LL it's 12345\n\n x($a_b)")
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert [word for word, _ in found] == [spelled.pre_tokenize_str(word)[0][0] for word in words]
