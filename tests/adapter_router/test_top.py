from __future__ import annotations

import pytest

from pdhandoff.cli import main
from support.router_fakes import Stack


@pytest.mark.slow
def test_top_shows_the_nodes_of_a_router_and_says_when_one_is_not_serving(capsys: pytest.CaptureFixture[str]) -> None:
    with Stack(2) as stack:
        failure = {"request_id": "req-9", "status": 502, "code": "LINK_LOST", "reason": "gone", "ago_s": 3.0}
        landing = {"total_bytes": 4 << 20, "free_bytes": 1 << 20, "states": {}, "ready": 7, "failed": {"LINK_LOST": 2}}
        stack.nodes[0].status |= {"recent_failures": [failure], "landing": landing}
        assert main(["top", "--once", stack.served.url]) == 0
        shown = capsys.readouterr().out
        for word in ("serving", "3.0/4", "req-9", "LINK_LOST"):
            assert word in shown
        stack.nodes[1].status |= {"state": "draining"}
        assert main(["top", "--once", *(node.url for node in stack.nodes)]) == 1
        assert "draining" in capsys.readouterr().out


def test_top_refuses_what_is_no_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "127.0.0.1:5557"]) == 1
    assert "is no URL" in capsys.readouterr().err
