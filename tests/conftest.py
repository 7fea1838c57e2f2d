"""Strict JAX for every test: warnings are errors, rank promotion raises, two CPU devices."""

import gc
import os
import tempfile

import jax

# Nearly all of a test's time goes into compiling, which takes a third less so; the programs that tests start
# inherit it, and a run's processes share what they compiled, as a user's do. The folder is new in each run
# and gone after it: no test depends on what an earlier run compiled, or leaves programs in the home folder.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="pjax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Whoever reads a program while another process writes it compiles it anew.
os.environ["PYTHONWARNINGS"] = "ignore:Error reading persistent compilation cache entry"
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_threefry_partitionable", True)
# Tracing makes many objects that are kept: to look for garbage after every 700 takes a tenth of the time.
gc.set_threshold(100_000, 50, 50)

LONGEST = ("run", "executor", "ops", "packed", "perplexity", "training", "imported", "modes", "generate")
"""Files that take longest, which begin first, so that no process is left with one of them at the end."""


def pytest_collection_modifyitems(items):
    order = {f"{name}_test.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
