"""Weights of a Hugging Face folder: safetensors files, one or several with an index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, Final, final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["Checkpoint"]

_MAX_INDEX_BYTES: Final = 64 << 20
_WHOLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


@final
class _Index(msgspec.Struct, frozen=True, kw_only=True):
    weight_map: dict[str, str]


@final
class Checkpoint:
    """The tensors of a folder, read when they are asked for.

    Source: huggingface/safetensors 0.8 (the format), and transformers' index of split checkpoints (`weight_map`: the
    name of a tensor -> its file).

    Args:
        folder: where the files are.
        dtype: what tensors are given as.

    Raises:
        LocalError: there are no weights.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder = folder
        self._dtype = dtype
        self._open: dict[str, Any] = {}
        self._files = self._locate()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str, shape: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, of this shape.

        Args:
            name: its name in the checkpoint.
            shape: what the model needs.
            dtype: None: the checkpoint's.

        Raises:
            LocalError: it is not there, or has another shape.
        """
        file = self._files.get(name)
        if file is None:
            raise LocalError(ErrorCode.CONFIG, f"{self._folder} holds no tensor {name!r}, which its config asks for")
        found: Tensor = self._file(file).get_tensor(name)
        if tuple(found.shape) != tuple(shape):
            raise LocalError(
                ErrorCode.CONFIG,
                f"{self._folder}: tensor {name!r} is {list(found.shape)}, and its config asks for {list(shape)}",
            )
        return found.to(dtype or self._dtype).contiguous()

    def _locate(self) -> dict[str, str]:
        """Name of a tensor -> its file."""
        index = self._folder / _INDEX
        if index.is_file():
            return self._read_index(index)
        if not (self._folder / _WHOLE).is_file():
            raise LocalError(ErrorCode.CONFIG, f"{self._folder} has neither {_WHOLE} nor {_INDEX}")
        return dict.fromkeys(self._file(_WHOLE).keys(), _WHOLE)

    def _read_index(self, index: Path) -> dict[str, str]:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise LocalError(ErrorCode.CONFIG, f"{index} has more than {_MAX_INDEX_BYTES} bytes: this is no index")
        try:
            files = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except msgspec.MsgspecError as error:
            raise LocalError(ErrorCode.CONFIG, f"cannot read {index}: {error}") from error
        outside = next((file for file in files.values() if PurePath(file).name != file), None)
        if outside is not None:
            raise LocalError(ErrorCode.CONFIG, f"{index} names {outside!r}, which lies outside its folder")
        return files

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self._folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise LocalError(ErrorCode.CONFIG, f"cannot read {self._folder / name}: {error}") from error
        return self._open[name]
