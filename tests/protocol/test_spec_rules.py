"""The specification and the code are held against one another."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdhandoff.protocol.manifest import Entry, Manifest
from pdhandoff.protocol.messages import Attachment, AttachmentSpec, GrantedRank
from pdhandoff.protocol.spans import Span
from support.strategies import MESSAGE_TYPES

ROOT = Path(__file__).parents[2]
RULES = (ROOT / "docs/spec/rules.md").read_text()
WIRE = (ROOT / "docs/spec/wire.md").read_text()
ROWS = re.findall(r"^\| (R\d+) \| (.+) \| `(\w+)` \|$", RULES, re.MULTILINE)
PARTS: tuple[Any, ...] = (Manifest, Entry, AttachmentSpec, Attachment, GrantedRank, Span)


def existing_tests() -> set[str]:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_rule_has_a_number_a_must_and_a_test_that_exists() -> None:
    assert [number for number, _, _ in ROWS] == [f"R{number}" for number in range(1, len(ROWS) + 1)]
    assert len(ROWS) == len(re.findall(r"^\| R\d+", RULES, re.MULTILINE))
    assert [number for number, sentence, _ in ROWS if "MUST" not in sentence] == []
    assert {name for _, _, name in ROWS} - existing_tests() == set()


@pytest.mark.parametrize("kind", [*MESSAGE_TYPES, *PARTS], ids=lambda kind: kind.__name__)
def test_every_message_and_field_is_on_the_wire_page(kind: Any) -> None:
    message = kind in MESSAGE_TYPES
    title = f"### {kind.__name__.upper()} ({kind.__struct_config__.tag})" if message else f"### {kind.__name__}"
    assert WIRE.count(f"{title}\n") == 1
    section = WIRE.split(f"{title}\n")[1].split("\n#")[0]
    documented = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    is_struct = issubclass(kind, msgspec.Struct)
    assert documented == list(kind.__struct_fields__ if is_struct else kind._fields)


def test_message_types_have_numbers_of_their_own() -> None:
    tags = [kind.__struct_config__.tag for kind in MESSAGE_TYPES]
    assert len(set(tags)) == len(tags)
