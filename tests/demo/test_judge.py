"""What the demo calls a success."""

from __future__ import annotations

import pytest

from pdhandoff.demo.run import RequestResult, judge
from pdhandoff.errors import ErrorCode


def result(**changes: object) -> RequestResult:
    fields: dict[str, object] = {
        "number": 0,
        "handoff": "00" * 16,
        "prompt_tokens": 3,
        "chunks": 1,
        "nbytes": 9,
        "code": 0,
        "reason": "",
        "identical": True,
        "tokens": [1],
        "drafts_accepted_first_step": 0,
        "steps": 1,
        "cold_start": False,
    }
    return RequestResult(**(fields | changes))  # type: ignore[arg-type]


REFUSED = result(code=int(ErrorCode.DIGEST_MISMATCH), identical=None, tokens=[])


@pytest.mark.parametrize(
    ("results", "held", "corrupt", "ok"),
    [
        ([result()], {}, False, True),
        ([result(identical=False)], {}, False, False),
        ([result()], {"decode.landing_bytes_held": 4096}, False, False),
        ([result(code=int(ErrorCode.LINK_LOST), identical=None)], {}, False, False),
        ([REFUSED, result()], {}, True, True),
        ([result()], {}, True, False),  # the flipped byte was not noticed
        ([REFUSED, result(identical=False)], {}, True, False),
        ([REFUSED], {}, False, False),
    ],
)
def test_a_run_is_ok_only_when_it_is_what_was_promised(
    results: list[RequestResult], held: dict[str, int], corrupt: bool, ok: bool
) -> None:
    assert judge(results, held, corrupt=corrupt)[0] is ok
