"""The command line of a node, its bounds against strangers, keys, certificates and addresses."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdhandoff import HandoffFailed, LocalError
from pdhandoff.cli import main
from pdhandoff_tilert.node.engines import find_engine
from support.certificates import Authority
from support.engines import DEADLINE_S, until
from support.node import ENVIRONMENT, Node, Sender, node_arguments

pytestmark = pytest.mark.slow

KEY = "a key of the deployment's"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node with an API key, and a secret on its control link."""
    folder = tmp_path_factory.mktemp("node")
    (folder / "key").write_text(KEY + "\n")
    (folder / "secret").write_text("s3cret\n")
    options = ("--api-key-file", str(folder / "key"), "--secret-file", str(folder / "secret"), "--log-json")
    with Node(folder, *options) as node:
        node.client.headers["authorization"] = f"Bearer {KEY}"
        yield node


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a node that is not expected to start."""
    engine = ("--engine", "support.node_engine:create")
    return subprocess.run(
        node_arguments(*arguments, engine=engine),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_is_listed() -> None:
    run = subprocess.run([sys.executable, "-m", "pdhandoff", "--help"], capture_output=True, text=True, check=True)
    assert "serve-decode" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "nothing"), "there is no engine 'nothing'"),
        (("--engine", "json:nothing"), "cannot be imported"),
        (("--engine", "json:dumps"), "cannot be made"),
        (("--engine", "json:loads", "--engine-arg", 's="[]"'), "lacks unsupported"),
        (("--mover", "nothing"), "there is no mover 'nothing'"),
        (("--listen", "nowhere"), "is no address"),
        (("--advertise", "nowhere"), "is no address"),
        (("--secret-file", "/nonexistent"), "cannot be read"),
        (("--http-key", "/nonexistent"), "belong together"),
        (("--tls-ca", "x"), "belong together"),
        (("--tls-name", "x"), "belong together"),
    ],
)
def test_a_wrong_setting_is_named(arguments: tuple[str, ...], words: str) -> None:
    run = serve(*arguments)
    assert run.returncode == 1
    assert words in run.stderr
    assert "Traceback" not in run.stderr


def test_a_factory_that_fails_is_named_and_its_fault_is_logged() -> None:
    run = serve("--engine", "json:loads", "--engine-arg", "s=3")
    assert run.returncode == 1
    *log, last = run.stderr.splitlines()
    assert last.startswith("pdhandoff: CONFIG: engine 'json:loads' (json:loads) cannot be made: TypeError")
    assert any("Traceback" in line for line in log)


@pytest.mark.parametrize(
    "arguments",
    [("--port", "x"), ("--port", "70000"), ("--max-queue", "0"), ("--arena-bytes", "1X"), ("--deadline", "-1")],
)
def test_a_value_of_the_wrong_kind_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    assert serve(*arguments).returncode == 2


@pytest.mark.parametrize("which", ["--port", "--listen"])
def test_T092_a_port_that_is_taken_is_named(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = serve(
            which, str(port) if which == "--port" else f"127.0.0.1:{port}", "--engine", "support.node_engine:create"
        )
    assert run.returncode == 1
    assert f":{port}" in run.stderr


def test_a_package_that_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else name)
    assert main(["serve-decode"]) == 1
    assert "needs uvicorn: pip install 'pdhandoff[node]'" in capsys.readouterr().err


def test_an_engine_is_found_by_name_and_made_later() -> None:
    made = find_engine("support.node_engine:create", {})
    assert made().model == "node-test"
    with pytest.raises(LocalError, match="wrong"):
        find_engine("support.node_engine:create", {"wrong": 1})


def test_only_who_has_the_key_gets_in(guarded: Node) -> None:
    for headers in ({"authorization": ""}, {"authorization": "Bearer wrong"}, {"authorization": KEY}):
        for method, path in (("POST", "/inference/v1/generate"), ("POST", "/drain"), ("GET", "/status")):
            response = guarded.client.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "AuthenticationError"
    for path in ("/health", "/metrics"):
        assert guarded.client.get(path, headers={"authorization": ""}).status_code == 200


def test_only_who_has_the_secret_hands_off(guarded: Node) -> None:
    with Sender(guarded.control, secret=b"s3cret") as sender:
        sent = sender.send()
        assert guarded.generate(sent.body()).json()["choices"][0]["token_ids"] == sent.tokens(8)
    with Sender(guarded.control, secret=b"wrong") as stranger:
        lost = stranger.send(queue_s=0.0)
        with pytest.raises(HandoffFailed, match="AUTHENTICATION"):
            lost.outgoing.wait(DEADLINE_S)


def test_logs_are_json_where_they_should_be(guarded: Node) -> None:
    with Sender(guarded.control, secret=b"s3cret") as sender:
        guarded.generate(sender.send().body(request_id="logged-id"))
    until(lambda: "logged-id" in guarded.log())
    lines = [json.loads(line) for line in guarded.log().splitlines()]
    (mine,) = [line for line in lines if "logged-id" in line["message"]]
    assert (mine["level"], mine["logger"]) == ("info", "pdhandoff.node")
    assert KEY not in guarded.log()


def ask(node: Node, *pieces: bytes) -> bytes:
    """Send raw bytes and read the head of the answer, or what comes before the connection ends."""
    with socket.create_connection((node.ready["host"], node.ready["port"]), DEADLINE_S) as link:
        link.settimeout(DEADLINE_S)
        answer = b""
        try:
            for piece in pieces:
                link.sendall(piece)
            while b"\r\n\r\n" not in answer and (received := link.recv(65536)):
                answer += received
        except (BrokenPipeError, ConnectionResetError):  # it had enough before all was sent
            pass
        return answer


HEAD = f"POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n".encode()


def test_heads_and_bodies_are_bounded(guarded: Node) -> None:
    limit = (1 << 20) + 48 * 512
    assert b" 413 " in ask(guarded, HEAD + f"content-length: {limit + 1}\r\n\r\n".encode(), b" " * (limit + 1))
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    assert b" 413 " in ask(guarded, HEAD + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 18)
    for long in (b"x: " + b"y" * 1_000_000 + b"\r\n\r\n", b"x: y\r\n" * 200_000 + b"\r\n"):
        assert re.match(rb"HTTP/1.1 4\d\d|$", ask(guarded, HEAD + long))
    assert b" 400 " in ask(guarded, b"\x16\x03\x01 no HTTP\r\n\r\n")
    assert guarded.client.get("/health").status_code == 200


def test_a_client_that_leaves_while_it_sends_its_body_leaves_nothing(guarded: Node) -> None:
    with socket.create_connection((guarded.ready["host"], guarded.ready["port"]), DEADLINE_S) as link:
        link.sendall(HEAD + b"content-length: 1000\r\n\r\n{")
    until(lambda: guarded.client.get("/health").status_code == 200)
    assert "Traceback" not in guarded.log()


def test_ipv6_https_and_mutual_tls_on_the_control_link(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, prefill = authority.issue("node", "::1", "127.0.0.1"), authority.issue("prefill")
    options = (
        *("--host", "::1", "--http-certificate", server.certificate, "--http-key", server.key),
        *("--tls-ca", server.ca, "--tls-certificate", server.certificate, "--tls-key", server.key),
        *("--allow", "127.0.0.0/8"),
    )
    with Node(tmp_path, *options, ca=server.ca) as node:
        assert node.ready["url"].startswith("https://[::1]:")
        with Sender(node.control, tls=prefill) as sender:
            sent = sender.send()
            assert node.generate(sent.body()).json()["choices"][0]["token_ids"] == sent.tokens(8)
        with Sender(node.control) as stranger, pytest.raises(HandoffFailed):
            stranger.send().outgoing.wait(DEADLINE_S)


def test_the_advertised_address_is_the_one_that_is_told(tmp_path: Path) -> None:
    with Node(tmp_path, "--advertise", "decode-7:5556") as node:
        assert node.control == node.status()["control"] == "decode-7:5556"
