"""Bytes and orders that look like chance and are the same in every run."""

from __future__ import annotations

import random

__all__ = ["noise"]


def noise(seed: int) -> random.Random:
    """A generator that nobody else shares."""
    return random.Random(seed)  # noqa: S311 - test data, no secrets
