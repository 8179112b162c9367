"""Runs every benchmark beside this file, prints a table, and writes the figures with the machine they were measured on.

A benchmark is a module `bench_*.py` whose `main()` returns rows: name, value, unit, reach (a bound such as "<= 60" or
nothing) and meaning. Timings depend on the machine: nothing here fails because of a number.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Protocol, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["describe_machine", "figures_table", "fill_readme", "main", "run_benchmarks", "within_reach"]

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent
PACKAGES: Final = ("pdhandoff", "msgspec", "torch", "numpy")
FIELDS: Final = ("name", "value", "unit", "reach", "meaning")
MARK: Final = "<!-- figures -->"

Row = dict[str, object]


def run_benchmarks(folder: Path, only: str = "") -> list[Row]:
    """The rows of every benchmark whose file name contains `only`, in the order of their names."""
    rows: list[Row] = []
    for path in sorted(folder.glob("bench_*.py")):
        if only in path.stem:
            print(f"{path.stem} ...", file=sys.stderr, flush=True)
            rows.extend(_check(path, row) for row in _load(path).main())
    return rows


def describe_machine() -> dict[str, object]:
    """What a reader needs in order to judge the figures: no names of hosts or people."""
    return {
        "cpu": _first_match(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_first_match(Path("/proc/meminfo"), r"MemTotal:\s*(\d+)") or 0) / (1 << 20), 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _installed(name))},
    }


def within_reach(value: float, reach: str) -> bool | None:
    """Whether a value keeps a bound such as "<= 60" or ">= 2,000"; None for no bound."""
    match = re.fullmatch(r"(<=|>=)\s*([\d.,]+)", reach.strip())
    if match is None:
        return None
    bound = float(match[2].replace(",", ""))
    return value <= bound if match[1] == "<=" else value >= bound


def figures_table(rows: list[Row], machine: dict[str, object], day: str) -> str:
    """The README's table, as Markdown."""
    lines = ["| what | measured | reach | how |", "|---|---:|---:|---|"]
    lines.extend(f"| {row['name']} | {_number(row)} {row['unit']} | {_reach(row)} | {row['meaning']} |" for row in rows)
    packages = cast("dict[str, str]", machine["packages"])
    versions = ", ".join(f"{name} {found}" for name, found in packages.items())
    lines.append("")
    lines.append(
        f"Measured on {day}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}, Python {machine['python']}, {versions}. `make bench` measures on yours."
    )
    return "\n".join(lines)


def fill_readme(text: str, table: str) -> str:
    """The README with a new table between its two marks. Raises ValueError when it has no such place."""
    parts = text.split(MARK)
    if len(parts) != 3:
        raise ValueError(f"the README needs the mark {MARK} twice, it has it {len(parts) - 1} times")
    return f"{parts[0]}{MARK}\n{table}\n{MARK}{parts[2]}"


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure pdhandoff on this machine.")
    parser.add_argument("--only", default="", metavar="WORD", help="run benchmarks whose file name contains WORD")
    parser.add_argument("--keep", default="", metavar="KIND", help="also write benchmarks/results/DATE-KIND.json")
    parser.add_argument("--readme", action="store_true", help="also put the figures into README.md")
    options = parser.parse_args(arguments)
    rows = run_benchmarks(HERE, options.only)
    if not rows:
        parser.error(f"no benchmark's file name contains {options.only!r}")
    machine, day = describe_machine(), datetime.now(UTC).date().isoformat()
    _show(rows)
    document = json.dumps({"date": day, "machine": machine, "figures": rows}, indent=2) + "\n"
    targets = [ROOT / "bench-out" / "latest.json"]
    if options.keep:
        targets.append(HERE / "results" / f"{day}-{options.keep}.json")
    for target in targets:
        target.parent.mkdir(exist_ok=True)
        target.write_text(document, encoding="utf-8")
        print(target.relative_to(ROOT))
    if options.readme:
        readme = ROOT / "README.md"
        text = fill_readme(readme.read_text(encoding="utf-8"), figures_table(rows, machine, day))
        readme.write_text(text, encoding="utf-8")
        print(readme.relative_to(ROOT))
    return 0


class _Benchmark(Protocol):
    def main(self) -> list[Row]:
        """Measure."""


def _load(path: Path) -> _Benchmark:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast("_Benchmark", module)


def _check(path: Path, row: Row) -> Row:
    if set(row) != set(FIELDS):
        raise ValueError(f"{path.name} returned a row with {sorted(row)}: it needs {sorted(FIELDS)}")
    return row


def _number(row: Row) -> str:
    value = cast("float", row["value"])
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _reach(row: Row) -> str:
    return f"{row['reach']} {row['unit']}".strip() if row["reach"] else ""


def _show(rows: list[Row]) -> None:
    table = Table(title="pdhandoff benchmarks", title_justify="left", header_style="bold")
    table.add_column("what")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("reach", justify="right", no_wrap=True)
    table.add_column("how", style="dim")
    colours = {True: "green", False: "yellow", None: ""}
    for row in rows:
        kept = within_reach(cast("float", row["value"]), str(row["reach"]))
        text = Text(f"{_number(row)} {row['unit']}", style=colours[kept])
        table.add_row(str(row["name"]), text, _reach(row), str(row["meaning"]))
    Console().print(table)


def _first_match(path: Path, pattern: str) -> str | None:
    match = re.search(pattern, path.read_text(encoding="utf-8")) if path.exists() else None
    return match[1].strip() if match else None


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
