"""What several subcommands take."""

from __future__ import annotations

import argparse

import pytest

from pdhandoff.cli.options import byte_count, mover_option, seconds


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("lanes=4", ("lanes", 4)),
        ("eager=true", ("eager", True)),
        ("protocol=tcp", ("protocol", "tcp")),
        ('ucx={"NET_DEVICES": "lo"}', ("ucx", {"NET_DEVICES": "lo"})),
        ("host=::1=", ("host", "::1=")),
        ("devices=", ("devices", "")),
    ],
)
def test_values_are_json_or_text(text: str, option: tuple[str, object]) -> None:
    assert mover_option(text) == option


@pytest.mark.parametrize("text", ["lanes", "=4", "a b=1", ""])
def test_an_option_without_a_name_or_a_value_says_what_one_looks_like(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="protocol=tcp"):
        mover_option(text)


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("1k", 1024), ("512M", 512 << 20), ("16GiB", 16 << 30), ("2TB", 2 << 40)]
)
def test_sizes_are_numbers_with_or_without_a_unit(text: str, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "G", "1X", "-1", "1.5G", "9" * 30, "9" * 18 + "T"])
def test_what_is_no_size_says_what_one_looks_like(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="512M"):
        byte_count(text)


def test_seconds_lie_between_nothing_and_a_week() -> None:
    assert seconds("0.5") == 0.5
    for text in ("0", "-1", "nan", "inf", "1e9", "soon"):
        with pytest.raises(argparse.ArgumentTypeError, match="no number of seconds"):
            seconds(text)
