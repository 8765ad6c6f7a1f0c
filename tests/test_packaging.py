"""What is installed is ours, whole, light to import, and built on its floors."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import cluster
import scheduler

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("cluster", "decode_worker", "engine", "kv_pool", "prefill_worker", "scheduler")
HEAVY = ("torch", "transformers", "ray", "zmq", "fastapi", "uvicorn", "httpx", "pydantic", "numpy", "typer", "rich")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Built from a copy: a build inside the source folder would leave its own traces, and pick up those of earlier ones."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in (*PACKAGES, "tests", "benchmarks"):
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        ".",
    ]
    subprocess.run(command, cwd=source, check=True, timeout=120)
    [path] = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_packages_that_others_also_have_are_ours() -> None:
    """``scheduler`` and ``cluster`` are common names: another distribution's would be imported silently."""
    assert Path(scheduler.__file__).parent == REPOSITORY / "scheduler"
    assert Path(cluster.__file__).parent == REPOSITORY / "cluster"


def test_the_wheel_has_the_six_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert not [name for name in wheel.namelist() if Path(name).name.startswith(("test_", "conftest"))]


def test_the_wheel_has_every_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    kept = (".py", ".txt", ".md", ".yaml")
    files = {
        path.relative_to(REPOSITORY).as_posix()
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in files if not name.endswith(kept)} == set(), "a kind of file that package-data does not name"
    assert files <= set(wheel.namelist())
    assert "cluster/demo/document.txt" in files


def test_the_wheel_installs_the_command(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(name).decode())
    assert dict(entries["console_scripts"]) == {"moonpool": "cluster.cli.app:main"}


@pytest.mark.parametrize("module", [*PACKAGES, "cluster.config", "cluster.cli", "cluster.demo"])
def test_importing_a_package_loads_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}") == []


def test_the_scheduler_s_types_and_the_pool_load_no_torch_and_no_ray() -> None:
    loaded = loaded_by("import scheduler.plan, kv_pool.keys, kv_pool.layout, prefill_worker.task, decode_worker.task")
    assert set(loaded) <= {"pydantic", "numpy"}


def test_the_client_loads_no_server() -> None:
    assert set(loaded_by("from cluster import Client, AsyncClient")) <= {"httpx", "rich"}  # httpx brings rich where it is there


def test_init_files_hold_no_imports_but_the_package_s_lazy_ones() -> None:
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("__init__.py"):
            if path != REPOSITORY / "cluster" / "__init__.py":
                assert path.read_text().strip() == "", f"{path.relative_to(REPOSITORY)} is not empty"


def test_floors_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


def test_constraints_pin_every_dependency_exactly() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {requirement.split(">")[0].split("[")[0].strip().lower() for requirement in wanted}
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    assert names <= pinned.keys()
    assert pinned["torch"] == "2.13.0"
    assert not [version for version in pinned.values() if "+" in version], "a local build is on no index"


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    page = (REPOSITORY / "docs" / "decisions" / "0001-dependencies.md").read_text()
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        name = requirement.split(">")[0].split("[")[0]
        assert f"| `{name}` |" in page, f"{name} has no line in 0001-dependencies.md"


def loaded_by(statement: str) -> list[str]:
    script = f"{statement}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()
