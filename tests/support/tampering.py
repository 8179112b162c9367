"""A proxy before a real consumer that changes what is said: consumers that break one rule each are made of it."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self, final

from pdhandoff.errors import RemoteError
from pdhandoff.protocol.codec import LENGTH_BYTES, UnknownMessage, decode_message, encode_message
from pdhandoff.protocol.messages import Hello, Message
from pdhandoff.runtime.address import Address

__all__ = ["Conversation", "Proxy", "Tamper"]

_LONGEST = 8 << 20


class Tamper:
    """Changes nothing. Subclasses change what one side says. All methods are called on the proxy's thread."""

    def opened(self, talk: Conversation) -> None:
        """Somebody has connected."""

    def up(self, talk: Conversation, message: Message | UnknownMessage | None, frame: bytes) -> bytes:  # noqa: ARG002
        """What reaches the consumer of a producer's frame. `message` is None where it is none."""
        return frame

    def down(self, talk: Conversation, message: Message | UnknownMessage | None, frame: bytes) -> bytes:  # noqa: ARG002
        """What reaches the producer of a consumer's frame."""
        return frame

    def hung_up(self, talk: Conversation) -> bytes:  # noqa: ARG002
        """The producer has gone: last bytes for the consumer."""
        return b""

    def ended(self, talk: Conversation) -> bool:  # noqa: ARG002
        """The consumer has closed the connection: whether the producer sees it."""
        return True


@final
class Conversation:
    """One connection through the proxy."""

    def __init__(self, producer: socket.socket, consumer: socket.socket, number: int) -> None:
        self.producer = producer
        self.consumer = consumer
        self.number = number
        self.incarnation = b""
        "of the producer"
        self.over = False
        self.consumer_gone = False
        self.buffers = {producer: bytearray(), consumer: bytearray()}
        self.transparent: set[socket.socket] = set()
        "who has announced a length out of bounds: bytes pass as they are"

    def to_producer(self, *messages: Message) -> None:
        """Say something that the consumer did not."""
        self.send(self.producer, b"".join(map(encode_message, messages)))

    def to_consumer(self, *messages: Message) -> None:
        """Say something that the producer did not."""
        self.send(self.consumer, b"".join(map(encode_message, messages)))

    @staticmethod
    def send(sock: socket.socket, data: bytes) -> None:
        """To whoever still listens."""
        with suppress(OSError):
            sock.sendall(data)

    def hang_up(self) -> None:
        """On the consumer; the producer sees that soon."""
        with suppress(OSError):
            self.consumer.shutdown(socket.SHUT_RDWR)


@final
class Proxy:
    """Listens on a port of its own; use as a context manager."""

    def __init__(self, consumer: Address, tamper: Tamper) -> None:
        self._consumer = consumer
        self._tamper = tamper
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._listener.getsockname()[:2])
        self._selector = selectors.DefaultSelector()
        self._talks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    # ---- inside

    def _run(self) -> None:
        while not self._over.is_set():
            for key, _ in self._selector.select(0.02):
                key.data()

    def _accept(self) -> None:
        producer, _ = self._listener.accept()
        consumer = socket.create_connection((self._consumer.host, self._consumer.port), timeout=10)
        for sock in (producer, consumer):
            sock.settimeout(10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        talk = Conversation(producer, consumer, self._talks)
        self._talks += 1
        self._selector.register(producer, selectors.EVENT_READ, lambda: self._from_producer(talk))
        self._selector.register(consumer, selectors.EVENT_READ, lambda: self._from_consumer(talk))
        self._tamper.opened(talk)

    def _from_producer(self, talk: Conversation) -> None:
        if talk.over:
            return  # what another socket brought in this turn has ended it
        data = self._read(talk.producer)
        if data:
            self._pass_on(talk, talk.producer, talk.consumer, data, self._tamper.up)
            return
        talk.send(talk.consumer, self._tamper.hung_up(talk))
        self._end(talk)

    def _from_consumer(self, talk: Conversation) -> None:
        if talk.over or talk.consumer_gone:
            return
        data = self._read(talk.consumer)
        if data:
            self._pass_on(talk, talk.consumer, talk.producer, data, self._tamper.down)
            return
        talk.consumer_gone = True
        self._selector.unregister(talk.consumer)
        if self._tamper.ended(talk):
            self._end(talk)

    @staticmethod
    def _read(sock: socket.socket) -> bytes:
        try:
            return sock.recv(1 << 18)
        except OSError:
            return b""

    def _end(self, talk: Conversation) -> None:
        talk.over = True
        for sock in (talk.producer, talk.consumer):
            with suppress(KeyError, ValueError):
                self._selector.unregister(sock)
            sock.close()

    @staticmethod
    def _pass_on(
        talk: Conversation,
        source: socket.socket,
        target: socket.socket,
        data: bytes,
        change: Callable[[Conversation, Message | UnknownMessage | None, bytes], bytes],
    ) -> None:
        buffer = talk.buffers[source]
        buffer += data
        while len(buffer) >= LENGTH_BYTES and source not in talk.transparent:
            length = int.from_bytes(buffer[:LENGTH_BYTES], "big")
            if length > _LONGEST:
                talk.transparent.add(source)
                break
            if len(buffer) < LENGTH_BYTES + length:
                # a length over its bound is refused before the bytes come, so it must not wait for them
                if len(buffer) == LENGTH_BYTES and length > 4096:
                    talk.transparent.add(source)
                break
            frame = bytes(buffer[: LENGTH_BYTES + length])
            del buffer[: LENGTH_BYTES + length]
            message = _message(frame)
            if isinstance(message, Hello) and source is talk.producer:
                talk.incarnation = message.incarnation
            talk.send(target, change(talk, message, frame))
        if source in talk.transparent:
            talk.send(target, bytes(buffer))
            buffer.clear()


def _message(frame: bytes) -> Message | UnknownMessage | None:
    try:
        return decode_message(frame[LENGTH_BYTES:])
    except RemoteError:
        return None
