"""Every bound on what a peer may send or ask for. Fixed here, so that no other module invents one."""

from __future__ import annotations

from typing import Final, final

import msgspec

__all__ = ["DEFAULT_LIMITS", "Limits"]


@final
class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and time-outs. Both sides hold their own; the handshake tells the peer those it must respect.

    Sizes are in bytes, times in seconds on a monotonic clock.
    """

    max_frame_bytes: int = 4 << 20
    "one control message, without its 4-byte length"
    max_hello_bytes: int = 4096
    "one message before the peer has proven itself"
    max_string: int = 1024
    "characters of a name or a reason"
    max_components: int = 64
    max_layers: int = 1024
    max_planes: int = 8
    max_shards: int = 1024
    max_ranks: int = 256
    "destination ranks of one consumer"
    max_entries: int = 4096
    "manifest entries of one shard"
    max_progress_layers: int = 16384
    "of one PROGRESS: layers of all spans together, where a span of all layers of its entry counts as one"
    max_fragments: int = 1024
    "runs of rows, apart from each other, that may have landed of one layer"
    max_extents: int = 4096
    "extents in one grant"
    max_prompt_tokens: int = 16 << 20
    max_page_tokens: int = 64 << 20
    max_row_bytes: int = 1 << 24
    max_attachments: int = 64
    max_attachment_bytes: int = 1 << 20
    "all attachments of one handoff together"
    max_descriptor_bytes: int = 1 << 20
    "a mover's description of one grant"
    max_handshakes: int = 256
    "connections to one listener that have not proven themselves yet; for one more, the oldest goes"
    max_links: int = 4096
    "open links that one listener keeps"
    max_handoffs_per_link: int = 65536
    max_queue: int = 1024
    "handoffs that wait for memory"
    max_copies: int = 1 << 24
    "copies in one plan"

    heartbeat_s: float = 1.0
    "a PING is sent after this long without another message"
    liveness_s: float = 5.0
    "a link is lost after this long without any message"
    handshake_s: float = 5.0
    announce_s: float = 30.0
    "how long an announced handoff may take to arrive"
    unannounced_s: float = 2.0
    "how long an offer waits for its announcement, where the policy lets it wait"
    assemble_s: float = 10.0
    "from the first shard's offer to the last one's"
    queue_s: float = 60.0
    "upper bound on what a caller may ask to wait for memory"
    lease_s: float = 5.0
    "a granted shard must give a sign of life this often"
    transfer_base_s: float = 10.0
    "fixed part of a write's budget"
    transfer_floor_bytes_per_s: float = 50e6
    "slowest rate at which a write is still given time"
    handoff_s: float = 3600.0
    "from grant to commit, whatever the producer says"
    ready_s: float = 120.0
    "how long a complete handoff waits for its reader"
    drain_s: float = 5.0
    "how long an ended handoff's writers may take to drain before quarantine"


DEFAULT_LIMITS: Final = Limits()
