"""Keeps compiled programs between processes, in JAX's persistent compilation cache."""

import os
import platform
from pathlib import Path

import jax

from pjax.workdir import fingerprint


def keep_compiled() -> None:
    """Lets this process read its compiled programs from the user's cache folder, and keep them there.

    Changes nothing if the process has a cache of JAX's already (`jax_compilation_cache_dir`), wants none
    (`JAX_ENABLE_COMPILATION_CACHE=0`), or the folder cannot be used. JAX has one cache for the whole process:
    its other programs are kept there, too. The folder may be deleted at any time.
    """
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] is not None or not settings["jax_enable_compilation_cache"]:
        return
    folder = cache_folder()
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # Of a model's first token, half the time goes into programs that compile in less than JAX's second.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def cache_folder() -> Path | None:
    """The folder, made if it is not there: `$XDG_CACHE_HOME/pjax/compiled-CPU` or `~/.cache/...`.

    It is no workdir, and nobody else's: what lies in it is run, while a workdir can be taken over from
    others. Each kind of CPU has its own, since a program may use instructions that another one lacks.

    Returns:
        None if it cannot be made or written to, or belongs to another user.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache) / "pjax" / f"compiled-{fingerprint(_cpu())[:16]}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_own = folder.stat().st_uid == os.getuid()
    except OSError:
        return None
    return folder if is_own and os.access(folder, os.R_OK | os.W_OK | os.X_OK) else None


def _cpu() -> list[str]:
    """What kind of CPU this is, with what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return [platform.machine(), *sorted(kinds)]
