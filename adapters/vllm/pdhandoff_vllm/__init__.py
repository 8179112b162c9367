"""Prefill side for vLLM: a KV connector that hands a request's state off while it is being computed.

`"kv_connector_module_path": "pdhandoff_vllm"` finds the classes here. They are imported when they are first asked for:
importing this package needs no vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdhandoff_vllm.connector import PDHandoffConnector, TileRTConnector

__all__ = ["PDHandoffConnector", "TileRTConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pdhandoff_vllm import connector

    return getattr(connector, name)
