"""Options of the Mooncake mover, checked."""

from __future__ import annotations

import ipaddress
from typing import TypeVar

from pdhandoff.engines.mooncake.library import LogLevel, Protocol, Settings
from pdhandoff.errors import ErrorCode, MoverError

__all__ = ["choose"]

_Choice = TypeVar("_Choice", Protocol, LogLevel)


def choose(*, protocol: str, host: str, lanes: int, stall_s: int, connect_s: int, log_level: str) -> Settings:
    """What holds for all engines of the process, from the options of `create`. Raises MoverError (CONFIG)."""
    for name, value, most in (("lanes", lanes, 64), ("stall_s", stall_s, 3600), ("connect_s", connect_s, 60)):
        if not 1 <= value <= most:
            raise MoverError(ErrorCode.CONFIG, f"option {name} is {value}: choose 1 to {most}")
    return Settings(
        protocol=_choice(Protocol, protocol, "protocol"),
        ipv6=_is_ipv6(host),
        lanes=lanes,
        stall_s=stall_s,
        connect_s=connect_s,
        log_level=_choice(LogLevel, log_level, "log_level"),
    )


def _choice(kind: type[_Choice], value: str, option: str) -> _Choice:
    try:
        return kind(value)
    except ValueError as error:
        known = ", ".join(member.value for member in kind)
        raise MoverError(ErrorCode.CONFIG, f"option {option} is {value!r}: choose one of {known}") from error


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
