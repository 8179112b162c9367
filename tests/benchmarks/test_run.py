from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("rich")

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "run.py"
ROW = '{"name": "n", "value": 1234.5, "unit": "/s", "reach": ">= 2,000", "meaning": "m"}'


@pytest.fixture(scope="module")
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_run", RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("value", "reach", "expected"),
    [(60, "<= 60", True), (61, "<= 60", False), (1999, ">= 2,000", False), (0.95, ">= 0.95", True), (1, "", None)],
)
def test_a_bound_is_read_as_it_is_written(run: ModuleType, value: float, reach: str, expected: bool | None) -> None:
    assert run.within_reach(value, reach) is expected


def test_every_benchmark_of_a_folder_runs(run: ModuleType, tmp_path: Path) -> None:
    for name in ("bench_b", "bench_a", "helper"):
        text = f"def main():\n    return [{ROW}]\n".replace('"n"', repr(name))
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    assert [row["name"] for row in run.run_benchmarks(tmp_path)] == ["bench_a", "bench_b"]
    assert [row["name"] for row in run.run_benchmarks(tmp_path, "_b")] == ["bench_b"]


def test_a_row_without_its_meaning_is_refused(run: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "bench_x.py").write_text('def main():\n    return [{"name": "n", "value": 1}]\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"bench_x\.py.*meaning"):
        run.run_benchmarks(tmp_path)


def test_the_readme_gets_the_figures_and_keeps_the_rest(run: ModuleType) -> None:
    rows = [{"name": "import", "value": 41.234, "unit": "ms", "reach": "<= 60", "meaning": "fresh"}]
    table = run.figures_table(rows, run.describe_machine(), "2001-02-03")
    assert "| import | 41.2 ms | <= 60 ms | fresh |" in table
    assert "Measured on 2001-02-03" in table
    text = f"before\n{run.MARK}\nold\n{run.MARK}\nafter\n"
    filled = run.fill_readme(text, table)
    assert filled == f"before\n{run.MARK}\n{table}\n{run.MARK}\nafter\n"
    assert run.fill_readme(filled, table) == filled


def test_a_readme_without_a_place_for_figures_is_refused(run: ModuleType) -> None:
    with pytest.raises(ValueError, match="twice"):
        run.fill_readme("no marks", "table")


def test_the_real_readme_has_a_place_for_figures(run: ModuleType) -> None:
    assert RUN.parents[1].joinpath("README.md").read_text(encoding="utf-8").count(run.MARK) == 2
