"""What several subcommands take."""

from __future__ import annotations

import argparse

import pytest

from pdhandoff.cli.options import mover_option


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
