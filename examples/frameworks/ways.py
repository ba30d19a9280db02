"""The options of this folder's programs."""

import argparse


def parse_options(**choices: tuple) -> argparse.Namespace:
    """Return the command line's options; ``.way`` "auto" imports ``collectives.auto``.

    `choices`: of further options, the first one the default.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("backend", "auto", "hook", "gloo"), default="backend")
    for name, values in choices.items():
        parser.add_argument(f"--{name}", choices=values, default=values[0])
    options = parser.parse_args()
    if options.way == "auto":
        import collectives.auto  # noqa: F401
    return options
