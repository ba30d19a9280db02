"""The option --way of this folder's programs."""

import argparse


def parse_way() -> str:
    """Return the way that the command line names; "auto" imports ``collectives.auto``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("backend", "auto", "hook", "gloo"), default="backend")
    way = parser.parse_args().way
    if way == "auto":
        import collectives.auto  # noqa: F401
    return way
