"""Running rules against a mover."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, Final, final

import msgspec

from pdhandoff.engines.base import MemoryKind, Mover, MoverCapabilities
from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.testing.lines import EndedError, LineProcess, SilentError
from pdhandoff.testing.loading import spell
from pdhandoff.testing.place import Place
from pdhandoff.testing.report import Report, Result, Verdict
from pdhandoff.testing.rule import Rule, Sizes
from pdhandoff.testing.rules import ALL_RULES

__all__ = ["choose", "missing_memory", "pick", "run_conformance"]

_START_S: Final = 60.0
"within which a process that makes its first mover answers"
_SLACK_S: Final = 5.0
_TAIL_LINES: Final = 25


def choose(numbers: Sequence[str]) -> tuple[Rule, ...]:
    """Rules by number, in their own order; all without any. Raises LocalError (CONFIG) for one that does not exist."""
    return pick(ALL_RULES, numbers)


def pick(rules: Sequence[Rule], numbers: Sequence[str]) -> tuple[Rule, ...]:
    """As `choose`, out of any rules."""
    known = [rule.number for rule in rules]
    unknown = [number for number in numbers if number not in known]
    if unknown:
        raise LocalError(
            ErrorCode.CONFIG, f"there is no rule {', '.join(unknown)}: known are {known[0]} to {known[-1]}"
        )
    return tuple(rule for rule in rules if not numbers or rule.number in numbers)


def run_conformance(
    mover: str | Callable[..., Mover],
    *,
    rules: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    sizes: Sizes | None = None,
    memory: MemoryKind = MemoryKind.CPU,
    device: int = 0,
    on_result: Callable[[Result], None] = lambda _: None,
) -> Report:
    """Check a mover against the rules, between processes of this machine.

    Arguments:
        mover: its registered name, `module:factory`, or a factory at the top of an importable module.
        rules: their numbers; none: all.
        options: keyword arguments of the factory; they must be expressible in JSON.
        sizes: how much to move and how long to wait.
        memory: kind of all memory that is written and read.
        device: CUDA device ordinal of it.
        on_result: called after each rule.

    Returns:
        One result for each rule. A rule whose capability the mover does not claim is skipped; so is every rule where
        there is no memory of that kind, or the mover does not claim it.

    Raises:
        LocalError: CONFIG, when the mover cannot be made, or a rule does not exist.
    """
    chosen = choose(rules)
    name = spell(mover)
    with tempfile.TemporaryFile() as errors:
        hosts = _Hosts(name, dict(options or {}), sizes or Sizes(), Place(memory, device), errors)
        try:
            capabilities = hosts.start()
            missing = missing_memory(memory, device, capabilities)
            results: list[Result] = []
            for rule in chosen:
                skipped = _result(rule, Verdict.SKIP, missing)
                results.append(skipped if missing else _run_rule(rule, capabilities, hosts))
                on_result(results[-1])
        finally:
            hosts.end()
    return Report(subject=name, results=tuple(results))


@final
class _Hosts:
    """The process in which checks run, and its successors."""

    def __init__(self, name: str, options: dict[str, object], sizes: Sizes, place: Place, errors: BinaryIO) -> None:
        self._arguments = (name, json.dumps(options), msgspec.json.encode(sizes).decode(), place.spell())
        self._rule_s = sizes.rule_s
        self._errors = errors
        self._process: LineProcess | None = None

    def start(self) -> MoverCapabilities:
        """Start one, if there is none. Raises LocalError when it cannot make the mover."""
        if self._process is None:
            self._process = LineProcess("pdhandoff.testing.host", *self._arguments, errors=self._errors, group=True)
        try:
            answer = self._process.ask({"do": "hello"}, _START_S)
        except (SilentError, EndedError) as error:
            raise LocalError(ErrorCode.CONFIG, f"the mover {self._arguments[0]} cannot be made: {error}") from error
        if "refused" in answer:
            raise LocalError(answer["code"], answer["refused"])
        return msgspec.convert(answer["capabilities"], MoverCapabilities)

    def check(self, rule: Rule) -> dict[str, Any]:
        """What the host says. Raises SilentError or EndedError when it hangs or ends; the next call starts another."""
        if self._process is None:
            self.start()
        if self._process is None:
            raise LocalError(ErrorCode.INTERNAL, "no process was started")
        try:
            return self._process.ask({"do": "check", "rule": rule.number}, self._rule_s + _SLACK_S)
        except (SilentError, EndedError):
            self._kill()
            raise

    def tail(self) -> str:
        """The last lines on standard error."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def end(self) -> None:
        """End everything."""
        if self._process is not None:
            self._process.end()
            self._process = None


def missing_memory(memory: MemoryKind, device: int, capabilities: MoverCapabilities) -> str:
    """Why nothing can be checked in this kind of memory; empty when it can."""
    if memory not in capabilities.memory_kinds:
        return f"the mover does not claim {memory.value} memory"
    if memory is MemoryKind.CPU:
        return ""
    from pdhandoff.testing.gpu import no_gpu  # only where it is asked for

    return no_gpu(device)


def _run_rule(rule: Rule, capabilities: MoverCapabilities, hosts: _Hosts) -> Result:
    if rule.need is not None and not rule.need.met_by(capabilities):
        reason = f"`{rule.need.capability}` is not claimed; instead, {rule.need.instead}"
        return _result(rule, Verdict.SKIP, reason)
    try:
        answer = hosts.check(rule)
    except (SilentError, EndedError) as error:
        return _result(rule, Verdict.FAIL, f"the check ended with its process: {error}", detail=hosts.tail())
    verdict = Verdict.FAIL if answer["problem"] else Verdict.PASS
    return _result(rule, verdict, answer["problem"], elapsed_s=answer["elapsed_s"])


def _result(rule: Rule, verdict: Verdict, reason: str, *, detail: str = "", elapsed_s: float = 0.0) -> Result:
    return Result(
        rule=rule.number,
        title=rule.title,
        must=rule.must,
        verdict=verdict,
        reason=reason,
        detail=detail,
        elapsed_s=elapsed_s,
    )
