"""Both ways against transformers: it writes and we read, we write and it reads; the logits agree."""

import numpy as np
import pytest

import pjax
from tests.cases_test import decode

torch = pytest.importorskip("torch", reason="transformers runs its models on torch")
transformers = pytest.importorskip("transformers", reason="the other implementation of every family")

pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
LLAMA = SIZES | dict(
    num_key_value_heads=2, intermediate_size=48, hidden_act="relu", tie_word_embeddings=False
)
OPT = SIZES | dict(ffn_dim=48, word_embed_proj_dim=32)
FALCON = SIZES | dict(ffn_hidden_size=48, activation="relu", new_decoder_architecture=False)
GROUPED = FALCON | dict(new_decoder_architecture=True, num_kv_heads=2)
RW = FALCON | dict(multi_query=False, parallel_attn=False, alibi=True, bias=True)


def rope(kind, **parameters):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=1e4) | parameters)


def stretched(kind, **parameters):
    return rope(kind, factor=4.0, original_max_position_embeddings=16, **parameters)


MODELS = {
    "opt": ("OPT", OPT),
    "opt, no biases": ("OPT", OPT | dict(enable_bias=False)),
    "opt, untied": ("OPT", OPT | dict(tie_word_embeddings=False)),
    "opt-350m": ("OPT", OPT | dict(word_embed_proj_dim=16, do_layer_norm_before=False)),
    "falcon-7b": ("Falcon", FALCON | dict(multi_query=True)),
    "falcon-7b, biases": ("Falcon", FALCON | dict(multi_query=True, bias=True)),
    "falcon-40b": ("Falcon", GROUPED),
    "falcon-11b": ("Falcon", GROUPED | dict(num_ln_in_parallel_attn=1)),
    "falcon-rw": ("Falcon", RW),
    "falcon-rw, 6 heads": ("Falcon", RW | dict(num_attention_heads=6, hidden_size=48)),
    "llama": ("Llama", LLAMA),
    "llama, biases": ("Llama", LLAMA | dict(attention_bias=True, mlp_bias=True)),
    "llama, head_dim": ("Llama", LLAMA | dict(head_dim=16)),
    "llama, tied": ("Llama", LLAMA | dict(tie_word_embeddings=True, num_key_value_heads=4)),
    "llama, silu": ("Llama", LLAMA | dict(hidden_act="silu")),
    "llama, linear": ("Llama", LLAMA | rope("linear", factor=4.0)),
    "llama, dynamic": ("Llama", LLAMA | rope("dynamic", factor=4.0)),
    "llama, llama3": ("Llama", LLAMA | stretched("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama, yarn": ("Llama", LLAMA | stretched("yarn")),
    "llama, yarn, more": (
        "Llama",
        LLAMA | stretched("yarn", beta_fast=8.0, beta_slow=0.5, attention_factor=0.8),
    ),
    "mistral": ("Mistral", LLAMA | dict(sliding_window=6)),
    "mistral, no window": ("Mistral", LLAMA | dict(sliding_window=None)),
    "nemotron": ("Nemotron", LLAMA | dict(hidden_act="relu2")),
    "nemotron, all rotary": ("Nemotron", LLAMA | rope("default", partial_rotary_factor=1.0)),
    "arcee": ("Arcee", LLAMA | dict(hidden_act="relu2")),
}


def random_model(kind, values):
    """A float32 model whose norms and biases are random too: one that is dropped or swapped shows."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**values)
    # Not "eager", under which transformers 5.24 adds Falcon's ALiBi twice.
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.3
            centre = 1.0 if parameter.ndim == 1 and parameter.mean() == 1 else 0.0
            parameter.normal_(centre, scale)
    return model


def their_logits(model, ids):
    with torch.no_grad():
        return model(torch.from_numpy(ids).long(), use_cache=False).logits.numpy()


@pytest.mark.parametrize("name", MODELS)
def test_both_ways(name, tmp_path):
    theirs = random_model(*MODELS[name])
    theirs.save_pretrained(tmp_path / "theirs")
    ours = pjax.load_model(tmp_path / "theirs")
    ids = np.random.default_rng(0).integers(3, ours.config.vocab, (2, 20)).astype(np.int32)
    expected = their_logits(theirs, ids)
    logits, _, new_ids = decode(ours, ids, 8)
    # transformers rounds ALiBi's distances to bfloat16.
    tolerance = 5e-3 if ours.config.alibi else 2e-5
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)
    text = np.concatenate([ids, new_ids], 1)
    best = their_logits(theirs, text)[:, 19:-1]
    chosen = np.take_along_axis(best, new_ids[..., None], -1)[..., 0]
    # The best id at every step, or one as good within the tolerance.
    np.testing.assert_allclose(chosen, best.max(-1), rtol=0, atol=2 * tolerance)

    pjax.save_model(ours, tmp_path / "ours")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="sdpa", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    np.testing.assert_allclose(their_logits(again, ids), expected, rtol=0, atol=2e-6)
