"""What an operator is given that does not fit: the error names the argument, and what it must be."""

import dataclasses

import jax.numpy as jnp
import pytest

from pjax import ops
from tests.ops_test import make_ffn, make_tokens, sparse

ERRORS = {
    "activation.*'silu'.*dense": lambda f, x, m: ops.sparse_ffn(x, f, m, activation="silu"),
    "activation.*rectifies gate and up": lambda f, x, m: sparse(
        x, dataclasses.replace(f, gate=None, gate_bias=None), m, activation="drelu"
    ),
    "activation.*threshold for .fatrelu": lambda f, x, m: sparse(x, f, m, activation="fatrelu"),
    "activation.*at least 0.*fatrelu:-1": lambda f, x, m: sparse(x, f, m, activation="fatrelu:-1"),
    "activation.*'swish'": lambda f, x, m: ops.dense_ffn(x, f, activation="swish"),
    "CUDA": lambda f, x, m: sparse(x, f, m, "cuda"),
    "implementation.*'fast'": lambda f, x, m: sparse(x, f, m, "fast"),
    r"^x: .*in = 7, got \[2, 6\]": lambda f, x, m: sparse(x[:, :6], f, m),
    r"^x: .*got \[1, 2, 7\]": lambda f, x, m: sparse(x[None], f, m),
    "^x: .*floating": lambda f, x, m: sparse(x.astype(jnp.int32), f, m),
    r"^active_mask: .*\[2, 33\], got \[2, 32\]": lambda f, x, m: sparse(x, f, m[:, :32]),
    "^active_mask: expected bool, got float32": lambda f, x, m: sparse(x, f, m.astype(jnp.float32)),
    r"^ffn.down: .*\[33, 7\].*got \[33, 6\]": lambda f, x, m: sparse(
        x, dataclasses.replace(f, down=f.down[:, :6]), m
    ),
    "^ffn.gate: expected float32.*bfloat16": lambda f, x, m: sparse(
        x, dataclasses.replace(f, gate=f.gate.astype(jnp.bfloat16)), m
    ),
    "^ffn.up: .*floating": lambda f, x, m: sparse(x, dataclasses.replace(f, up=f.up.astype(jnp.int8)), m),
    r"^ffn.up_bias: .*\[33\]": lambda f, x, m: sparse(x, dataclasses.replace(f, up_bias=f.up_bias[:5]), m),
    "^ffn.gate_bias: expected None": lambda f, x, m: sparse(x, dataclasses.replace(f, gate=None), m),
    r"^weight: .*\[out, in\]": lambda f, x, m: ops.matvec(x, f.up[0]),
    r"^bias: .*\[33\], got \[3\]": lambda f, x, m: ops.matvec(x, f.up, jnp.zeros(3)),
    "^weights: .*at least one": lambda f, x, m: ops.matvecs(x, [], []),
    "^biases: expected 2.*got 1": lambda f, x, m: ops.matvecs(x, [f.up, f.up], [None]),
    r"^x: .*in = 6, got \[2, 7\]": lambda f, x, m: ops.matvecs(x, [f.up, f.up[:, :6]], [None, None]),
    "^x: .*1, 2 or 4 bytes": lambda f, x, m: ops.stream_sum(jnp.zeros(3, jnp.complex64)),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument(message):
    x, mask = make_tokens(2, 33, 7, "random")
    with pytest.raises(ValueError, match=message):
        ERRORS[message](make_ffn(33, 7), x, mask)
