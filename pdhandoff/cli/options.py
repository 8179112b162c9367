"""What several subcommands take."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["byte_count", "mover_option", "read_secret", "seconds"]

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_MOST_SECONDS = 7 * 86400


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


def read_secret(path: Path | None) -> bytes | None:
    """What a file holds, without white space around it. Raises LocalError when it cannot be read, or holds nothing."""
    if path is None:
        return None
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise LocalError(ErrorCode.CONFIG, f"the secret cannot be read from {path}: {error.strerror}") from error
    if not secret:
        raise LocalError(ErrorCode.CONFIG, f"{path} is empty: write the secret into it")
    return secret


def byte_count(text: str) -> int:
    """Bytes, for argparse: 4096, 512M, 16G, 16GiB; powers of 1024. Raises argparse.ArgumentTypeError."""
    number = text.upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:].isalpha() else ""
    digits = number.removesuffix(unit)
    if (
        unit not in _UNITS
        or not (digits.isascii() and digits.isdigit())
        or not 0 < int(digits) << _UNITS[unit] < 1 << 63
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes such as 512M or 16G")
    return int(digits) << _UNITS[unit]


def seconds(text: str) -> float:
    """Seconds, more than 0 and at most a week, for argparse. Raises argparse.ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds such as 30")
    return value
