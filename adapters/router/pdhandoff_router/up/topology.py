"""Which processes make up a topology, and how they find one another."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, final

import msgspec

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff_router.up.processes import Part, free_ports

__all__ = ["POOL_HEADER", "Choices", "Plan", "Topology", "plan"]

POOL_HEADER: Final = "x-pdhandoff-pool"
"a request of topology B that says `native` in it is decoded by vLLM"
_HOST: Final = "127.0.0.1"
_VLLM: Final = "vllm.entrypoints.openai.api_server"
_LEAVE_S: Final = "5"
"how long requests under way may take when everything ends"


@final
class Topology(Enum):
    """What is started."""

    A = "topology-a"
    "a vLLM that prefills, decode nodes, a router"
    B = "topology-b"
    "the same, and a vLLM that decodes what the same prefill server hands to it by vLLM's own NIXL connector"


@final
class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """What the user decided."""

    topology: Topology
    model: Path
    "folder in Hugging Face's format"
    name: str
    "what clients, and layouts, call the model"
    folder: Path
    "of logs and the router's configuration"
    vllm_python: Path
    mover: str = "nixl"
    decode_nodes: int = 1
    port: int = 0
    "of the router; 0: any"
    dtype: str = "float32"
    max_model_len: int = 1024
    "tokens"
    vllm_arguments: tuple[str, ...] = ()
    router: bool = True


@final
class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to start: `engines` at once, and when they are ready `router`."""

    engines: list[Part]
    router: list[Part]
    prefill: str
    "URL"
    native: str | None
    "URL"
    decode: list[str]
    "URLs"
    controls: list[str]
    "control addresses of the decode nodes"
    url: str
    "what clients ask; empty without a router"


def plan(choices: Choices) -> Plan:
    """Choose ports, write the router's configuration, and put the command lines together.

    Raises:
        LocalError: CONFIG: the model's folder cannot be used.
    """
    drafts = _draft_layers(choices.model)
    count, native = choices.decode_nodes, choices.topology is Topology.B
    prefill_port, native_port, router_port, *rest = free_ports(5 + 2 * count)
    (prefill_side, native_side), nodes = rest[:2], list(zip(rest[2 : 2 + count], rest[2 + count :], strict=True))
    router_port = choices.port or router_port
    engines = [
        _vllm(
            "prefill",
            "vLLM: prefill",
            choices,
            port=prefill_port,
            connector=_prefill_connectors(choices),
            drafts=drafts,
            side_channel=prefill_side,
        )
    ]
    if native:
        engines.append(
            _vllm(
                "native",
                "vLLM: native decode",
                choices,
                port=native_port,
                connector=_NIXL,
                drafts=drafts,
                side_channel=native_side,
            )
        )
    engines += [
        _node(f"decode-{number}", choices, port, control, drafts) for number, (port, control) in enumerate(nodes)
    ]
    made = Plan(
        engines=engines,
        router=[],
        prefill=_url(prefill_port),
        native=_url(native_port) if native else None,
        decode=[_url(port) for port, _ in nodes],
        controls=[f"{_HOST}:{control}" for _, control in nodes],
        url=_url(router_port) if choices.router else "",
    )
    if not choices.router:
        return made
    configuration = choices.folder / "router.toml"
    configuration.write_text("\n".join(_router_lines(made)) + "\n", encoding="utf-8")
    return msgspec.structs.replace(made, router=[_router(configuration, router_port)])


_NIXL: Final[Mapping[str, Any]] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    # seconds that blocks wait for their reader: few cores are slow
    "kv_connector_extra_config": {"kv_lease_duration": 200},
}


def _prefill_connectors(choices: Choices) -> Mapping[str, Any]:
    ours = {
        "kv_connector": "PDHandoffConnector",
        "kv_connector_module_path": "pdhandoff_vllm",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"model": choices.name, "mover": choices.mover, "allow": [_HOST]},
    }
    if choices.topology is Topology.A:
        return ours
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [_NIXL, ours]},
    }


def _vllm(
    name: str,
    about: str,
    choices: Choices,
    *,
    port: int,
    connector: Mapping[str, Any],
    drafts: int,
    side_channel: int,
) -> Part:
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": _HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
        "UCX_TLS": "tcp,self,sm",
        **_unless_set(
            OMP_NUM_THREADS="1",
            VLLM_CPU_CI_ENV="1",  # no warm-up
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",  # two servers would take the same core
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
        ),
    }
    speculation = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
    return Part(
        name=name,
        about=about,
        command=(
            *(str(choices.vllm_python), "-m", _VLLM),
            *("--model", str(choices.model), "--served-model-name", choices.name),
            *("--host", _HOST, "--port", str(port), "--enable-scale-out"),
            *("--dtype", choices.dtype, "--max-model-len", str(choices.max_model_len)),
            *("--enforce-eager", "--max-num-seqs", "16"),
            *(("--speculative-config", speculation) if drafts else ()),
            *("--kv-transfer-config", json.dumps(connector)),
            *choices.vllm_arguments,
        ),
        environment=environment,
        url=_url(port),
    )


def _node(name: str, choices: Choices, port: int, control: int, drafts: int) -> Part:
    options: dict[str, Any] = {
        "model": str(choices.model),
        "name": choices.name,
        "dtype": choices.dtype,
        "max_seq_len": choices.max_model_len,
        "spec_depth": min(drafts, 1),
    }
    return Part(
        name=name,
        about="decode node",
        command=(
            *(sys.executable, "-m", "pdhandoff", "serve-decode", "--engine", "pdhandoff.demo.hf:create"),
            *_repeated("--engine-arg", (f"{key}={json.dumps(value)}" for key, value in options.items())),
            *("--host", _HOST, "--port", str(port), "--listen", f"{_HOST}:{control}"),
            *("--mover", choices.mover, "--arena-bytes", "256M", "--drain", _LEAVE_S),
        ),
        environment=_unless_set(OMP_NUM_THREADS="1", UCX_TLS="tcp,self,sm"),
        url=_url(port),
    )


def _router(configuration: Path, port: int) -> Part:
    return Part(
        name="router",
        about="router",
        command=(
            *(sys.executable, "-m", "pdhandoff", "router", "--config", str(configuration)),
            *("--host", _HOST, "--port", str(port), "--drain", _LEAVE_S),
        ),
        url=_url(port),
    )


def _router_lines(made: Plan) -> Iterator[str]:
    """The router's configuration, in TOML. A string of JSON is one of TOML, too."""
    yield f"prefill = [{json.dumps(made.prefill)}]"
    for url in made.decode:
        yield f"\n[[decode]]\nurl = {json.dumps(url)}"
    if made.native is not None:
        yield f"\n[[native]]\nurl = {json.dumps(made.native)}\nprefill = {json.dumps(made.prefill)}"
        yield f'\n[[rule]]\npool = "native"\nheader = "{POOL_HEADER}"\nvalue = "native"'


def _draft_layers(model: Path) -> int:
    """How many draft layers the model has. Raises LocalError (CONFIG)."""
    try:
        config = json.loads((model / "config.json").read_bytes())
        return int(config.get("num_nextn_predict_layers") or 0)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise LocalError(
            ErrorCode.CONFIG, f"--model: {model} is no model in Hugging Face's format: its config.json: {error}"
        ) from error


def _repeated(option: str, values: Iterator[str]) -> Iterator[str]:
    for value in values:
        yield from (option, value)


def _unless_set(**defaults: str) -> dict[str, str]:
    return {name: value for name, value in defaults.items() if name not in os.environ}


def _url(port: int) -> str:
    return f"http://{_HOST}:{port}"
