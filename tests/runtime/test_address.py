"""Addresses as people write them, and listening on them."""

from __future__ import annotations

import socket

import pytest

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.runtime.address import Address, listen, parse_address, resolve, resolve_numeric


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:5556", "127.0.0.1", 5556),
        ("decode-7:5556", "decode-7", 5556),
        ("[::1]:5556", "::1", 5556),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("[::]:0", "::", 0),
        (":65535", "", 65535),
    ],
)
def test_an_address_is_read_and_shown(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert address == Address(host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        "host:-1",
        "host:65536",
        "host:x",
        "::1:5556",
        "host:\N{ARABIC-INDIC DIGIT ONE}",
        "h:" + "9" * 5000,
    ],
)
def test_what_is_no_address_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(LocalError, match="write host:port") as caught:
        parse_address(text)
    assert caught.value.code == ErrorCode.CONFIG


@pytest.mark.parametrize("text", ["127.0.0.1:0", "[::1]:0", "[::]:0", ":0"])
def test_listening_takes_any_free_port(text: str) -> None:
    with listen(parse_address(text)) as sock:
        assert sock.getsockname()[1] > 0


@pytest.mark.parametrize("text", ["[::]:0", ":0"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_all_addresses_means_both_families(text: str, host: str) -> None:
    with listen(parse_address(text)) as sock, socket.create_connection((host, sock.getsockname()[1]), 5):
        pass


def test_a_port_that_is_taken_is_named() -> None:
    with listen(Address("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(LocalError, match=f"127.0.0.1:{port}.*another port") as caught:
            listen(Address("127.0.0.1", port))
    assert caught.value.code == ErrorCode.CONFIG


@pytest.mark.parametrize("host", ["..", "a" * 300, "no-such-host.invalid"])
def test_listening_on_an_unknown_host_names_it(host: str) -> None:
    with pytest.raises(LocalError, match="cannot listen on") as caught:
        listen(Address(host, 0))
    assert caught.value.code == ErrorCode.CONFIG


def test_a_host_that_is_no_name_cannot_be_resolved() -> None:
    with pytest.raises(LocalError, match="cannot resolve") as caught:
        resolve(Address("..", 1))
    assert caught.value.code == ErrorCode.LINK_LOST


def test_numbers_are_resolved_without_asking_anybody() -> None:
    assert resolve_numeric(Address("127.0.0.1", 5))[0] == (socket.AF_INET, ("127.0.0.1", 5))
    assert resolve_numeric(Address("::1", 5))[0][0] == socket.AF_INET6
    assert resolve_numeric(Address("localhost", 5)) == []
