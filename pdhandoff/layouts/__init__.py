"""Pure descriptions of memory: what an engine rank holds, byte by byte, and whether two of them can be bridged.

`descriptor` has the model of memory, `profiles` the models, `catalogue` the layouts of known engines, `digest` and
`differences` compare, `compat` bridges, `joint` adds shards up, `wire` turns layouts into bytes and back. No tensor
library is needed.
"""

from pdhandoff.layouts.compat import Bridge, Policy, bridge
from pdhandoff.layouts.descriptor import (
    Component,
    ComponentKind,
    Element,
    Layout,
    Model,
    Plane,
    Quantisation,
    RopeOrder,
    Rotation,
)
from pdhandoff.layouts.differences import require_same
from pdhandoff.layouts.digest import layout_digest
from pdhandoff.layouts.joint import joint_landing
from pdhandoff.layouts.wire import decode_layout, encode_layout

__all__ = [
    "Bridge",
    "Component",
    "ComponentKind",
    "Element",
    "Layout",
    "Model",
    "Plane",
    "Policy",
    "Quantisation",
    "RopeOrder",
    "Rotation",
    "bridge",
    "decode_layout",
    "encode_layout",
    "joint_landing",
    "layout_digest",
    "require_same",
]
