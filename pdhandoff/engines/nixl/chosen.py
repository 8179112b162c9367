"""Which transports UCX has really chosen for a connection: NIXL does not say, UCX does when asked.

UCX keeps a tree of its objects, in which an endpoint is listed by its address, and answers `ucp_ep_query` for it. The
structures are `ucp_ep_attr_t` and `ucp_transport_entry_t` of UCX 1.23 (`ucp.h`). Where the library keeps no such tree,
the answer is empty.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final, final

__all__ = ["Endpoints"]

_TREE: Final = "/ucp/context"
_NAME_BYTES: Final = 31
"UCX cuts names to so many"
_ASK_TRANSPORTS: Final = 1 << 3  # UCP_EP_ATTR_FIELD_TRANSPORTS
_MAX: Final = 64

_Found = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)


class _Transport(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local", ctypes.c_char * 128),
        ("remote", ctypes.c_char * 128),
        ("entries", ctypes.POINTER(_Transport)),
        ("count", ctypes.c_uint),
        ("entry_bytes", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
        ("spare", ctypes.c_char * 256),
    )


def _library(name: str) -> ctypes.CDLL | None:
    """A library that this process has loaded already, whatever the wheel calls it."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(name):
            return ctypes.CDLL(path)
    return None


@final
class Endpoints:
    """The endpoints of one agent. Not thread-safe: used with the agent's lock held, so that none of them ends."""

    def __init__(self, agent: str) -> None:
        self._agent = agent[:_NAME_BYTES]
        ucs, ucp = _library("libucs-"), _library("libucp-")
        self._list = getattr(ucs, "ucs_vfs_path_list_dir", None)
        self._query = getattr(ucp, "ucp_ep_query", None)
        if self._list is not None:
            self._list.argtypes = (ctypes.c_char_p, _Found, ctypes.c_void_p)
        if self._query is not None:
            self._query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Attributes))

    def _children(self, path: str) -> list[str]:
        names: list[str] = []
        if self._list is not None:
            self._list(path.encode(), _Found(lambda name, _: names.append(name.decode())), None)
        return names

    def known(self) -> frozenset[int]:
        """Addresses of the agent's endpoints."""
        found: set[int] = set()
        for context in self._children(_TREE):
            if not context.startswith(self._agent):
                continue
            for worker in self._children(f"{_TREE}/{context}/worker"):
                path = f"{_TREE}/{context}/worker/{worker}"
                self._children(path)  # listing the parent fills the folder below
                found |= {int(name, 16) for name in self._children(f"{path}/ep") if name.startswith("0x")}
        return frozenset(found)

    def transports(self, endpoint: int) -> tuple[str, ...]:
        """What one of them uses, as `transport/device`, sorted."""
        if self._query is None:
            return ()
        asked = _Attributes(field_mask=_ASK_TRANSPORTS)
        entries = (_Transport * _MAX)()
        asked.entries, asked.count, asked.entry_bytes = entries, _MAX, ctypes.sizeof(_Transport)
        if self._query(endpoint, ctypes.byref(asked)) != 0:
            return ()
        used = {(entry.transport or b"?", entry.device or b"?") for entry in entries[: min(asked.count, _MAX)]}
        return tuple(sorted(f"{transport.decode()}/{device.decode()}" for transport, device in used))
