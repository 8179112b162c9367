from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.layouts import RopeOrder
from pdhandoff.runtime.address import Address
from pdhandoff_vllm.config import read_config

PUBLISHED = {
    "tilert_host": "10.0.0.7",
    "tilert_ctrl_port": 5600,
    "tilert_model": "glm5",
    "tilert_max_seq_len": 131072,
    "tilert_transport": "mooncake",
}


def test_a_published_configuration_works_as_it_is() -> None:
    config = read_config(PUBLISHED)
    assert config.consumer == Address("10.0.0.7", 5600)
    assert (config.mover_name, config.model_name, config.tilert_max_seq_len) == ("mooncake", "glm5", 131072)
    assert config.allowed == ("10.0.0.7:5600",)


def test_defaults() -> None:
    config = read_config({"tilert_host": "decode-7"})
    assert config.consumer == Address("decode-7", 5556)
    assert (config.mover_name, config.staging, config.model_name, config.rope()) == ("nixl", "staged", None, None)
    assert not config.policy(other_spec_depth=False).other_spec_depth


def test_numbers_may_be_text() -> None:
    assert read_config({**PUBLISHED, "tilert_ctrl_port": "5601"}).tilert_ctrl_port == 5601


@pytest.mark.parametrize(("alias", "name"), [("GLM-5", "glm5"), ("deepseek-v3.2", "dsv32"), ("v32", "dsv32")])
def test_models_have_the_published_aliases(alias: str, name: str) -> None:
    assert read_config({**PUBLISHED, "tilert_model": alias}).model_name == name
    assert read_config({**PUBLISHED, "tilert_model": alias, "model": "mine"}).model_name == "mine"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"tilert_prot": 1}, "tilert_prot"),
        ({"tilert_ctrl_port": 0}, "tilert_ctrl_port"),
        ({"tilert_ctrl_port": 65_536}, "tilert_ctrl_port"),
        ({"tilert_ctrl_port": "a"}, "tilert_ctrl_port"),
        ({"tilert_model": "gpt"}, "tilert_model"),
        ({"tilert_max_seq_len": -1}, "tilert_max_seq_len"),
        ({"tilert_host": 7}, "tilert_host"),
        ({"tilert_host": "a b"}, "tilert_host"),
        ({"mover": "nixl", "tilert_transport": "mooncake"}, "tilert_transport"),
        ({"staging": "often"}, "staging"),
        ({"staging_bytes": 0}, "staging_bytes"),
        ({"allow": "10.0.0.0/8"}, "allow"),
        ({"allow": ["*"]}, "allow"),
        ({"allow": []}, "allow"),
        ({"accept": ["anything"]}, "accept"),
        ({"rope_order": "both"}, "rope_order"),
        ({"hold_s": 0}, "hold_s"),
        ({"queue_s": -1}, "queue_s"),
        ({"digest": "perhaps"}, "digest"),
        ({"mover_options": 3}, "mover_options"),
        ({"tls": {"ca": "x"}}, "tls"),
        ({"secret_file": "/nowhere/at/all"}, "secret_file"),
        ({"name": ""}, "name"),
    ],
)
def test_a_wrong_key_is_named(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(LocalError, match=named) as caught:
        read_config({**PUBLISHED, **keys})
    assert caught.value.code is ErrorCode.CONFIG


def test_somebody_must_be_allowed() -> None:
    with pytest.raises(LocalError, match="allow"):
        read_config({"mover": "loopback"})


def test_the_secret_is_what_the_file_holds(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(" s3cret\n", encoding="utf-8")
    assert read_config({**PUBLISHED, "secret_file": str(file)}).secret() == b"s3cret"
    assert read_config(PUBLISHED).secret() is None
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(LocalError, match=r"secret_file.*empty"):
        read_config({**PUBLISHED, "secret_file": str(file)})


def test_what_is_accepted() -> None:
    config = read_config({**PUBLISHED, "accept": ["cold_drafts"], "rope_order": "interleaved"})
    policy = config.policy(other_spec_depth=True)
    assert policy.cold_drafts
    assert policy.other_spec_depth
    assert config.rope() is RopeOrder.INTERLEAVED
