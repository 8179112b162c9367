"""What an operator decides: which servers there are, and which request goes where."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Final, final
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["Config", "DecodeNode", "NativeServer", "OnFailure", "Pool", "Rule", "read_config", "with_defaults"]

_Seconds = Annotated[float, Meta(gt=0, le=86_400)]
_MOST_BYTES: Final = 1 << 20


@final
class Pool(Enum):
    """Which way a request goes."""

    HANDOFF = "handoff"
    NATIVE = "native"


@final
class OnFailure(Enum):
    """What happens when a handoff fails before its first token was sent."""

    FAIL = "fail"
    RETRY = "retry"
    NATIVE = "native"
    "after the retries, a native server"


@final
class DecodeNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `pdhandoff serve-decode`."""

    url: str
    credits: Annotated[int, Meta(ge=1, le=4096)] | None = None
    "requests at a time; None: two more than it parks"
    control: str | None = None
    "its control address as prefill servers reach it; None: what the node itself says"


@final
class NativeServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vLLM server that answers by itself."""

    url: str
    prefill: str | None = None
    "URL of a vLLM server that prefills for it by vLLM's own two-leg flow; None: it prefills too"


@final
class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first rule of which everything that is given holds decides."""

    pool: Pool
    model: str | None = None
    "name that the request asks for"
    header: str | None = None
    value: str | None = None
    "what the header must say; None: it must be there"
    least_prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    most_prompt_tokens: Annotated[int, Meta(ge=0)] | None = None
    on_failure: OnFailure | None = None

    def holds(self, model: object, headers: Mapping[str, str], prompt_tokens: int) -> bool:
        """Whether this rule speaks of a request."""
        found = None if self.header is None else headers.get(self.header.lower())
        return (
            (self.model is None or self.model == model)
            and (self.header is None or (found is not None and self.value in {None, found}))
            and self.least_prompt_tokens <= prompt_tokens
            and (self.most_prompt_tokens is None or prompt_tokens <= self.most_prompt_tokens)
        )


@final
class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the configuration file may say."""

    prefill: list[str] = []
    "URLs of vLLM servers with the connector"
    decode: list[DecodeNode] = []
    native: list[NativeServer] = []
    "vLLM servers that answer by themselves"
    render: str | None = None
    "URL of a `vllm launch render`; None: the first prefill server, which then needs --enable-scale-out"
    rule: list[Rule] = []
    pool: Pool = Pool.HANDOFF
    "where requests go that no rule speaks of"
    on_failure: OnFailure = OnFailure.RETRY
    attempts: Annotated[int, Meta(ge=1, le=8)] = 2
    "handoffs that are tried for one request"
    max_queue: Annotated[int, Meta(ge=0, le=65_536)] = 256
    "requests that wait for a decode node"
    queue_s: _Seconds = 60.0
    "how long one waits for a decode node"
    prefill_s: _Seconds = 300.0
    "how long one prefill may take"
    first_token_s: _Seconds = 330.0
    "from the start of both legs to the first token"
    stall_s: _Seconds = 120.0
    "between two pieces of output"
    text_s: _Seconds = 30.0
    "for rendering, and for each piece of text"
    native_s: _Seconds = 1800.0
    "for all of a native server's answer"
    probe_s: _Seconds = 1.0
    "between two looks at every server"
    decode_key_file: str | None = None
    "holds the API key of the decode nodes; None: the client's own is passed on"


def read_config(path: Path) -> Config:
    """Read a TOML file. Raises LocalError(CONFIG) that names what is wrong."""
    try:
        data = path.read_bytes()
        if len(data) > _MOST_BYTES:
            raise LocalError(ErrorCode.CONFIG, f"{path} has more than {_MOST_BYTES} bytes")
        found = tomllib.loads(data.decode())
        config = msgspec.convert(found, Config)
    except OSError as error:
        raise LocalError(ErrorCode.CONFIG, f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise LocalError(ErrorCode.CONFIG, f"{path}: {error}") from error
    return with_defaults(config)


def with_defaults(config: Config) -> Config:
    """Check URLs, cut their trailing slashes, and see that there is somewhere to go.

    Raises:
        LocalError: CONFIG, naming the setting.
    """
    changed = msgspec.structs.replace(
        config,
        prefill=[_url("prefill", each) for each in config.prefill],
        decode=[msgspec.structs.replace(each, url=_url("decode.url", each.url)) for each in config.decode],
        native=[
            msgspec.structs.replace(
                each,
                url=_url("native.url", each.url),
                prefill=None if each.prefill is None else _url("native.prefill", each.prefill),
            )
            for each in config.native
        ],
        render=None if config.render is None else _url("render", config.render),
    )
    if not changed.native and not (changed.prefill and changed.decode):
        raise LocalError(ErrorCode.CONFIG, "no server to go to: name a prefill and a decode server, or a native one")
    pools = {changed.pool, *(rule.pool for rule in changed.rule)}
    if Pool.NATIVE in pools and not changed.native:
        raise LocalError(ErrorCode.CONFIG, "a rule sends requests to the native pool, which is empty: name a server")
    if len({each.url for each in changed.decode}) < len(changed.decode):
        raise LocalError(ErrorCode.CONFIG, "decode: a node is named twice")
    return changed


def _url(name: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        good = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0 and not parts.query
    except ValueError:
        good = False
    if not good:
        raise LocalError(ErrorCode.CONFIG, f"{name}: {url!r} is no URL such as http://127.0.0.1:8000")
    return url.rstrip("/")
