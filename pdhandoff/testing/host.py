"""Where checks run: a process of its own, so that a mover that hangs or crashes fails one rule and not the whole run.

`python -m pdhandoff.testing.host NAME OPTIONS SIZES PLACE`, options and sizes as JSON objects. Commands: `hello`, and
`check` with a rule's number.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from typing import Any, final

import msgspec

from pdhandoff.errors import PdHandoffError
from pdhandoff.testing.bench import Bench
from pdhandoff.testing.lines import EndedError, SilentError, serve
from pdhandoff.testing.place import Place
from pdhandoff.testing.rule import Rule, Sizes, Violation
from pdhandoff.testing.rules import ALL_RULES

__all__ = ["Host", "main"]


@final
class Host:
    """Runs one check after the other."""

    def __init__(self, name: str, options: dict[str, object], sizes: Sizes, place: Place) -> None:
        self._name = name
        self._options = options
        self._sizes = sizes
        self._place = place
        self._bench: Bench | None = None
        self._rules = {rule.number: rule for rule in ALL_RULES}

    def act(self, command: dict[str, Any]) -> dict[str, Any]:
        """Answer one command."""
        if command["do"] == "hello":
            return self._hello()
        start = time.monotonic()
        faulthandler.dump_traceback_later(self._sizes.rule_s, exit=True)
        problem = self._check(self._rules[command["rule"]])
        faulthandler.cancel_dump_traceback_later()
        return {"problem": problem, "elapsed_s": time.monotonic() - start}

    def _hello(self) -> dict[str, Any]:
        try:
            self._bench = Bench(self._name, self._options, self._sizes, self._place)
        except PdHandoffError as error:
            return {"refused": error.reason, "code": int(error.code)}
        return {"name": self._bench.mover_name, "capabilities": msgspec.to_builtins(self._bench.capabilities)}

    def _check(self, rule: Rule) -> str:
        """Empty, or how the mover broke the rule."""
        if self._bench is None:
            return "`hello` comes first"
        problem = self._attempt(rule, self._bench)
        if problem:
            try:
                self._bench.abandon()
            except Exception as error:  # noqa: BLE001 - as below; the first problem is the one to show
                sys.stderr.write(f"closing after {rule.number}: {type(error).__name__}: {error}\n")
        return problem

    @staticmethod
    def _attempt(rule: Rule, bench: Bench) -> str:
        try:
            rule.check(bench)
            bench.give_back()
        except (SilentError, EndedError, Violation) as error:
            return str(error)
        except PdHandoffError as error:
            return f"the mover refused what it should do: {error.reason}"
        except Exception as error:  # noqa: BLE001 - the process's boundary: whatever a mover raises is its verdict
            return f"a call raised {type(error).__name__} ({error}), not MoverError"
        return ""

    def close(self) -> None:
        """End the other processes."""
        if self._bench is not None:
            self._bench.close()


def main() -> None:
    """Obey until standard input ends."""
    faulthandler.enable()
    name, options, sizes, place = sys.argv[1:5]
    host = Host(name, json.loads(options), msgspec.json.decode(sizes, type=Sizes), Place.parse(place))
    serve(host.act)
    host.close()


if __name__ == "__main__":
    main()
