from __future__ import annotations

import enum
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("sphinx")

from ladder import Arrow, draw_ladder
from transition_tables import order_states, picture_of

EXTENSIONS = Path(__file__).resolve().parents[2] / "docs" / "_ext"
SVG = "{http://www.w3.org/2000/svg}"


class State(enum.Enum):
    DONE = 1
    IDLE = 2
    MOVING = 3


class Input(enum.Enum):
    GO_ON = 1
    STOP = 2
    LINK_LOST = 3


class Row(NamedTuple):
    state: State
    input: Input
    next: State
    action: str


class Table(list[Row]):
    initial = State.IDLE
    terminal = frozenset({State.DONE})


TABLE = Table(
    [
        Row(State.MOVING, Input.STOP, State.DONE, "end"),
        Row(State.MOVING, Input.LINK_LOST, State.DONE, "fail"),
        Row(State.MOVING, Input.GO_ON, State.MOVING, ""),
        Row(State.IDLE, Input.GO_ON, State.MOVING, "start"),
    ]
)


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ET.fromstring(svg).iter(f"{SVG}text")]  # noqa: S314 - made here


def test_states_stand_in_the_order_in_which_they_are_reached_and_ends_last() -> None:
    assert order_states(TABLE) == [State.IDLE, State.MOVING, State.DONE]


def test_inputs_between_two_states_share_an_arrow() -> None:
    assert texts(picture_of(TABLE)) == ["idle", "moving", "done", "go on", "go on", "stop, link lost"]


def test_every_arrow_has_a_row_of_its_own() -> None:
    svg = draw_ladder(
        ["a", "b"], [Arrow(0, 1, ("x",)), Arrow(1, 0, ("y",)), Arrow(1, 1, ("z",))], initial=0, terminal=[]
    )
    heights = [float(y) for y in re.findall(r'd="M\d+ ([\d.]+)', svg)]
    assert heights == sorted(set(heights))


def test_a_long_list_of_inputs_is_broken_into_lines_inside_the_picture() -> None:
    labels = tuple(f"input number {n}" for n in range(20))
    svg = draw_ladder(["a", "b"], [Arrow(0, 1, labels)], initial=0, terminal=[1])
    assert ", ".join(labels) == " ".join(texts(svg)[2:])
    assert len(texts(svg)) > 4


def test_names_are_escaped() -> None:
    assert texts(draw_ladder(["<a&b>"], [], initial=0, terminal=[])) == ["<a&b>"]


def build(tmp_path: Path, page: str) -> subprocess.CompletedProcess[str]:
    """Sphinx in a process of its own: it registers its extensions once and for all."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "conf.py").write_text('extensions = ["myst_parser", "transition_tables"]\n', encoding="utf-8")
    (source / "index.md").write_text(page, encoding="utf-8")
    (source / "table_for_this_test.py").write_text(TABLE_MODULE, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(source), str(tmp_path / "out")],
        env={"PYTHONPATH": f"{EXTENSIONS}:{source}", "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )


TABLE_MODULE = """
import enum
from typing import NamedTuple

class S(enum.Enum):
    ON = 1
    OFF = 2

class I(enum.Enum):
    SWITCH_OFF = 1

class Row(NamedTuple):
    state: S
    input: I
    next: S
    action: str

class Table(list):
    initial = S.ON
    terminal = (S.OFF,)

TABLE = Table([Row(S.ON, I.SWITCH_OFF, S.OFF, "darken")])
"""


@pytest.mark.slow
def test_the_directive_gives_a_picture_and_a_list(tmp_path: Path) -> None:
    run = build(tmp_path, "# Page\n\n```{state-diagram} table_for_this_test.TABLE\n```\n")
    assert run.returncode == 0, run.stderr
    html = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert '<svg class="ladder"' in html
    assert re.findall(r"<td><p>(.*?)</p></td>", html) == ["on", "switch off", "off", "darken"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no_such_module.TABLE", "enum.TABLE", "TABLE"])
def test_a_name_that_is_no_table_stops_the_build(tmp_path: Path, name: str) -> None:
    run = build(tmp_path, f"# Page\n\n```{{state-diagram}} {name}\n```\n")
    assert run.returncode != 0
    assert "is no table" in run.stderr
