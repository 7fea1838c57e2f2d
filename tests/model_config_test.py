"""What a decoder is: activations by their names, and what a config fills in."""

import dataclasses

import pytest

from pjax.model_config import Activation
from tests.tiny_model import tiny_config


@pytest.mark.parametrize(
    "text, expected, is_sparse",
    [
        ("relu", ("relu", 0.0), True),
        ("relu2", ("relu2", 0.0), True),
        ("drelu", ("drelu", 0.0), True),
        ("fatrelu:0", ("fatrelu", 0.0), True),
        ("fatrelu:1e-2", ("fatrelu", 0.01), True),
        ("silu", ("silu", 0.0), False),
        ("gelu", ("gelu", 0.0), False),
        ("gelu_pytorch_tanh", ("gelu_pytorch_tanh", 0.0), False),
    ],
)
def test_activations_by_name(text, expected, is_sparse):
    activation = Activation.parse(text)
    assert activation == expected
    assert activation.is_sparse == is_sparse == tiny_config(activation=text).is_sparse


@pytest.mark.parametrize(
    "text, message",
    [
        ("swish", "expected one of relu, .*, got 'swish'"),
        ("gelu_new", "expected one of relu, .*, got 'gelu_new'"),
        ("RELU", "expected one of relu, .*, got 'RELU'"),
        ("", "expected one of relu, .*, got ''"),
        (None, "expected one of relu, .*, got None"),
        ("fatrelu", "expected a threshold for .fatrelu. alone.* got 'fatrelu'"),
        ("relu:0.1", "expected a threshold for .fatrelu. alone.* got 'relu:0.1'"),
        ("relu:", "expected a threshold for .fatrelu. alone.* got 'relu:'"),
        ("fatrelu:", "expected a threshold of at least 0.* got 'fatrelu:'"),
        ("fatrelu:-0.1", "expected a threshold of at least 0.* got 'fatrelu:-0.1'"),
        ("fatrelu:nan", "expected a threshold of at least 0.* got 'fatrelu:nan'"),
        ("fatrelu:inf", "expected a threshold of at least 0.* got 'fatrelu:inf'"),
        ("fatrelu:0.1:2", "expected a threshold of at least 0.* got 'fatrelu:0.1:2'"),
    ],
)
def test_wrong_activations_say_what_is_expected(text, message):
    with pytest.raises(ValueError, match="^activation: " + message):
        Activation.parse(text)


def test_a_config_fills_in_and_stays_as_it_is():
    config = tiny_config()
    assert config.embed_width == config.model and config.layers == len(config.neurons) == 2
    assert config.replace(embed_width=8).embed_width == 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.heads = 2  # type: ignore[misc]
