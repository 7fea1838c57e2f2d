"""Strict JAX for every test: warnings are errors, rank promotion raises, two CPU devices."""

import os

import jax

# Nearly all of a test's time goes into compiling, which takes a third less so; the programs that tests start
# inherit it.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# No test depends on what an earlier one compiled, or leaves programs in the home folder.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
jax.config.update("jax_enable_compilation_cache", False)
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_threefry_partitionable", True)
