"""Tells vLLM's factory of the connectors, without importing them: the `vllm.general_plugins` entry point.

Under MultiConnector vLLM looks classes up by their names in that factory when it shows metrics, also those that were
loaded by `kv_connector_module_path`. Source: vLLM 0.26 to 0.33, factory.py and v1/multi_connector.py in
vllm/distributed/kv_transfer/kv_connector.
"""

from __future__ import annotations

import warnings
from typing import Final

__all__ = ["NAMES", "register"]

NAMES: Final = ("PDHandoffConnector", "TileRTConnector")


def register() -> None:
    """Register both classes under their names, unless somebody has taken a name. Idempotent."""
    with warnings.catch_warnings():  # as in stats
        warnings.simplefilter("ignore")
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in NAMES:
        if name not in KVConnectorFactory._registry:  # noqa: SLF001 - there is no public way to ask
            KVConnectorFactory.register_connector(name, "pdhandoff_vllm.connector", name)
