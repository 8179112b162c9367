"""Layouts of known engines: `build(name, profile, options)`, and the functions for single components.

Example::

    from pdhandoff.layouts import catalogue, profiles

    prefill = catalogue.build("vllm.fp8_ds_mla", profiles.GLM5)
    decode = catalogue.build("tilert.bf16", profiles.GLM5, catalogue.Options(length=131072))

"""

from pdhandoff.layouts.catalogue.blocks import block_outermost, expand_blocks
from pdhandoff.layouts.catalogue.huggingface import key_value_tensors
from pdhandoff.layouts.catalogue.options import Options, head_range
from pdhandoff.layouts.catalogue.registry import CATALOGUE, REFUSED, Named, build
from pdhandoff.layouts.catalogue.tilert import (
    DEVICE_ROLES,
    DeviceRole,
    device_layouts,
    index_plane,
    latent_planes,
    latent_planes_fp8,
    tilert_layout,
)
from pdhandoff.layouts.catalogue.vllm_cpu import cpu_attention_pages
from pdhandoff.layouts.catalogue.vllm_gqa import PageOrder, key_value_pages
from pdhandoff.layouts.catalogue.vllm_index import index_pages
from pdhandoff.layouts.catalogue.vllm_mla import fp8_ds_mla_rows, mla_rows

__all__ = [
    "CATALOGUE",
    "DEVICE_ROLES",
    "REFUSED",
    "DeviceRole",
    "Named",
    "Options",
    "PageOrder",
    "block_outermost",
    "build",
    "cpu_attention_pages",
    "device_layouts",
    "expand_blocks",
    "fp8_ds_mla_rows",
    "head_range",
    "index_pages",
    "index_plane",
    "key_value_pages",
    "key_value_tensors",
    "latent_planes",
    "latent_planes_fp8",
    "mla_rows",
    "tilert_layout",
]
