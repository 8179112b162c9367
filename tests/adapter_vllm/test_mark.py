from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdhandoff.ids import HandoffId
from pdhandoff.runtime.address import Address
from pdhandoff_vllm.config import read_config
from pdhandoff_vllm.mark import KEY, Claim, Refusal, answer, read_mark

CONFIG = read_config({"allow": ["10.0.0.0/8", "decode-7:5556"], "tilert_host": "decode-7", "queue_s": 12})
ALLOWED = CONFIG.destinations()
HANDOFF = "0123456789ABCDEFfedcba9876543210"


def read(params: object) -> Claim | Refusal | None:
    return read_mark(params, CONFIG, ALLOWED)


def claim(params: object) -> Claim:
    found = read(params)
    assert isinstance(found, Claim), found
    return found


def refusal(params: object) -> Refusal:
    found = read(params)
    assert isinstance(found, Refusal), found
    return found


def test_our_own_mark() -> None:
    found = claim({KEY: {"consumer": "10.1.2.3:7000", "handoff": HANDOFF, "queue_s": 3, "traceparent": "00-a-b-01"}})
    assert found == Claim(
        handoff=HandoffId.parse(HANDOFF.lower()),
        consumer=Address("10.1.2.3", 7000),
        queue_s=3,
        traceparent="00-a-b-01",
    )


def test_what_a_mark_leaves_out() -> None:
    first, second = claim({KEY: {}}), claim({KEY: {}})
    assert first.consumer == Address("decode-7", 5556)
    assert first.queue_s == 12
    assert first.handoff != second.handoff


def test_the_published_mark() -> None:
    assert claim({"tilert_host": "10.9.9.9", "tilert_ctrl_port": 5600}).consumer == Address("10.9.9.9", 5600)
    assert claim({"tilert_host": "10.9.9.9", "tilert_ctrl_port": "5600"}).consumer == Address("10.9.9.9", 5600)
    assert claim({"tilert_host": "10.9.9.9"}).consumer == Address("10.9.9.9", 5556)
    assert claim({"tilert_ctrl_port": 5556}).consumer == Address("decode-7", 5556)


def test_other_connectors_keys_are_theirs() -> None:
    theirs = {"do_remote_decode": True, "remote_engine_id": None, "transfer_id": "x"}
    assert read(theirs) is None
    assert claim({**theirs, "tilert_host": "10.9.9.9"}).consumer.host == "10.9.9.9"
    nothings: tuple[object, ...] = (None, {}, [], "pdhandoff", 3)
    assert [read(nothing) for nothing in nothings] == [None] * 5


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        (3, "object"),
        (None, "object"),
        ([], "object"),
        ({"consumer": 5}, "consumer"),
        ({"consumer": "10.1.2.3"}, "host:port"),
        ({"consumer": "10.1.2.3:99999"}, "host:port"),
        ({"consumer": "x" * 300}, "consumer"),
        ({"handoff": "job-1"}, "handoff"),
        ({"handoff": "g" * 32}, "handoff"),
        ({"queue_s": "long"}, "queue_s"),
        ({"queue_s": -1}, "queue_s"),
        ({"traceparent": "x" * 65}, "traceparent"),
        ({"consumr": "10.1.2.3:7000"}, "consumr"),
    ],
)
def test_a_malformed_mark_is_refused_in_words(mark: object, says: str) -> None:
    assert says in refusal({KEY: mark}).reason


@pytest.mark.parametrize("host", ["169.254.169.254", "metadata.internal", "8.8.8.8", "decode-8", "2001:db8::1"])
def test_T089_a_host_that_is_not_on_the_list_is_refused(host: str) -> None:
    found = refusal({"tilert_host": host, "tilert_ctrl_port": 5556})
    assert "allow-list" in found.reason
    assert found.consumer == str(Address(host, 5556))
    assert "allow-list" in refusal({KEY: {"consumer": "decode-7:5557"}}).reason


def test_a_port_out_of_range_is_refused() -> None:
    assert "tilert_ctrl_port" in refusal({"tilert_host": "10.1.2.3", "tilert_ctrl_port": 70_000}).reason
    assert "tilert_host" in refusal({"tilert_host": ["10.1.2.3"]}).reason


def test_nobody_named_at_all() -> None:
    config = read_config({"allow": ["10.0.0.0/8"]})
    found = read_mark({KEY: {}}, config, config.destinations())
    assert isinstance(found, Refusal)
    assert "no consumer" in found.reason


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40) | st.binary(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
        max_leaves=8,
    )
)
def test_no_mark_raises(value: Any) -> None:
    read(value)
    read({KEY: value})
    read({"tilert_host": value, "tilert_ctrl_port": value})


def test_the_answer_has_one_key() -> None:
    sent = answer(handoff="aa", consumer="c:1", prompt_tokens=3, first_token=9)
    assert sent == {
        KEY: {
            "handoff": "aa",
            "consumer": "c:1",
            "prompt_tokens": 3,
            "first_token": 9,
            "status": "sent",
            "reason": "",
        }
    }
    failed = answer(handoff="", consumer="", prompt_tokens=3, first_token=None, reason="why")[KEY]
    assert (failed["status"], failed["reason"]) == ("failed", "why")
