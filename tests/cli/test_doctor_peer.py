"""The doctor and a running consumer: who it is, whether a producer is let in, and what a refusal says."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdhandoff.cli.checks import Finding, Status
from pdhandoff.cli.checks.peer import PeerAsk, check_peer
from pdhandoff.cli.main import main
from pdhandoff.engines.loopback import create
from pdhandoff.ids import Incarnation
from pdhandoff.limits import DEFAULT_LIMITS
from pdhandoff.protocol.codec import encode_message
from pdhandoff.protocol.messages import AUTH_NONE, MAGIC, Bye, Hello, Welcome
from pdhandoff.runtime.consumer import Consumer
from support.engines import LAYOUT, until

SECRET = b"open sesame"

pytestmark = pytest.mark.slow


@contextmanager
def consumer(**options: Any) -> Iterator[Consumer]:
    mover = create()
    try:
        with Consumer(mover=mover, layout=LAYOUT, arena_bytes=1 << 20, **options) as running:
            yield running
    finally:
        mover.close()


@contextmanager
def listener(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something else that listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                sock, _ = server.accept()
            except OSError:
                return  # nobody came
            with sock:
                answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def look(address: object, **changes: Any) -> list[Finding]:
    plain: dict[str, Any] = {"mover": None, "options": {}, "secret": None, "within_s": 30.0}
    return list(check_peer(PeerAsk(address=str(address), **{**plain, **changes})))


def refused(address: object, **changes: Any) -> Finding:
    """The only finding, a problem."""
    (found,) = look(address, **changes)
    assert found.status is Status.PROBLEM
    return found


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
def test_a_running_consumer_says_who_it_is(listen: str) -> None:
    with consumer(listen=listen, name="decode-7") as running:
        handshake, layouts, producer = look(running.address)
        assert [finding.check for finding in (handshake, layouts, producer)] == [
            "peer.handshake", "peer.layouts", "peer.producer",
        ]  # fmt: skip
        assert {finding.status for finding in (handshake, layouts, producer)} == {Status.OK}
        assert handshake.facts["name"] == "decode-7"
        assert handshake.facts["protocol"] == "1.0"
        assert handshake.facts["mover"] == "loopback"
        assert handshake.facts["liveness_s"] == DEFAULT_LIMITS.liveness_s
        assert layouts.facts == {"layouts": (LAYOUT.name,), "ranks": 1}
        assert all(component.name in layouts.says for component in LAYOUT.components)
        trip = producer.facts["round_trip_s"]
        assert isinstance(trip, float)
        assert 0 < trip < 30
        until(lambda: not running._connections._all, "the doctor has gone")


def test_the_same_secret_opens_the_link() -> None:
    with consumer(secret=SECRET) as running:
        assert [finding.status for finding in look(running.address, secret=SECRET)] == [Status.OK] * 3


@pytest.mark.parametrize("secret", [None, b"open barley"])
def test_a_wrong_or_missing_secret_is_refused_in_the_peer_s_words(secret: bytes | None) -> None:
    with consumer(secret=SECRET) as running:
        found = refused(running.address, secret=secret)
        assert found.check == "peer.handshake"
        assert found.facts["refused"] is True
        assert f"{running.address} refused: the peer" in found.says
        assert "secret on both" in found.says
        assert "--secret-file" in found.advice


def test_another_mover_is_refused_in_the_peer_s_words() -> None:
    with consumer() as running:
        *_, found = look(running.address, mover="support.doctor_movers:renamed")
        assert found.check == "peer.producer"
        assert found.status is Status.PROBLEM
        assert "the peer moves bytes by 'other', this side by 'loopback'" in found.says
        assert found.facts["code"] == 22


def test_a_mover_that_cannot_be_used_here_is_named() -> None:
    with consumer() as running:
        *_, found = look(running.address, mover="support.doctor_movers:refuses", options={"why": "no driver"})
        assert found.status is Status.PROBLEM
        assert "it moves bytes by loopback" in found.says
        assert "no card: no driver" in found.says
        *_, found = look(running.address, mover="support.doctor_movers:dies")
        assert found.status is Status.PROBLEM
        assert "SIGABRT" in found.says


def test_nobody_there_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = refused(f"127.0.0.1:{port}")
    assert found.check == "peer.reached"
    assert f"127.0.0.1 port {port}: Connection refused" in found.says
    assert found.command


def test_another_kind_of_server_is_no_consumer() -> None:
    with listener(lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as address:
        found = refused(address)
    assert found.check == "peer.handshake"
    assert found.facts["refused"] is False
    assert "something else" in found.advice


def test_a_silent_server_ends_by_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = refused(f"127.0.0.1:{server.getsockname()[1]}", within_s=0.2)
    assert "no answer in time" in found.says


def test_a_server_that_hangs_up_at_once_is_a_problem() -> None:
    with listener(lambda _: None) as address:
        found = refused(address)
    assert found.check == "peer.handshake"


def hello(major: int) -> bytes:
    return encode_message(
        Hello(
            magic=MAGIC, major=major, minor=3, incarnation=Incarnation.mint(), nonce=bytes(16), authentication=AUTH_NONE
        )
    )


def test_another_protocol_version_is_named() -> None:
    with listener(lambda sock: sock.sendall(hello(9))) as address:
        found = refused(address)
    assert "the peer speaks protocol 9.3" in found.says


def converse(*frames: bytes) -> Callable[[socket.socket], None]:
    """Send these, and read until the other side is done."""

    def answer(sock: socket.socket) -> None:
        for frame in frames:
            sock.sendall(frame)
        while sock.recv(1 << 16):
            pass

    return answer


def test_a_peer_that_takes_nothing_is_a_warning() -> None:
    frames = (hello(1), encode_message(Welcome(mover="loopback")))
    with listener(converse(*frames, encode_message(Bye(code=0, reason="enough")))) as address:
        found = look(address)
    assert [finding.status for finding in found] == [Status.OK, Status.WARNING]
    assert "takes no handoffs" in found[-1].says


def test_layouts_that_are_none_are_a_problem() -> None:
    frames = (hello(1), encode_message(Welcome(mover="loopback", consumes=b"garbage")))
    with listener(converse(*frames, encode_message(Bye(code=0, reason="enough")))) as address:
        found = look(address)
    assert [finding.status for finding in found] == [Status.OK, Status.PROBLEM]
    assert found[-1].check == "peer.layouts"


def test_the_command_line_asks_the_peer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET + b"\n")
    with consumer(secret=SECRET) as running:
        arguments = ["doctor", "--json", "--mover", "loopback", "--peer", str(running.address)]
        assert main([*arguments, "--secret-file", str(secret)]) == 0
        report = json.loads(capsys.readouterr().out)
        assert [finding["check"] for finding in report["findings"]][-3:] == [
            "peer.handshake", "peer.layouts", "peer.producer",
        ]  # fmt: skip
        assert main(arguments) == 1
        report = json.loads(capsys.readouterr().out)
        assert report["findings"][-1]["facts"]["code"] == 2
