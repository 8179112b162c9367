"""Topology A for real: a vLLM that prefills, a decode node with the same weights, the router, and real clients.

Every answer is compared with that of the same vLLM, asked directly and without a mark.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial

import anthropic
import openai
import pytest

from pdhandoff import HandoffId
from support.up import Up, ask, together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

APIS = ("chat", "completions", "responses", "messages")
TEXTS = ("?", "Why is the sky blue?", "A longer one, over the edge of a block. " * 9, "x" * 127, "y" * 300)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("topology-a")
    with Up(folder, "-m", "pdhandoff", "up", "topology-a", "--out", str(folder)) as up:
        yield up
    assert up.process.returncode == 130, up.output
    up.wait_gone()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
def test_answers_equal_those_of_vllm_alone(up: Up, api: str, stream: bool) -> None:
    for text in TEXTS:
        routed = ask(api, up.ready["url"], text, stream=stream)
        alone = ask(api, up.ready["prefill"], text, stream=stream)
        assert routed.headers["x-pdhandoff-path"] == "handoff"
        assert routed.same(alone), (routed, alone)
        assert len(routed.text) == 24
    up.idle()


def test_answers_equal_those_of_vllm_alone_by_curl(up: Up) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl: it is not installed here")
    body = json.dumps({"model": "tiny", "prompt": "curl asks", "max_tokens": 20, "temperature": 0})

    def post(url: str) -> str:
        command = [curl, "-sf", "-m", "60", f"{url}/v1/completions", "-H", "content-type: application/json", "-d", body]
        answer = subprocess.run(command, capture_output=True, check=True, timeout=90)
        text: str = json.loads(answer.stdout)["choices"][0]["text"]
        return text

    assert post(up.ready["url"]) == post(up.ready["prefill"])


def test_many_clients_at_once_get_the_answers_of_their_own(up: Up) -> None:
    texts = [f"client {number} asks " + "so much " * (7 * number) for number in range(12)]
    streamed = [number % 2 == 1 for number in range(len(texts))]
    url, prefill = up.ready["url"], up.ready["prefill"]
    routed = list(
        together(
            [
                partial(ask, APIS[number % 4], url, text, stream=streamed[number], max_tokens=8 + number)
                for number, text in enumerate(texts)
            ]
        )
    )
    for number, text in enumerate(texts):
        alone = ask(APIS[number % 4], prefill, text, stream=streamed[number], max_tokens=8 + number)
        assert routed[number].same(alone), (text, routed[number], alone)
    up.idle()


def test_T100_one_token_is_one_token(up: Up) -> None:
    for api in APIS:
        routed, alone = (ask(api, url, "one", max_tokens=1) for url in (up.ready["url"], up.ready["prefill"]))
        assert routed.same(alone), (routed, alone)
        assert routed.usage[1] == 1
    up.idle()


def test_a_proxy_of_two_legs_needs_no_router(up: Up) -> None:
    """vLLM's usual flow: prefill with max_tokens=1, pass what comes back on to decode."""
    prefill, decode = up.ready["prefill"], up.ready["decode"][0]
    for length in (1, 5, 128, 129, 600):
        prompt = [(7 * at + length) % 256 for at in range(length)]
        mark = {"pdhandoff": {"consumer": up.ready["controls"][0], "handoff": str(HandoffId.mint())}}
        first = up.generate(prefill, prompt, 1, mark)
        assert first["kv_transfer_params"]["pdhandoff"]["status"] == "sent"
        rest = up.generate(decode, prompt, 40, first["kv_transfer_params"])
        alone = up.generate(prefill, prompt, 40)
        assert rest["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
        assert rest["choices"][0]["token_ids"][:1] == first["choices"][0]["token_ids"]
    up.idle()


def test_what_is_refused_is_refused_as_the_apis_say(up: Up) -> None:
    with openai.OpenAI(base_url=f"{up.ready['url']}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="another", prompt="x")
        with pytest.raises(openai.BadRequestError, match="1024"):
            client.completions.create(model="tiny", prompt="x" * 1025, max_tokens=8)
    with (
        anthropic.Anthropic(base_url=up.ready["url"], api_key="none", max_retries=0) as other,
        pytest.raises(anthropic.NotFoundError),
    ):
        other.messages.create(model="another", max_tokens=8, messages=[{"role": "user", "content": "x"}])
    up.idle()


def test_a_client_cannot_mark_a_request_itself(up: Up) -> None:
    mark = {"pdhandoff": {"consumer": "127.0.0.1:9", "handoff": "0" * 32}}
    with openai.OpenAI(base_url=f"{up.ready['url']}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="tiny", prompt="mark", max_tokens=12, temperature=0, extra_body={"kv_transfer_params": mark}
        )
    assert answer.choices[0].text == ask("completions", up.ready["prefill"], "mark", max_tokens=12).text
    assert "0" * 32 not in answer.model_dump_json()


def test_clients_that_leave_in_the_middle_leave_nothing_behind(up: Up) -> None:
    with openai.OpenAI(base_url=f"{up.ready['url']}/v1", api_key="none", max_retries=0) as client:
        for number in range(3):
            with client.completions.create(
                model="tiny", prompt=f"leaving {number}", max_tokens=900, stream=True, temperature=0
            ) as events:
                next(iter(events))
    up.idle()
    assert ask("chat", up.ready["url"], "still here?").same(ask("chat", up.ready["prefill"], "still here?"))
