"""Makes the generators of the published package, as its own vLLM integration makes them.

Source: TileRT 0.1.6.post3, tilert/pd_vllm/profiles/glm5.py and dsv32.py (`_build_engine`), and the model names and
aliases of tilert/pd_vllm/profiles/base.py.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Final, NamedTuple

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts.profiles import DSV32, GLM5, Profile

__all__ = ["MODELS", "ModelEntry", "build_generator", "model_named"]


class ModelEntry(NamedTuple):
    """A model of the published package."""

    profile: Profile
    backend: str
    "as `tilert.load_backend` calls it"
    module: str
    "where the generator is"
    generator: str
    arguments: tuple[str, str]
    "module and class of its model arguments"
    options: dict[str, object]
    "that only this generator takes"


MODELS: Final = {
    "glm5": ModelEntry(
        GLM5,
        "glm5",
        "tilert.models.glm_5.generator",
        "GLM5Generator",
        ("tilert.models.glm_5.model_args", "ModelArgsGLM5"),
        {"enable_thinking": False},
    ),
    "dsv32": ModelEntry(
        DSV32,
        "deepseek_v3_2",
        "tilert.models.deepseek_v3_2.generator",
        "DSAv32Generator",
        ("tilert.models.deepseek_v3_2.model_args", "ModelArgs"),
        {},
    ),
}
"by the names of the published package"

_ALIASES: Final = {
    "glm_5": "glm5",
    "glm-5": "glm5",
    "deepseek_v3_2": "dsv32",
    "deepseek-v3.2": "dsv32",
    "dsv3.2": "dsv32",
    "v32": "dsv32",
}
_ROOM: Final = 256
"the published integration lets a generator make that many tokens fewer than a request may have"
_LEAST: Final = 4096


def model_named(name: str) -> ModelEntry:
    """The model of that name or alias, in any case.

    Raises:
        LocalError: another name; the sentence lists the known ones.
    """
    entry = MODELS.get(_ALIASES.get(name.lower(), name.lower()))
    if entry is None:
        raise LocalError(
            ErrorCode.CONFIG,
            f"there is no model {name!r} for TileRT's CUDA engines: use {', '.join(MODELS)} (or {', '.join(_ALIASES)})",
        )
    return entry


def build_generator(entry: ModelEntry, *, weights: str, mtp: bool, fp8: bool, max_seq_len: int) -> Any:
    """Load the engine: minutes, and all eight devices.

    Args:
        entry: the model.
        weights: folder of the converted weights.
        mtp: decode with drafts.
        fp8: keep latents in fp8, where the model's arguments have `fp8_kv_cache`.
        max_seq_len: tokens of one request.

    Raises:
        LocalError: the package, one of the names above or `fp8_kv_cache` is missing.
    """
    package = _module("tilert")
    if hasattr(package, "load_backend"):
        package.load_backend(entry.backend)
    arguments = _name(_module(entry.arguments[0]), entry.arguments[1])()
    if fp8:
        if not hasattr(arguments, "fp8_kv_cache"):
            raise LocalError(
                ErrorCode.CONFIG, f"fp8: {entry.profile.name}'s engine keeps latents in bf16 only; leave fp8 out"
            )
        arguments.fp8_kv_cache = True
    generator = _name(_module(entry.module), entry.generator)(
        model_args=arguments,
        max_new_tokens=max(max_seq_len, _LEAST) - _ROOM,
        model_weights_dir=weights,
        with_mtp=mtp,
        use_topp=True,
        **entry.options,
    )
    generator.from_pretrained()
    return generator


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise LocalError(
            ErrorCode.CONFIG,
            f"{name} cannot be imported, because there is no {error.name}: install tilert 0.1.6 (and what it needs) in "
            "this environment, which cannot be the prefill engine's",
        ) from error


def _name(module: ModuleType, name: str) -> Any:
    found = getattr(module, name, None)
    if found is None:
        raise LocalError(
            ErrorCode.CONFIG, f"{module.__name__} has no {name}: this adapter is for TileRT 0.1.6; install that version"
        )
    return found
