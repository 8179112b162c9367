"""What a node reads of a request, and what it refuses by name, before anything is announced."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdhandoff import HandoffId
from pdhandoff_tilert.node.refusals import Refusal
from pdhandoff_tilert.node.schema import Wanted, read_request

HANDOFF = str(HandoffId(bytes(range(16))))


def body(*, sampling: dict[str, Any] | None = None, mark: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "token_ids": [1, 2, 3],
        "sampling_params": {"temperature": 0, **(sampling or {})},
        "kv_transfer_params": {"pdhandoff": {"handoff": HANDOFF, **(mark or {})}},
        **more,
    }


def read(content: object, **options: Any) -> Wanted:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return read_request(data, **{"model": "m", "max_seq_len": 100, "deadline_s": 50.0, **options})


def asking(content: object) -> Wanted:
    """What is read, under one id."""
    return msgspec.structs.replace(read(content), request_id="")


def refused(content: object, **options: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read(content, **options)
    return caught.value


def test_what_is_asked_for_is_what_is_read() -> None:
    sampling = {"top_p": 0.5, "top_k": 7, "seed": 3, "stop_token_ids": [9], "max_tokens": 5, "min_tokens": 2}
    wanted = read(
        body(
            sampling=sampling,
            mark={"first_token": 8, "prompt_tokens": 3, "deadline_s": 2, "wait_s": 1},
            request_id="r",
            model="m",
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            return_token_ids=True,
        )
    )
    assert (wanted.request_id, str(wanted.handoff), wanted.deadline_s, wanted.wait_s) == ("r", HANDOFF, 2, 1)
    assert (wanted.stream, wanted.usage_at_end, wanted.usage_always, wanted.return_prompt) == (True, True, True, True)
    decode = wanted.decode
    assert (decode.prompt, decode.first_token, wanted.first_token) == ((1, 2, 3), 8, 8)
    assert (decode.temperature, decode.top_p, decode.top_k, decode.seed) == (0, 0.5, 7, 3)
    assert (decode.stop_token_ids, decode.max_tokens, decode.min_tokens) == (frozenset({9}), 5, 2)


def test_absent_sampling_parameters_have_the_defaults_of_vllm() -> None:
    decode = read({**body(), "sampling_params": {}}).decode
    assert (decode.temperature, decode.top_p, decode.top_k, decode.seed, decode.ignore_eos) == (1, 1, 0, None, False)
    assert read(body(sampling={"top_k": -1})).decode.top_k == 0


def test_T101_without_max_tokens_a_request_gets_all_that_fit() -> None:
    assert read(body()).decode.max_tokens == 97
    assert read(body(sampling={"max_tokens": None})).decode.max_tokens == 97


@pytest.mark.parametrize("length", [99, 100, 101])
def test_T024_a_prompt_needs_room_for_one_output_token(length: int) -> None:
    content = {**body(), "token_ids": [5] * length}
    if length == 99:
        assert read(content).decode.max_tokens == 1
    else:
        refusal = refused(content)
        assert (refusal.status, refusal.param) == (400, "token_ids")
        assert "100" in refusal.reason


def test_output_that_does_not_fit_is_refused() -> None:
    assert read(body(sampling={"max_tokens": 97})).decode.max_tokens == 97
    refusal = refused(body(sampling={"max_tokens": 98}))
    assert (refusal.status, refusal.param) == (400, "sampling_params.max_tokens")


def test_min_tokens_is_nothing_to_do_where_nothing_can_stop_the_output() -> None:
    assert read(body(sampling={"min_tokens": 4, "ignore_eos": True})).decode.min_tokens == 0
    assert read(body(sampling={"min_tokens": 1})).decode.min_tokens == 0
    assert read(body(sampling={"min_tokens": 4, "ignore_eos": True, "stop_token_ids": [1]})).decode.min_tokens == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 3),
        ("best_of", 2),
        ("use_beam_search", True),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("min_p", 0.1),
        ("stop", ["."]),
        ("stop", "."),
        ("logprobs", 0),
        ("logprobs", 5),
        ("prompt_logprobs", 0),
        ("logprob_token_ids", [1]),
        ("structured_outputs", {"json": "{}"}),
        ("logit_bias", {"3": 1.0}),
        ("allowed_token_ids", [1]),
        ("bad_words", ["no"]),
        ("repetition_detection", {"max_pattern_size": 3}),
        ("thinking_token_budget", 100),
        ("something_new", 7),
        ("watermarking", "yes"),
    ],
)
def test_T103_T104_T105_what_no_decode_node_honours_is_refused_by_name(name: str, value: object) -> None:
    refusal = refused(body(sampling={name: value}))
    assert refusal.status == 400
    assert refusal.param == f"sampling_params.{name}"
    assert name in refusal.reason


def test_what_asks_for_nothing_changes_nothing() -> None:
    """As vLLM's render endpoint writes it, and as clients spell defaults."""
    plain = body()
    for sampling in (
        {"stop": [], "stop_token_ids": [], "bad_words": [], "skip_reading_prefix_cache": False},
        {"n": 1, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0, "stop": None},
        {"logprobs": None, "detokenize": False, "output_kind": 2, "watermarking": True, "new": None},
    ):
        asked = {**plain, "sampling_params": {**plain["sampling_params"], **sampling}}
        assert asking(asked) == asking(plain)
    more = {"features": None, "token_offsets": [[0, 1]], "cache_salt": "x", "reasoning_ended": True}
    assert asking({**plain, **more, "ec_transfer_params": {}}) == asking(plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("seed", "x"),
        ("seed", 1 << 70),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", list(range(2000))),
        ("ignore_eos", "yes"),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: object) -> None:
    refusal = refused(body(sampling={name: value}))
    assert (refusal.status, refusal.param) == (400, f"sampling_params.{name}")


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    assert refused(body(sampling={"min_tokens": 5, "max_tokens": 4})).param == "sampling_params.min_tokens"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"features": {"mm_hashes": {"image": ["x"]}}}, "features"),
        ({"content_parts": [{"type": "image_url"}]}, "content_parts"),
        ({"ec_transfer_params": {"x": 1}}, "ec_transfer_params"),
        ({"output_mode": "text"}, "output_mode"),
        ({"priority": 3}, "priority"),
        ({"request_id": "a\r\nb"}, "request_id"),
        ({"request_id": "x" * 300}, "request_id"),
        ({"kv_transfer_params": None}, "kv_transfer_params.pdhandoff"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params.pdhandoff"),
        ({"kv_transfer_params": {"pdhandoff": {"handoff": "short"}}}, "kv_transfer_params.pdhandoff.handoff"),
        ({"kv_transfer_params": {"pdhandoff": {"handoff": "z" * 32}}}, "kv_transfer_params.pdhandoff.handoff"),
    ],
)
def test_what_a_node_cannot_do_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    refusal = refused({**body(), **more})
    assert (refusal.status, refusal.param) == (400, param)


@pytest.mark.parametrize("name", ["deadline_s", "wait_s"])
@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "1"])
def test_a_deadline_lies_ahead(name: str, seconds: object) -> None:
    assert refused(body(mark={name: seconds})).status == 400


def test_a_deadline_never_exceeds_the_nodes() -> None:
    assert read(body(mark={"deadline_s": 1e9})).deadline_s == 50.0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"token_ids": []}',
        b'{"token_ids": ["1"], "sampling_params": {}}',
        b'{"token_ids": [-1], "sampling_params": {}}',
        b'{"token_ids": [1e99], "sampling_params": {}}',
        b'{"token_ids": [1], "sampling_params": []}',
        b'{"token_ids": [1], "sampling_params": {"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    ],
)
def test_what_is_no_request_is_refused(data: bytes) -> None:
    assert refused(data).status == 400


def test_another_model_is_not_served() -> None:
    assert (refused(body(model="other")).status, refused(body(model="other")).code) == (404, "UNKNOWN_MODEL")


def test_a_prompt_of_another_length_than_the_mark_says_is_refused() -> None:
    refusal = refused(body(mark={"prompt_tokens": 4}))
    assert (refusal.status, refusal.code) == (409, "PROMPT_MISMATCH")


def test_a_handoff_that_the_prefill_side_calls_failed_is_not_waited_for() -> None:
    refusal = refused(body(mark={"status": "failed", "reason": "no pages"}))
    assert (refusal.status, refusal.retryable) == (502, True)
    assert "no pages" in refusal.reason


def test_what_the_prefill_side_returned_can_be_passed_on_as_it_is() -> None:
    wanted = read(
        body(mark={"consumer": "x:1", "prompt_tokens": 3, "first_token": 5, "status": "sent", "reason": None})
    )
    assert wanted.first_token == 5


def test_T096_request_ids_are_the_clients_and_name_no_handoff() -> None:
    assert read(body(request_id="job-1"), header_id="job-2").request_id == "job-2"
    assert read(body()).request_id != read(body()).request_id


def test_a_refusal_says_when_to_try_again() -> None:
    refusal = Refusal(429, "full", code="QUEUE_FULL", retryable=True, retry_after_s=1.2)
    assert refusal.headers == {"retry-after": "2"}
    assert refusal.body() == {
        "error": {
            "message": "full",
            "type": "TooManyRequestsError",
            "param": None,
            "code": 429,
            "pdhandoff": {"code": "QUEUE_FULL", "retryable": True},
        }
    }
