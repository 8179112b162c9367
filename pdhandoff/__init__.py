"""Let one LLM engine's prefill continue in another engine's decode.

The names below are what an engine author needs; they are imported when first used, so that `import pdhandoff` stays
cheap. Everything else is in the subpackages.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdhandoff.engines.base import Memory, MemoryKind, Mover
    from pdhandoff.errors import ErrorCode, HandoffFailed, LayoutError, LocalError, PdHandoffError
    from pdhandoff.ids import HandoffId
    from pdhandoff.layouts import Layout, Policy
    from pdhandoff.limits import Limits
    from pdhandoff.planner import PageTable, Placement, Shard
    from pdhandoff.protocol.attachments import Expected, attach, attach_int
    from pdhandoff.protocol.consumer import Unannounced
    from pdhandoff.protocol.messages import Attachment, AttachmentSpec
    from pdhandoff.runtime.arrival import Arrival, Ticket
    from pdhandoff.runtime.consumer import Consumer
    from pdhandoff.runtime.outgoing import Outgoing
    from pdhandoff.runtime.producer import Producer
    from pdhandoff.runtime.sender import Staging
    from pdhandoff.runtime.tls import TlsConfig

__all__ = [
    "Arrival",
    "Attachment",
    "AttachmentSpec",
    "Consumer",
    "ErrorCode",
    "Expected",
    "HandoffFailed",
    "HandoffId",
    "Layout",
    "LayoutError",
    "Limits",
    "LocalError",
    "Memory",
    "MemoryKind",
    "Mover",
    "Outgoing",
    "PageTable",
    "PdHandoffError",
    "Placement",
    "Policy",
    "Producer",
    "Shard",
    "Staging",
    "Ticket",
    "TlsConfig",
    "Unannounced",
    "__version__",
    "attach",
    "attach_int",
]

__version__ = "0.1.0"

_HOME = {
    "pdhandoff.engines.base": ("Memory", "MemoryKind", "Mover"),
    "pdhandoff.errors": ("ErrorCode", "HandoffFailed", "LayoutError", "LocalError", "PdHandoffError"),
    "pdhandoff.ids": ("HandoffId",),
    "pdhandoff.layouts": ("Layout", "Policy"),
    "pdhandoff.limits": ("Limits",),
    "pdhandoff.planner": ("PageTable", "Placement", "Shard"),
    "pdhandoff.protocol.attachments": ("Expected", "attach", "attach_int"),
    "pdhandoff.protocol.consumer": ("Unannounced",),
    "pdhandoff.protocol.messages": ("Attachment", "AttachmentSpec"),
    "pdhandoff.runtime.arrival": ("Arrival", "Ticket"),
    "pdhandoff.runtime.consumer": ("Consumer",),
    "pdhandoff.runtime.outgoing": ("Outgoing",),
    "pdhandoff.runtime.producer": ("Producer",),
    "pdhandoff.runtime.sender": ("Staging",),
    "pdhandoff.runtime.tls": ("TlsConfig",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'pdhandoff' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
