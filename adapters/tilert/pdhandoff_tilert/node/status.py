"""The status page: what a router, or a person, wants to know of a node."""

from __future__ import annotations

from typing import final

import msgspec

import pdhandoff
from pdhandoff_tilert.node.job import Stage
from pdhandoff_tilert.node.line import Waiting
from pdhandoff_tilert.node.refusals import code_name
from pdhandoff_tilert.node.service import Service

__all__ = ["Landing", "NodeStatus", "RecentFailure", "node_status"]


@final
class Landing(msgspec.Struct, frozen=True, kw_only=True):
    """Landing memory in bytes, and the handoffs in it."""

    total_bytes: int
    free_bytes: int
    granted_bytes: int
    ending_bytes: int
    "of ended handoffs whose writers or readers are not gone yet"
    quarantined_bytes: int
    "of those, what only a proof that the writer has ended can free"
    states: dict[str, int]
    "state -> handoffs"
    queue: int
    "handoffs that wait for landing memory"
    ready: int
    "complete and checked handoffs since the start"
    failed: dict[str, int]
    "error code -> handoffs that ended with it"


@final
class RecentFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One of the last requests that failed."""

    request_id: str
    status: int
    code: str
    reason: str
    ago_s: float


@final
class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node at one moment."""

    version: str
    state: str
    "serving, draining or unhealthy"
    reason: str
    "why it is not serving"
    model: str
    max_seq_len: int
    "tokens of one request, prompt and output"
    control: str
    "control address, as producers reach it"
    mover: str
    incarnation: str
    layout: str
    "name of the engine's layout"
    layout_digest: str
    uptime_s: float
    max_queue: int
    "requests that may wait"
    queued: int
    "requests that wait"
    parking: int
    "requests that may be parked"
    running: Waiting | None
    "the request that decodes"
    queue: list[Waiting]
    "the others, in order of admission"
    landing: Landing | None
    "None: the consumer does not answer"
    recent_failures: list[RecentFailure]
    "the newest first"


def node_status(service: Service) -> NodeStatus:
    """Read everything off. May take a second when the consumer does not answer."""
    line = service.line.show()
    running = next((each for each in line if each.stage == Stage.DECODING.value), None)
    waiting = [each for each in line if each is not running]
    problem = service.problem()
    now = service.clock()
    state = "serving" if not problem else "draining" if problem == "draining" else "unhealthy"
    return NodeStatus(
        version=pdhandoff.__version__,
        state=state,
        reason=problem,
        model=service.engine.model,
        max_seq_len=service.engine.max_seq_len,
        control=service.control,
        mover=service.settings.mover,
        incarnation=str(service.consumer.incarnation),
        layout=service.engine.layout.name,
        layout_digest=service.digest,
        uptime_s=round(now - service.started_s, 3),
        max_queue=service.line.most,
        queued=len(waiting),
        parking=service.settings.parking,
        running=running,
        queue=waiting,
        landing=_landing(service),
        recent_failures=[
            RecentFailure(
                request_id=failure.request_id,
                status=failure.status,
                code=failure.code,
                reason=failure.reason,
                ago_s=round(now - failure.at_s, 3),
            )
            for failure in reversed(list(service.failures))
        ],
    )


def _landing(service: Service) -> Landing | None:
    statistics = service.landing_statistics()
    if statistics is None:
        return None
    book = statistics.book
    return Landing(
        total_bytes=book.total_bytes,
        free_bytes=book.free_bytes,
        granted_bytes=book.granted_bytes,
        ending_bytes=book.ending_bytes,
        quarantined_bytes=book.quarantined_bytes,
        states=statistics.states,
        queue=statistics.queue,
        ready=statistics.ready,
        failed={code_name(code): count for code, count in statistics.failed.items()},
    )
