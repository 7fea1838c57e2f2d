"""The lm-evaluation-harness with pjax among its models; it needs the extra `eval`.

    python -m pjax.evaluate --model pjax --model_args path=runs/quickstart,mode=predicted --tasks arc_easy

`path` is a prepared workdir, a model folder or a file, `mode` dense, exact or predicted; all other options
are those of `lm-eval`, which finds no models of other packages by itself.
"""

import sys

from pjax.cli import complain

_NAME = "pjax.evaluate"


def main() -> None:
    """Hands over to the harness; a fault of the user's is one line on stderr and exit code 2."""
    try:
        import pjax.harness  # noqa: F401  # registers it
    except ImportError as error:
        sys.exit(
            complain(_NAME, f"the lm-evaluation-harness cannot be used ({error}): pip install 'pjax[eval]'")
        )
    from lm_eval.__main__ import cli_evaluate  # type: ignore

    try:
        cli_evaluate()
    except (ValueError, OSError) as error:
        sys.exit(complain(_NAME, str(error)))


if __name__ == "__main__":
    main()
