"""The NIXL mover: see `mover` for what it does, `transports` for what UCX may use, `receiver` for the fence."""

from __future__ import annotations

import importlib

from pdhandoff.engines.base import Mover
from pdhandoff.engines.nixl.options import INSTALL
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["create"]


def create(**options: object) -> Mover:
    """What the registry calls: `mover.create`, imported only now because it needs what comes with NIXL's wheel.

    Raises:
        MoverError: CONFIG when the wheel is missing, and as `mover.create`.
    """
    try:
        module = importlib.import_module("pdhandoff.engines.nixl.mover")
    except ModuleNotFoundError as error:
        raise MoverError(
            ErrorCode.CONFIG, f"the nixl mover needs {error.name}, which comes with the NIXL wheel: {INSTALL}"
        ) from error
    mover: Mover = module.create(**options)
    return mover
