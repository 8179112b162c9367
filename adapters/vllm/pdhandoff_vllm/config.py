"""What an operator sets in `kv_connector_extra_config`: the published keys of TileRT's integration, and our own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, final

import msgspec
from msgspec import Meta

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts import Policy, RopeOrder
from pdhandoff.runtime.address import Address
from pdhandoff.runtime.allow import Destinations
from pdhandoff.runtime.tls import TlsConfig

__all__ = ["Config", "read_config"]

_ALIASES: Final = {
    "deepseek-v3.2": "dsv32",
    "deepseek_v3_2": "dsv32",
    "dsv3.2": "dsv32",
    "dsv32": "dsv32",
    "glm-5": "glm5",
    "glm5": "glm5",
    "glm_5": "glm5",
    "v32": "dsv32",
}
"""names that `tilert_model` takes, and the profile that each means. Source: TileRT 0.1.6.post3,
tilert/pd_vllm/profiles/base.py"""

_Positive = Annotated[float, Meta(gt=0, le=86_400)]
_Count = Annotated[int, Meta(ge=1)]


@final
class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All keys. A key that is not here, or has another type, stops the server at its start."""

    tilert_host: str | None = None
    "the consumer of requests whose mark names none"
    tilert_ctrl_port: Annotated[int, Meta(ge=1, le=65_535)] = 5556
    tilert_model: str | None = None
    "`glm5`, `dsv32`, or one of their aliases: what the model is called in layouts"
    tilert_max_seq_len: _Count | None = None
    "longest prompt that is handed off, in tokens"
    tilert_transport: str | None = None
    "the published name of `mover`"
    mover: str | None = None
    "name of a mover; None: `tilert_transport`, else nixl"
    mover_options: dict[str, Any] = {}
    "keyword arguments of the mover"
    staging: Literal["staged", "direct", "auto"] = "staged"
    staging_bytes: _Count = 256 << 20
    "size of the ring"
    digest: bool = False
    "sum up every row that is sent, for the consumer to check"
    allow: tuple[str, ...] | None = None
    "consumers that a request may name; None: `tilert_host` with its port only"
    secret_file: str | None = None
    "file with the secret that consumers share"
    tls: TlsConfig | None = None
    model: str | None = None
    "what the model is called in layouts; None: by `tilert_model`, else the last part of vLLM's model path"
    revision: str = ""
    "of the weights, as both sides call it"
    rope_order: Literal["half_split", "interleaved"] | None = None
    "order of rotary elements in keys per head; None: what the model's family is known for"
    accept: tuple[Literal["cold_drafts", "other_spec_depth"], ...] = ()
    "differences between the two sides that are no reason to refuse"
    queue_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    "how long a handoff may wait for landing memory, unless its mark says so"
    hold_s: _Positive = 60.0
    "how long a finished request may keep its blocks for its handoff"
    hold_bytes: _Count | None = None
    "bytes of blocks that finished requests may keep together, per rank; None: half of the cache"
    name: Annotated[str, Meta(min_length=1, max_length=64)] = "vllm"
    "of this producer, as its consumers' logs show it"

    @property
    def mover_name(self) -> str:
        """The mover."""
        return self.mover or self.tilert_transport or "nixl"

    @property
    def model_name(self) -> str | None:
        """What the model is called in layouts, where the configuration says so."""
        if self.model is not None:
            return self.model
        return None if self.tilert_model is None else _ALIASES[self.tilert_model.lower()]

    @property
    def consumer(self) -> Address | None:
        """The consumer of requests whose mark names none."""
        return None if self.tilert_host is None else Address(self.tilert_host, self.tilert_ctrl_port)

    @property
    def allowed(self) -> tuple[str, ...]:
        """Consumers that may be dialled."""
        if self.allow is not None:
            return self.allow
        return () if self.consumer is None else (str(self.consumer),)

    def destinations(self) -> Destinations:
        """The allow-list, ready to be asked."""
        return Destinations(self.allowed)

    def policy(self, *, other_spec_depth: bool) -> Policy:
        """What is accepted of layouts that differ."""
        return Policy(
            cold_drafts="cold_drafts" in self.accept,
            other_spec_depth=other_spec_depth or "other_spec_depth" in self.accept,
        )

    def rope(self) -> RopeOrder | None:
        """`rope_order`, as layouts call it."""
        return None if self.rope_order is None else RopeOrder(self.rope_order)

    def secret(self) -> bytes | None:
        """What `secret_file` holds. Raises LocalError that names the key when it cannot be read, or is empty."""
        if self.secret_file is None:
            return None
        try:
            secret = Path(self.secret_file).read_bytes().strip()
        except OSError as error:
            raise _wrong(f"secret_file: {self.secret_file} cannot be read: {error.strerror}") from error
        if not secret:
            raise _wrong(f"secret_file: {self.secret_file} is empty: write the secret into it")
        return secret


def read_config(extra: Mapping[str, Any]) -> Config:
    """The configuration in `kv_connector_extra_config`.

    Numbers may be written as text, as in configurations that went through a shell.

    Raises:
        LocalError: CONFIG, for a key that is unknown or wrong; the sentence names it.
    """
    try:
        config = msgspec.convert(dict(extra), Config, strict=False)
    except msgspec.ValidationError as error:
        raise _wrong(f"{error}. Keys are {', '.join(Config.__struct_fields__)}") from error
    if config.tilert_model is not None and config.tilert_model.lower() not in _ALIASES:
        raise _wrong(
            f"tilert_model: {config.tilert_model!r} is not known ({', '.join(_ALIASES)} are); use `model` for any other"
        )
    if config.mover is not None and config.tilert_transport not in {None, config.mover}:
        raise _wrong(f"mover and tilert_transport differ ({config.mover}, {config.tilert_transport}): set one of them")
    if not config.allowed:
        raise _wrong('allow: say which consumers requests may name, for example ["10.1.0.0/16"], or set tilert_host')
    try:
        config.destinations()
    except LocalError as error:
        raise _wrong(f"{'tilert_host' if config.allow is None else 'allow'}: {error.reason}") from error
    config.secret()
    return config


def _wrong(reason: str) -> LocalError:
    return LocalError(ErrorCode.CONFIG, f"kv_connector_extra_config: {reason}")
