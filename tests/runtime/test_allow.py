"""Allow-lists: every spelling of an address that means another one, and every entry that would mean nothing."""

from __future__ import annotations

import pytest

from pdhandoff import ErrorCode, HandoffFailed, HandoffId, LocalError
from pdhandoff.runtime.address import parse_address
from pdhandoff.runtime.allow import Destinations, Sources
from support.engines import DEADLINE_S, Pair, until
from support.raw_peer import RawPeer, producer_welcome

LIST = [
    "decode-7",
    "Decode-8.Cluster.Example.:5556",
    "10.1.0.0/16",
    "10.2.0.7:5556",
    "2001:db8::/32",
    "[2001:db9::7]:5556",
    "[2001:dba::/48]",
    "::ffff:192.0.2.0/120",
    "172.16.0.0/12:5557",
    "fe80::/10",
]


@pytest.mark.parametrize(
    "text",
    [
        "decode-7:1",
        "DECODE-7:5556",
        "decode-7.:5556",
        "decode-8.cluster.example:5556",
        "decode-8.cluster.example.:5556",
        "10.1.255.255:9",
        "[::ffff:10.1.2.3]:9",
        "10.2.0.7:5556",
        "[::ffff:10.2.0.7]:5556",
        "[2001:db8:1::1]:9",
        "[2001:DB8:1:0:0:0:0:1]:9",
        "[2001:db9::7]:5556",
        "[2001:dba::9]:1",
        "192.0.2.200:1",
        "[::ffff:c000:2c8]:1",
        "172.16.9.9:5557",
        "[fe80::1%eth0]:5556",
    ],
)
def test_a_destination_on_the_list_is_allowed(text: str) -> None:
    Destinations(LIST).check(parse_address(text))


@pytest.mark.parametrize(
    "text",
    [
        "169.254.169.254:80",
        "[::ffff:169.254.169.254]:80",
        "[::169.254.169.254]:80",
        "[64:ff9b::a9fe:a9fe]:80",
        "2852039166:80",
        "0xa9fea9fe:80",
        "0251.0376.0251.0376:80",
        "169.16689662:80",
        "010.1.0.1:80",
        "\uff11\uff10.1.0.1:80",
        "10.1.0.1.:80",
        "metadata.google.internal:80",
        "decode-70:5556",
        "decode-7.evil.example:5556",
        "evil.decode-7:5556",
        "decode-7..:5556",
        "decode-7\0.evil:5556",
        " decode-7:5556",
        "decode-8.cluster.example:5557",
        "10.2.0.7:5557",
        "[2001:db9::7]:5557",
        "172.16.9.9:5556",
        "localhost:5556",
        ":5556",
        "[::]:5556",
        "*:5556",
    ],
)
def test_any_other_destination_is_refused_by_name(text: str) -> None:
    address = parse_address(text)
    with pytest.raises(LocalError) as caught:
        Destinations(LIST).check(address)
    assert caught.value.code == ErrorCode.NOT_ALLOWED
    assert str(address) in caught.value.reason


def test_all_of_one_family_is_not_all_of_the_other() -> None:
    for entry, text in (("::/0", "127.0.0.1:1"), ("::/0", "[::ffff:127.0.0.1]:1"), ("0.0.0.0/0", "[::1]:1")):
        with pytest.raises(LocalError):
            Destinations([entry]).check(parse_address(text))
    Destinations(["::ffff:0:0/96"]).check(parse_address("127.0.0.1:1"))
    assert Sources(["::ffff:127.0.0.1"]).allows("127.0.0.1")


@pytest.mark.parametrize(
    "entry",
    [
        *("", "*", "*.example", "a b", "decode:0", "decode:65536", "decode:port", "decode:", "[decode]:5"),
        *("10.1.2.3/16", "2130706433", "0x7f.1", "decode.7", "-x", "x..y", "[::1", "300.1.1.1", "2001:db8::7:99999"),
        *("::1]:5", "\u0430bc"),
    ],
)
def test_an_entry_that_means_nothing_is_refused_at_start(entry: str) -> None:
    with pytest.raises(LocalError, match="cannot stand on an allow-list") as caught:
        Destinations([entry])
    assert caught.value.code == ErrorCode.CONFIG
    assert repr(entry) in caught.value.reason
    with pytest.raises(LocalError, match="cannot stand"):
        Sources([entry])


@pytest.mark.parametrize("kind", [Sources, Destinations])
def test_one_string_is_no_list(kind: type[Sources | Destinations]) -> None:
    with pytest.raises(LocalError, match=r"write \['10.0.0.0/8'\]"):
        kind("10.0.0.0/8")


def test_sources_take_no_names_and_no_ports() -> None:
    for entry in ("decode-7", "10.0.0.1:5556", "[::1]"):
        with pytest.raises(LocalError, match="an address or a network"):
            Sources([entry])


def test_sources_see_through_wrapped_addresses() -> None:
    sources = Sources(["10.0.0.0/8", "fe80::/10"])
    assert sources.allows("10.9.9.9")
    assert sources.allows("::ffff:10.9.9.9")
    assert sources.allows("fe80::1%eth0")
    assert not sources.allows("11.0.0.1")
    assert not sources.allows("::ffff:11.0.0.1")
    assert not sources.allows("somebody")
    assert not Sources([]).allows("10.9.9.9")


@pytest.mark.parametrize("allow", [["10.0.0.0/8"], []])
def test_a_consumer_turns_away_who_is_not_on_its_list(allow: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with Pair(consumer={"allow": allow, "name": "telltale"}) as pair:
        outgoing = pair.offer(HandoffId.mint(), 5)
        with pytest.raises(HandoffFailed, match=r"127\.0\.0\.1 is not on the consumer's allow-list") as caught:
            outgoing.wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.NOT_ALLOWED
        assert not caught.value.retryable
        with RawPeer.dial(pair.consumer.address, producer_welcome(b"")) as peer:
            assert peer.wait_closed().code == ErrorCode.NOT_ALLOWED
            assert b"telltale" not in peer.heard
        assert pair.consumer._connections._all == {}
    assert "127.0.0.1 is not on the consumer's allow-list" in caplog.text


def test_lists_let_through_whom_they_name() -> None:
    with Pair(consumer={"allow": ["127.0.0.0/8"]}, producer={"allow": ["127.0.0.1"]}) as pair:
        pair.hand_off(1, 20)
        refused = pair.producer.offer("127.0.0.2:5556", HandoffId.mint(), prompt_tokens=5)
        request = pair.engine.request(2, 5)
        chunk = refused.push(request.tables, tokens=range(5))
        refused.commit()
        with pytest.raises(HandoffFailed) as caught:
            refused.wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.NOT_ALLOWED
        assert refused.source_free.is_set()
        until(chunk.source_free.is_set)
        pair.hand_off(3, 20)
        pair.check_clean()
