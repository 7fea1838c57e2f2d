"""Strict JAX for every test: warnings are errors, rank promotion raises, two CPU devices."""

import jax

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_threefry_partitionable", True)
