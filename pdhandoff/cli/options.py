"""What several subcommands take."""

from __future__ import annotations

import argparse
import json

__all__ = ["mover_option"]


def mover_option(text: str) -> tuple[str, object]:
    """An option of a mover, for argparse: KEY=VALUE, where the value is JSON, or text if it is not.

    Raises:
        argparse.ArgumentTypeError: it has no key, or no value.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is no option such as protocol=tcp")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
