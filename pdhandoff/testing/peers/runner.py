"""Running rules against a consumer that is there already."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pdhandoff.engines.base import MemoryKind
from pdhandoff.errors import ErrorCode, LocalError, PdHandoffError
from pdhandoff.ids import HandoffId
from pdhandoff.protocol.messages import Grant
from pdhandoff.runtime.address import parse_address
from pdhandoff.runtime.tls import Tls, TlsConfig
from pdhandoff.testing.loading import make_mover
from pdhandoff.testing.peers.handoffs import Announced, SkipRule
from pdhandoff.testing.peers.meeting import meet
from pdhandoff.testing.peers.patience import Patience
from pdhandoff.testing.peers.rows import Rows
from pdhandoff.testing.peers.rules import ALL_PEER_RULES
from pdhandoff.testing.peers.rules.memory import RULES as MEMORY_RULES
from pdhandoff.testing.peers.visit import Visit, name_of
from pdhandoff.testing.report import Report, Result, Verdict
from pdhandoff.testing.rule import Rule, Violation
from pdhandoff.testing.runner import missing_memory, pick

__all__ = ["ATTACHMENTS", "choose_peer_rules", "run_peer_conformance"]

ATTACHMENTS: Final = (("first_token", 1), ("last_token", 1))
"what decode engines usually ask for; a consumer that does not know them keeps them"


def choose_peer_rules(numbers: Sequence[str]) -> tuple[Rule, ...]:
    """Rules by number, in their own order; all without any. Raises LocalError (CONFIG) for one that does not exist."""
    return pick(ALL_PEER_RULES, numbers)


def run_peer_conformance(
    address: str,
    *,
    rules: Sequence[str] = (),
    mover: str | None = None,
    options: Mapping[str, object] | None = None,
    secret: bytes | None = None,
    tls: TlsConfig | None = None,
    handoffs: Sequence[HandoffId] = (),
    announce: Callable[[Sequence[HandoffId]], None] | None = None,
    attachments: Sequence[tuple[str, int]] = ATTACHMENTS,
    memory: MemoryKind = MemoryKind.CPU,
    device: int = 0,
    patience: Patience | None = None,
    on_result: Callable[[Result], None] = lambda _: None,
) -> Report:
    """Check a running consumer against the rules, as its producers.

    Arguments:
        address: its control address.
        rules: their numbers; none: all.
        mover: what rows are written with: a registered name or `module:factory`. Default: what the consumer says.
        options: keyword arguments of the mover's factory.
        secret: shared with the consumer.
        tls: certificates of the control link.
        handoffs: ids that the consumer waits for; each is used once.
        announce: called with new ids, returns when the consumer waits for them. Without either, a consumer that takes
            unannounced offers is checked in full, and of another one what needs no announced handoff.
        attachments: names and values of 64-bit integers that go with every offer.
        memory: kind of the memory that rows are written from.
        device: CUDA device ordinal of it.
        patience: sizes and times.
        on_result: called after each rule.

    Returns:
        One result for each rule.

    Raises:
        LocalError: there is no consumer, it does not let the check in, a rule does not exist, or the mover cannot be
            made.
    """
    chosen = choose_peer_rules(rules)
    patient = patience or Patience()
    where = parse_address(address)
    met = meet(where, secret=secret, tls=None if tls is None else Tls(tls), within_s=patient.answer_s)
    name, chosen_options = mover or met.target.welcome.mover, dict(options or {})
    engine = make_mover(name, chosen_options)
    try:
        if engine.name != met.target.welcome.mover:
            raise LocalError(
                ErrorCode.MOVER_MISMATCH,
                f"{address} moves bytes by {met.target.welcome.mover!r}, {name} is {engine.name!r}: name the same",
            )
        unusable = missing_memory(memory, device, engine.capabilities)
        if unusable:
            raise LocalError(ErrorCode.CONFIG, f"rows cannot be written from {memory.value} memory: {unusable}")
        rows = Rows(engine, met.layout, kind=memory, device=device, settle_s=patient.answer_s)
        visit = Visit(met.target, rows, Announced(handoffs, announce), patient, attachments)
        visit.new_mover = lambda: make_mover(name, chosen_options)
        _look_around(visit, weigh=any(rule in MEMORY_RULES for rule in chosen))
        results: list[Result] = []
        for rule in chosen:
            results.append(_run_rule(rule, visit))
            on_result(results[-1])
    finally:
        engine.close()
    return Report(subject=address, rules="consumers", results=tuple(results))


def _look_around(visit: Visit, *, weigh: bool) -> None:
    """Whether unannounced offers are taken, and how much memory there is."""
    try:
        if visit.announced.silent:
            _try_unannounced(visit)
        if weigh and visit.announced.endless:
            line = visit.open()
            visit.capacity = sum(held.nbytes for held in visit.fill(line))
    except (Violation, SkipRule) as error:  # the rules will say what is wrong
        visit.announced.why_not += f" ({error})"
    finally:
        visit.tidy()


def _try_unannounced(visit: Visit) -> None:
    line = visit.open()
    handoff = HandoffId.mint()
    offer = visit.offer_of(handoff)
    line.say(offer)
    answer = visit.answer(line, handoff, "an answer to an offer that nobody announced")
    if isinstance(answer, Grant):
        visit.hold(line, offer, answer)
        visit.announced.accepts = True
    elif answer.code != ErrorCode.NOT_ANNOUNCED:
        visit.announced.why_not += f" (without, an offer is refused with {name_of(answer.code)}: {answer.reason})"


def _run_rule(rule: Rule, visit: Visit) -> Result:
    started = time.monotonic()
    verdict, reason = Verdict.PASS, ""
    try:
        try:
            rule.check(visit)
        finally:
            visit.tidy()
    except SkipRule as error:
        verdict, reason = Verdict.SKIP, str(error)
    except Violation as error:
        verdict, reason = Verdict.FAIL, str(error)
    except PdHandoffError as error:
        verdict, reason = Verdict.FAIL, error.reason
    elapsed_s = time.monotonic() - started
    return Result(
        rule=rule.number, title=rule.title, must=rule.must, verdict=verdict, reason=reason, elapsed_s=elapsed_s
    )
