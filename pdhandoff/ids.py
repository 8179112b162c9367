"""Identities: of a handoff, and of one life of a process. Minted here, never parsed out of another system's ids."""

from __future__ import annotations

import os
from typing import Final, Self, final

__all__ = ["ID_BYTES", "HandoffId", "Incarnation"]

ID_BYTES: Final = 16


class _Id(bytes):
    """Sixteen opaque bytes. Shown, and read back, as 32 hexadecimal digits."""

    __slots__ = ()

    def __new__(cls, value: bytes) -> Self:
        if len(value) != ID_BYTES:
            raise ValueError(f"{cls.__name__} needs {ID_BYTES} bytes, got {len(value)}")
        return super().__new__(cls, value)

    @classmethod
    def mint(cls) -> Self:
        """A new id from the operating system's entropy: 128 random bits."""
        return cls(os.urandom(ID_BYTES))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The id that `str()` showed. Raises ValueError on anything but 32 hexadecimal digits."""
        if len(text) != 2 * ID_BYTES:
            raise ValueError(
                f"{cls.__name__} is written as {2 * ID_BYTES} hexadecimal digits, got {len(text)} characters"
            )
        return cls(bytes.fromhex(text))

    def __str__(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.hex()})"


@final
class HandoffId(_Id):
    """One attempt to move one request's state. A retry is a new handoff and has a new id."""

    __slots__ = ()


@final
class Incarnation(_Id):
    """One life of one endpoint. A restart on the same address is another incarnation."""

    __slots__ = ()
