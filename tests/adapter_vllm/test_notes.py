from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest

from pdhandoff_vllm.notes import Inbox, Note, Outbox, Postbox


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    inbox = Inbox()
    yield inbox
    inbox.close()


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    outbox = Outbox()
    yield outbox
    outbox.close()


def test_notes_arrive(inbox: Inbox, outbox: Outbox) -> None:
    assert inbox.read() == []
    postbox = inbox.postbox
    assert inbox.postbox == postbox
    outbox.send(postbox, "lost", "it is not open yet")
    outbox.open(postbox)
    outbox.open(postbox)
    outbox.send(postbox, "a", "refused")
    outbox.send(postbox, "b", "x" * 5000)
    first, second = inbox.read()
    assert (first.request, first.reason) == ("a", "refused")
    assert len(second.reason) == 512
    assert inbox.read() == []


def test_what_is_no_note_of_ours_is_dropped(inbox: Inbox) -> None:
    address, secret = inbox.postbox
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for data in (
            b"",
            b"\x00" * 9,
            msgspec.msgpack.encode(Note(b"wrong secret....", "a", "x")),
            msgspec.msgpack.encode([secret, 3, 4]),
            msgspec.msgpack.encode(Note(secret, "a", "x" * 5000)),
            msgspec.msgpack.encode(Note(secret, "good", "x")),
        ):
            stranger.sendto(data, address)
    assert [note.request for note in inbox.read()] == ["good"]


def test_a_full_or_missing_postbox_stops_nobody(inbox: Inbox, outbox: Outbox) -> None:
    outbox.open(Postbox())
    outbox.send(Postbox(), "a", "x")
    postbox = inbox.postbox
    outbox.open(postbox)
    outbox.send(Postbox(), "a", "x")
    for _ in range(5000):
        outbox.send(postbox, "a", "x")
    assert 0 < len(inbox.read()) <= 256
    inbox.close()
    outbox.send(postbox, "a", "x")
    assert inbox.read() == []
    assert inbox.postbox == Postbox()


def test_a_system_without_unix_sockets_has_no_short_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    assert Inbox().postbox == Postbox()
    outbox = Outbox()
    outbox.open(Postbox(b"x", b"y"))
    outbox.send(Postbox(b"x", b"y"), "a", "x")
    outbox.close()
