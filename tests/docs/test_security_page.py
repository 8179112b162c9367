"""The commands on the security page make certificates that work."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pdhandoff import TlsConfig
from support.engines import Pair

PAGE = (Path(__file__).parents[2] / "docs/security.md").read_text(encoding="utf-8")


def test_the_commands_for_certificates_make_ones_that_work(tmp_path: Path) -> None:
    shell, openssl = shutil.which("sh"), shutil.which("openssl")
    if shell is None or openssl is None:
        pytest.skip("openssl is not installed")
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    subprocess.run([shell, "-euc", block], cwd=tmp_path, check=True, capture_output=True, timeout=60)

    def settings(name: str, *names: str) -> TlsConfig:
        at = tmp_path / name
        return TlsConfig(ca=str(tmp_path / "ca.pem"), certificate=f"{at}.pem", key=f"{at}.key", names=names or None)

    with Pair(consumer={"tls": settings("decode-7", "prefill-1")}, producer={"tls": settings("prefill-1")}) as pair:
        pair.hand_off(1, 20)
