"""TLS on the control link: who gets through, and what both ends are told when somebody does not."""

from __future__ import annotations

import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdhandoff import ErrorCode, HandoffFailed, HandoffId, Limits, LocalError, TlsConfig
from pdhandoff.protocol.codec import encode_message
from pdhandoff.protocol.link import Side
from pdhandoff.protocol.messages import Bye, Ping
from pdhandoff.runtime import tls as tls_module
from pdhandoff.runtime.channel import PlainChannel, TlsChannel
from pdhandoff.runtime.tls import Tls, failure_sentence
from support.certificates import EXPIRED, NOT_YET, Authority
from support.engines import DEADLINE_S, Pair, until
from support.raw_peer import listening

NONE: dict[str, Any] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def other(folder: Path) -> Authority:
    return Authority(folder, "other")


def offered(pair: Pair, address: str | None = None) -> HandoffFailed:
    """How an offer over a link that cannot be had ends."""
    outgoing = pair.producer.offer(address or pair.address, HandoffId.mint(), prompt_tokens=5)
    with pytest.raises(HandoffFailed) as caught:
        outgoing.wait(DEADLINE_S)
    assert outgoing.source_free.is_set()
    until(lambda: not pair.consumer._connections._all, "the consumer has let go of it")
    return caught.value


@pytest.mark.parametrize("secret", [None, b"secret"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_handoff_over_tls(
    authority: Authority, secret: bytes | None, version: ssl.TLSVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = tls_module._context

    def limited(protocol: int, config: TlsConfig) -> ssl.SSLContext:
        made = context(protocol, config)
        made.maximum_version = version
        return made

    monkeypatch.setattr(tls_module, "_context", limited)
    decode, prefill = authority.issue("decode"), authority.issue("prefill")
    with Pair(consumer={"tls": decode, "secret": secret}, producer={"tls": prefill, "secret": secret}) as pair:
        for tag in range(3):
            pair.hand_off(tag, 100, chunk=16)
        (connection,) = pair.producer._connections._all.values()
        assert isinstance(connection.channel, TlsChannel)
        assert connection.channel._object.version() == {771: "TLSv1.2", 772: "TLSv1.3"}[version]
        pair.check_clean()


def test_nothing_readable_travels_over_tls(authority: Authority) -> None:
    """A go-between sees records of TLS and nothing of what is in them."""
    heard = bytearray()
    consumer, producer = Tls(authority.issue("decode")), Tls(authority.issue("prefill"))
    near, far = TlsChannel(producer, Side.DIALLER, host="127.0.0.1"), TlsChannel(consumer, Side.LISTENER)
    said = b"the words of a link"
    data, got = near.send(said), b""
    while data:
        heard += data
        got += b"".join(far.receive(data).pieces)
        data = far.send(b"")
        heard += data
        assert near.receive(data).problem is None
        data = near.send(b"")
    assert got == said
    assert said not in heard


def test_names_let_in_whom_they_list(authority: Authority) -> None:
    decode = authority.issue("decode", "decode.example", names=("prefill.example", "spiffe://cluster/prefill"))
    named = authority.issue("one", "PREFILL.example", names=("decode.example",))
    by_uri = authority.issue("two", "spiffe://cluster/prefill", names=("decode.example",))
    stranger = authority.issue("three", "stranger.example", names=("decode.example",))
    for settings in (named, by_uri):
        with Pair(consumer={"tls": decode}, producer={"tls": settings}) as pair:
            pair.hand_off(1, 20)
    with Pair(consumer={"tls": decode}, producer={"tls": stranger}) as pair:
        error = offered(pair)
        assert error.code == ErrorCode.NOT_ALLOWED
        assert "the dialler's certificate is for stranger.example" in error.reason
        assert not error.retryable


def test_a_producer_names_its_consumers_too(authority: Authority) -> None:
    decode, prefill = authority.issue("decode"), authority.issue("prefill", names=("decode-7",))
    with Pair(consumer={"tls": decode}, producer={"tls": prefill}) as pair:
        error = offered(pair)
    assert error.code == ErrorCode.NOT_ALLOWED
    assert "the listener's certificate is for 127.0.0.1, decode" in error.reason


def test_without_names_the_dialled_host_has_to_be_on_the_certificate(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, prefill = authority.issue("decode", "localhost", "10.0.0.9"), authority.issue("prefill")
    with Pair(consumer={"tls": decode}, producer={"tls": prefill}) as pair:
        error = offered(pair)
        assert error.code == ErrorCode.AUTHENTICATION
        assert "127.0.0.1" in error.reason
        assert "carries the address as it is dialled" in error.reason
        found = [(socket.AF_INET, ("127.0.0.1", pair.consumer.address.port))]
        monkeypatch.setattr("pdhandoff.runtime.dialler.resolve", lambda _: found)
        for host in ("localhost", "LOCALHOST."):
            address = f"{host}:{pair.consumer.address.port}"
            outgoing = pair.producer.offer(address, HandoffId.mint(), prompt_tokens=5)
            until(lambda sent=outgoing: sent.offered)  # type: ignore[misc]
            outgoing.cancel()


def test_a_host_that_no_certificate_can_name_fails_its_handoff_only(authority: Authority) -> None:
    tls = authority.issue("both")
    with Pair(consumer={"tls": tls}, producer={"tls": tls}) as pair:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pdhandoff.runtime.dialler.resolve", lambda _: [(socket.AF_INET, ("127.0.0.1", 1))])
            error = offered(pair, f".{'x' * 80}:5556")
        assert error.code == ErrorCode.CONFIG
        assert "no certificate can be for the host" in error.reason
        pair.hand_off(1, 20)


@pytest.mark.parametrize(("consumer", "producer"), [(True, False), (False, True)])
def test_tls_on_one_side_only_is_told_to_both(
    authority: Authority, consumer: bool, producer: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tls = {"tls": authority.issue("both")}
    with Pair(consumer=tls if consumer else NONE, producer=tls if producer else NONE) as pair:
        error = offered(pair)
        assert error.code == ErrorCode.AUTHENTICATION
        assert "give TLS settings to both, or to neither" in error.reason
    (record,) = [record for record in caplog.records if "no link with 127.0.0.1" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert "give TLS settings to both" in record.getMessage()


def test_an_authority_that_the_other_side_does_not_know_is_told_to_both(
    authority: Authority, other: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    with Pair(consumer={"tls": authority.issue("decode")}, producer={"tls": other.issue("prefill")}) as pair:
        error = offered(pair)
        assert error.code == ErrorCode.AUTHENTICATION
        assert "the peer's certificate is refused" in error.reason
        assert "let an authority in the ca file sign it" in error.reason
        until(lambda: "give both sides the same ca file" in caplog.text)


def test_a_dialler_learns_why_its_certificate_is_refused(
    authority: Authority, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under TLS 1.3 the dialler's side of the handshake is complete before the listener looks at its certificate."""
    monkeypatch.setattr(tls_module, "_try_out", lambda *_: None)
    decode, old = authority.issue("decode"), authority.issue("old", days=EXPIRED)
    stranger = Authority(folder, "stranger").issue("prefill", trust=authority)
    cases = ((old, "it has expired", "certificate has expired"), (stranger, "the same ca file", "local issuer"))
    for settings, there, here in cases:
        with Pair(consumer={"tls": decode}, producer={"tls": settings}) as pair:
            error = offered(pair)
            assert error.code == ErrorCode.AUTHENTICATION
            assert "the peer refuses this side's certificate" in error.reason
            assert there in error.reason
            assert here in caplog.text


@pytest.mark.parametrize("reason", ["EXPIRED", "CLIENT"])
def test_a_consumer_whose_certificate_is_no_good_any_more_is_refused(
    authority: Authority, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_module, "_try_out", lambda *_: None)
    bad = authority.issue("old", days=EXPIRED) if reason == "EXPIRED" else authority.issue("c", client_only=True)
    with Pair(consumer={"tls": bad}, producer={"tls": authority.issue("prefill")}) as pair:
        error = offered(pair)
    assert error.code == ErrorCode.AUTHENTICATION
    assert ("has expired; make a new one" if reason == "EXPIRED" else "clients and servers both") in error.reason


def test_a_dialler_without_a_certificate_gets_nothing(authority: Authority) -> None:
    decode = authority.issue("decode")
    anyone = ssl.create_default_context(cafile=decode.ca)
    with Pair(consumer={"tls": decode}) as pair:
        where = (pair.consumer.address.host, pair.consumer.address.port)
        with (
            socket.create_connection(where, DEADLINE_S) as sock,
            anyone.wrap_socket(sock, server_hostname="127.0.0.1") as wrapped,
            pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"),
        ):
            wrapped.recv(1 << 16)
        until(lambda: not pair.consumer._connections._all)


def test_old_versions_are_refused(authority: Authority) -> None:
    decode = authority.issue("decode")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(decode.ca)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with Pair(consumer={"tls": decode}) as pair:
        where = (pair.consumer.address.host, pair.consumer.address.port)
        with socket.create_connection(where, DEADLINE_S) as sock, pytest.raises(ssl.SSLError):
            old.wrap_socket(sock, server_hostname="127.0.0.1")
        until(lambda: not pair.consumer._connections._all)


@pytest.mark.parametrize("trickle", [False, True])
def test_a_tls_handshake_has_a_deadline(authority: Authority, trickle: bool) -> None:
    """Also when the peer keeps sending a little: the time runs from the start."""
    decode = authority.issue("decode")
    hello = TlsChannel(Tls(decode), Side.DIALLER, host="127.0.0.1").send(b"")
    with Pair(consumer={"tls": decode}, limits=Limits(handshake_s=0.2)) as pair:
        where = (pair.consumer.address.host, pair.consumer.address.port)
        with socket.create_connection(where, DEADLINE_S) as sock:
            sock.settimeout(0.01 if trickle else DEADLINE_S)
            heard: bytes | None = None
            for byte in hello[:-1] if trickle else hello[:5]:
                try:
                    sock.sendall(bytes([byte]))
                    heard = sock.recv(1 << 16) if trickle else None
                except TimeoutError:
                    continue
                except ConnectionError:
                    heard = b""
                if heard == b"":
                    break
            if not trickle:
                heard = sock.recv(1 << 16)
            assert heard == b""
        until(lambda: not pair.consumer._connections._all)


def test_a_consumer_that_never_answers_the_handshake_is_given_up(authority: Authority) -> None:
    tls = authority.issue("both")
    with Pair(producer={"tls": tls}, limits=Limits(handshake_s=0.05)) as pair, listening() as silent:
        error = offered(pair, f"127.0.0.1:{silent.getsockname()[1]}")
    assert error.code == ErrorCode.LIVENESS


def test_a_dialler_says_nothing_to_a_listener_without_tls(authority: Authority) -> None:
    """Whatever the other side says first: the HELLO stays here."""
    tls = authority.issue("both")
    with Pair(producer={"tls": tls, "name": "telltale"}) as pair, listening() as listener:
        outgoing = pair.producer.offer(f"127.0.0.1:{listener.getsockname()[1]}", HandoffId.mint(), prompt_tokens=5)
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(DEADLINE_S)
            heard = sock.recv(1 << 16)
            sock.sendall(encode_message(Bye(code=ErrorCode.BUSY, reason="go away")))
            while data := sock.recv(1 << 16):
                heard += data
        assert heard[0] == 0x16
        assert b"pdhandoff" not in heard
        with pytest.raises(HandoffFailed, match="it says: 'go away'") as caught:
            outgoing.wait(DEADLINE_S)
        assert caught.value.code == ErrorCode.AUTHENTICATION


@pytest.mark.parametrize("what", ["ca", "certificate", "key"])
def test_a_file_that_is_missing_or_garbage_is_named(authority: Authority, folder: Path, what: str) -> None:
    good = authority.issue("good")
    gone, garbage = str(folder / "no-such-file.pem"), folder / "garbage.pem"
    garbage.write_text("no certificate")
    with pytest.raises(LocalError, match=rf"TlsConfig\.{what} names, .*no-such-file\.pem: No such file") as caught:
        Tls(msgspec.structs.replace(good, **{what: gone}))
    assert caught.value.code == ErrorCode.CONFIG
    with pytest.raises(LocalError, match=r"garbage\.pem") as caught:
        Tls(msgspec.structs.replace(good, **{what: str(garbage)}))
    assert caught.value.code == ErrorCode.CONFIG


def test_settings_that_every_peer_would_refuse_fail_at_start(authority: Authority, other: Authority) -> None:
    good = authority.issue("good")
    bad: dict[str, TlsConfig] = {
        "certificate has expired; make a new one": authority.issue("old", days=EXPIRED),
        "not yet valid; look at the clocks": authority.issue("early", days=NOT_YET),
        "let an authority in the ca file sign it": other.issue("foreign", trust=authority),
        "good for clients and servers both": authority.issue("client", client_only=True),
        "KEY_VALUES_MISMATCH": msgspec.structs.replace(good, key=authority.issue("another").key),
        "without a pass phrase": authority.issue("locked", password=b"phrase"),
        "names is empty": msgspec.structs.replace(good, names=()),
    }
    for words, settings in bad.items():
        with pytest.raises(LocalError) as caught:
            Tls(settings)
        assert words in caught.value.reason
        assert caught.value.code == ErrorCode.CONFIG


def test_a_sentence_for_every_failure() -> None:
    def failure(reason: str) -> ssl.SSLError:
        error = ssl.SSLError(1, f"[SSL: {reason}]")
        error.reason = reason
        return error

    assert "has expired" in failure_sentence(failure("SSLV3_ALERT_CERTIFICATE_EXPIRED"))
    assert "has expired" in failure_sentence(failure("SSL/TLS_ALERT_CERTIFICATE_EXPIRED"))
    assert "no TLS version in common" in failure_sentence(failure("TLSV1_ALERT_PROTOCOL_VERSION"))
    assert failure_sentence(failure("SOMETHING_NEW")) == "TLS failed: SOMETHING_NEW"


def test_garbage_inside_tls_ends_that_connection_only(authority: Authority) -> None:
    tls = authority.issue("both")
    with Pair(consumer={"tls": tls}, producer={"tls": tls}) as pair:
        pair.hand_off(1, 20)
        where = (pair.consumer.address.host, pair.consumer.address.port)
        for garbage in (b"\x16\x03\x01\xff\xff" + b"x" * 4096, b"\x17\x03\x03\x00\x01x", b"\x16" * 100):
            with socket.create_connection(where, DEADLINE_S) as sock:
                sock.settimeout(DEADLINE_S)
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                try:
                    while sock.recv(4096):
                        pass
                except ConnectionError:
                    pass
        until(lambda: len(pair.consumer._connections._all) == 1)
        pair.hand_off(2, 20)


def test_a_plain_channel_hands_everything_on() -> None:
    channel = PlainChannel()
    frame = encode_message(Ping(number=1))
    assert channel.receive(frame) == ([frame], None)
    assert channel.receive(b"\x16\x03") == ([b"\x16\x03"], None), "later bytes may be anything"
    assert channel.receive(b"") == ([b""], None)
    assert channel.send(frame) == frame
