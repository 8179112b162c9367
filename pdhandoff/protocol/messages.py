"""Every message of the protocol. `docs/spec/wire.md` explains them; the field docs give shapes and units.

Encoded as MessagePack maps with an integer tag. Fields may be added with defaults in a minor version; a receiver
ignores fields that it does not know, and counts and drops types that it does not know. Times are integer milliseconds.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple, final

import msgspec
from msgspec import Meta

from pdhandoff.limits import DEFAULT_LIMITS
from pdhandoff.protocol.manifest import Manifest
from pdhandoff.protocol.spans import Span

__all__ = [
    "AUTH_HMAC",
    "AUTH_NONE",
    "MAGIC",
    "PROTOCOL_MAJOR",
    "PROTOCOL_MINOR",
    "Attachment",
    "AttachmentSpec",
    "Bye",
    "Cancel",
    "Commit",
    "Drained",
    "Draining",
    "Failed",
    "Grant",
    "GrantedRank",
    "Hello",
    "Message",
    "Offer",
    "Ping",
    "Pong",
    "Progress",
    "Proof",
    "Queued",
    "Ready",
    "Refuse",
    "Renew",
    "Restart",
    "Welcome",
]

PROTOCOL_MAJOR: Final = 1
"sides with different majors refuse each other"
PROTOCOL_MINOR: Final = 0
"sides with different minors speak the lower one: only optional fields were added"
MAGIC: Final = b"pdhandoff"
AUTH_NONE: Final = "none"
AUTH_HMAC: Final = "hmac-sha256"

_L: Final = DEFAULT_LIMITS
_MAX: Final = (1 << 63) - 1

Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
Text = Annotated[str, Meta(max_length=_L.max_string)]
Count = Annotated[int, Meta(ge=0, le=_MAX)]
Generation = Annotated[int, Meta(ge=1, le=_MAX)]
Milliseconds = Annotated[int, Meta(ge=0, le=86_400_000)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 16)]
Code = Annotated[int, Meta(ge=0, lt=1 << 16)]
Descriptor = Annotated[bytes, Meta(max_length=_L.max_descriptor_bytes)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="t", gc=False):
    """Base of all messages."""


# ---- phase one: decoded before anything else is believed


@final
class Hello(_Message, frozen=True, kw_only=True, tag=1):
    """First message of both sides. Discloses nothing about memory."""

    magic: Annotated[bytes, Meta(max_length=16)]
    major: Rank
    minor: Rank
    incarnation: Id
    nonce: Id
    "fresh for every link; both go into the proofs"
    authentication: Annotated[str, Meta(max_length=32)] = AUTH_NONE
    digest: Annotated[bytes, Meta(max_length=32)] = b""
    "of the layout that this side produces or consumes, so that equal ones need no comparing; empty with a secret"


@final
class Proof(_Message, frozen=True, kw_only=True, tag=2):
    """HMAC-SHA256 under the shared secret, over the role and both HELLO frames."""

    mac: Annotated[bytes, Meta(min_length=32, max_length=32)]


# ---- phase two


@final
class Welcome(_Message, frozen=True, kw_only=True, tag=3):
    """Who this side is and what it can do. The link is open once both have been received."""

    name: Text = ""
    "for people and logs"
    mover: Text
    description: Descriptor = b""
    "the mover's own description of this side, without any memory"
    produces: Descriptor = b""
    "encoded layout of what this side sends, empty when it sends nothing"
    consumes: Descriptor = b""
    "encoded layouts of what this side takes, one destination rank after another, empty when it takes nothing"
    shard: Rank = 0
    shards: Annotated[int, Meta(ge=1, lt=1 << 16)] = 1
    max_frame_bytes: Count = _L.max_frame_bytes
    liveness_ms: Milliseconds = 5000
    "this side gives the link up after so long a silence"


@final
class AttachmentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Declares a small named tensor or value that travels with a handoff."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    dtype: Annotated[str, Meta(max_length=16)]
    "one of attachments.DTYPES"
    shape: Annotated[tuple[Count, ...], Meta(max_length=8)] = ()
    required: bool = False
    "the consumer refuses the handoff when it does not know this name"


@final
class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """A declared attachment with its value."""

    spec: AttachmentSpec
    data: Annotated[bytes, Meta(max_length=_L.max_attachment_bytes)]
    "little-endian, dense, row-major"


@final
class Offer(_Message, frozen=True, kw_only=True, tag=10):
    """Producer: here is a shard of a handoff; where may it land?"""

    handoff: Id
    manifest: Manifest
    attachments: Annotated[tuple[Attachment, ...], Meta(max_length=_L.max_attachments)] = ()
    declares: Annotated[tuple[AttachmentSpec, ...], Meta(max_length=_L.max_attachments)] = ()
    "attachments whose values come with COMMIT"
    queue_ms: Milliseconds = 0
    "how long the producer will wait for memory; 0: not at all"
    digest: bool = False
    "COMMIT will carry a payload digest"
    traceparent: Annotated[str, Meta(max_length=64)] = ""


class GrantedRank(NamedTuple):
    """Landing memory on one consumer rank: extents in the order of the manifest's pieces."""

    destination: Rank
    extents: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=_L.max_extents)]
    "(address, length) pairs"
    description: Descriptor
    "the mover's own description of exactly these extents"


@final
class Grant(_Message, frozen=True, kw_only=True, tag=11):
    """Consumer: write this shard here, under this generation, and give a sign of life within each lease."""

    handoff: Id
    generation: Generation
    shard: Rank
    lease_ms: Milliseconds
    start_token: Count = 0
    "rows before it are held by the consumer already"
    ranks: Annotated[tuple[GrantedRank, ...], Meta(max_length=_L.max_ranks)] = ()


@final
class Queued(_Message, frozen=True, kw_only=True, tag=12):
    """Consumer: no memory yet; so many handoffs stand before this one."""

    handoff: Id
    position: Count
    "0: next in line"
    waiting: Count = 0
    "handoffs in the queue, this one included"


@final
class Refuse(_Message, frozen=True, kw_only=True, tag=13):
    """Consumer: this handoff will not be granted."""

    handoff: Id
    code: Code
    reason: Text
    retry_after_ms: Milliseconds = 0


@final
class Progress(_Message, frozen=True, kw_only=True, tag=14):
    """Producer: these rows have landed, as the mover reported. Renews the lease."""

    handoff: Id
    generation: Generation
    shard: Rank
    spans: Annotated[tuple[Span, ...], Meta(max_length=_L.max_entries)]


@final
class Renew(_Message, frozen=True, kw_only=True, tag=15):
    """Producer: nothing landed, but this shard is alive."""

    handoff: Id
    generation: Generation
    shard: Rank


@final
class Restart(_Message, frozen=True, kw_only=True, tag=16):
    """Producer: it lost its source rows; what has landed of this shard is void and comes anew under the same grant."""

    handoff: Id
    generation: Generation
    shard: Rank


@final
class Commit(_Message, frozen=True, kw_only=True, tag=17):
    """Producer: every row of this shard has landed and nothing of it is in flight any more."""

    handoff: Id
    generation: Generation
    shard: Rank
    manifest_digest: Id
    nbytes: Count
    payload_digest: Annotated[bytes, Meta(max_length=8)] = b""
    "64-bit little-endian, empty when not computed"
    attachments: Annotated[tuple[Attachment, ...], Meta(max_length=_L.max_attachments)] = ()


@final
class Ready(_Message, frozen=True, kw_only=True, tag=18):
    """Consumer: every shard has landed and was checked; the source may be released."""

    handoff: Id
    generation: Generation


@final
class Failed(_Message, frozen=True, kw_only=True, tag=19):
    """Either side: the handoff ended because something went wrong."""

    handoff: Id
    generation: Count = 0
    "0: before any grant"
    shard: Rank = 0
    code: Code
    reason: Text
    drained: bool = False
    "the sender of this message has no write of this shard in flight"


@final
class Cancel(_Message, frozen=True, kw_only=True, tag=20):
    """Either side: the handoff ended on purpose."""

    handoff: Id
    generation: Count = 0
    shard: Rank = 0
    reason: Text
    drained: bool = False


@final
class Drained(_Message, frozen=True, kw_only=True, tag=21):
    """Producer: it will write no more of this shard. Sent again over a later link to the same consumer incarnation."""

    handoff: Id
    generation: Count
    "0: whatever was granted; the producer never saw a GRANT"
    shard: Rank


@final
class Ping(_Message, frozen=True, kw_only=True, tag=30):
    """Are you there?"""

    number: Count


@final
class Pong(_Message, frozen=True, kw_only=True, tag=31):
    """Yes."""

    number: Count


@final
class Draining(_Message, frozen=True, kw_only=True, tag=32):
    """This side takes no new handoffs; those under way go on."""


@final
class Bye(_Message, frozen=True, kw_only=True, tag=33):
    """The link ends now."""

    code: Code = 0
    "0: nothing is wrong"
    reason: Text = ""


Message = (
    Hello
    | Proof
    | Welcome
    | Offer
    | Grant
    | Queued
    | Refuse
    | Progress
    | Renew
    | Restart
    | Commit
    | Ready
    | Failed
    | Cancel
    | Drained
    | Ping
    | Pong
    | Draining
    | Bye
)
