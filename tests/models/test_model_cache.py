"""The cache folder: built once, whole or not at all, and not trusted blindly."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from engine.models import digests
from engine.models.cache_folder import MANIFEST, prepared
from engine.models.digests import changed, digests_of
from engine.models.files import ModelFiles, ModelNotAvailableError
from engine.models.prepare import main
from engine.models.source import resolve_model
from engine.settings import ModelSettings
from tests.cluster.tiny_model import make_tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOONPOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def fill(target: Path, _: Path) -> None:
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"x" * 100)


def make(folder: Path, source: str = "a", build=fill, progress=lambda _: None) -> ModelFiles:
    return prepared(folder, "m", "float32", {"kind": source}, build, progress)


def must_not_build(_: Path, __: Path) -> NoReturn:
    pytest.fail("built again")


def flip_last_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def test_a_whole_folder_is_used_without_hashing_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = make(tmp_path / "made")
    monkeypatch.setattr(digests, "sha256", lambda path: pytest.fail(f"hashed {path}"))
    assert make(tmp_path / "made", build=must_not_build) == first


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", MANIFEST])
@pytest.mark.parametrize(
    "damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-1]), flip_last_bit]
)
def test_a_damaged_folder_is_made_anew(tmp_path: Path, name: str, damage):
    first = make(tmp_path / "made")
    damage(first.path / name)
    again = make(tmp_path / "made")
    assert again == first
    assert (again.path / "model.safetensors").read_bytes() == b"x" * 100


def test_dates_set_back_hide_nothing(tmp_path: Path):
    made = make(tmp_path / "made")
    weights = made.path / "model.safetensors"
    before = weights.stat()
    flip_last_bit(weights)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    make(tmp_path / "made")
    assert weights.read_bytes() == b"x" * 100


def test_another_source_replaces_the_folder(tmp_path: Path):
    make(tmp_path / "made")

    def other(target: Path, scratch: Path) -> None:
        fill(target, scratch)
        (target / "config.json").write_text('{"a": 1}')

    make(tmp_path / "made", "b", other)
    assert (tmp_path / "made" / "config.json").read_text() == '{"a": 1}'


def test_a_build_that_fails_leaves_nothing(tmp_path: Path):
    def build(target: Path, _: Path) -> None:
        (target / "half").write_text("x")
        raise ModelNotAvailableError("no")

    with pytest.raises(ModelNotAvailableError, match="no"):
        make(tmp_path / "models" / "made", build=build)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["made.lock"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_nothing_is_an_answer_not_a_traceback(tmp_path: Path, number: int):
    def build(target: Path, _: Path) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(ModelNotAvailableError, match=f"{os.strerror(number)}.*MOONPOOL_CACHE"):
        make(tmp_path / "made", build=build)


def test_a_cache_folder_that_cannot_be_made_says_so(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotAvailableError, match="MOONPOOL_CACHE"):
        make(tmp_path / "file" / "models" / "made")


def test_a_memory_that_cannot_be_kept_or_read_costs_time_only(tmp_path: Path, cache: Path):
    first = make(tmp_path / "made")
    for memory in (cache / "digests").iterdir():
        memory.write_text('{"model.safetensors": 7}')
    assert make(tmp_path / "made", build=must_not_build) == first
    for memory in (cache / "digests").iterdir():
        memory.unlink()
    (cache / "digests").rmdir()
    (cache / "digests").write_text("in the way")
    assert make(tmp_path / "made", build=must_not_build) == first


PREPARE = """
import os, signal, sys
from pathlib import Path
from engine.models.cache_folder import prepared

folder, log, die = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "die"

def build(target, scratch):
    with log.open("a") as file:
        file.write("built\\n")
    (target / "config.json").write_text("{}")
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    (target / "model.safetensors").write_bytes(b"x" * 100)

prepared(folder, "m", "float32", {"kind": "a"}, build)
"""


def test_processes_that_ask_at_once_build_once(tmp_path: Path):
    log = tmp_path / "log"
    processes = [subprocess.Popen([sys.executable, "-c", PREPARE, str(tmp_path / "made"), str(log), ""]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert log.read_text() == "built\n"


def test_a_build_that_was_killed_neither_blocks_nor_lingers(tmp_path: Path):
    models = tmp_path / "models"
    killed = subprocess.run([sys.executable, "-c", PREPARE, str(models / "made"), str(tmp_path / "log"), "die"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path for path in models.iterdir() if path.name.startswith(".made.")]
    make(models / "made")
    assert sorted(path.name for path in models.iterdir()) == ["made", "made.lock"]


def test_who_waits_for_another_process_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import fcntl

    monkeypatch.setattr("engine.models.cache_folder.LOCK_TIMEOUT_S", 0.3)
    said: list[str] = []
    with (tmp_path / "made.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ModelNotAvailableError, match="another process"):
            make(tmp_path / "made", progress=said.append)
    assert said == ["model: another process is preparing it, waiting"]


# --- python -m engine.models.prepare ----------------------------------------------------------------------------------------


def without_dates(path: Path) -> list[int]:
    """A disk that changes bytes by itself leaves no date."""
    return [path.stat().st_size, 0, 0, 0]


def test_verify_finds_bytes_that_changed_by_themselves_and_makes_the_model_anew(tiny: Path, monkeypatch, capsys):
    monkeypatch.setattr(digests, "_state", without_dates)
    files = resolve_model(ModelSettings(source=str(tiny), dtype="bfloat16"))
    whole = (files.path / "model.safetensors").read_bytes()
    flip_last_bit(files.path / "model.safetensors")
    assert main([str(tiny), "--dtype", "bfloat16"]) == 0  # not seen without asking
    assert changed(files.path) == ["model.safetensors"]
    assert main([str(tiny), "--dtype", "bfloat16", "--verify"]) == 0
    assert "model.safetensors damaged, making it anew" in capsys.readouterr().out
    assert (files.path / "model.safetensors").read_bytes() == whole


def test_verify_of_a_folder_used_in_place_can_only_tell(tiny: Path, tmp_path: Path, monkeypatch, capsys):
    import shutil

    monkeypatch.setattr(digests, "_state", without_dates)
    copy = tmp_path / "mine"
    shutil.copytree(tiny, copy)
    assert main([str(copy), "--dtype", "float32", "--verify"]) == 0
    flip_last_bit(copy / "model.safetensors")
    assert main([str(copy), "--dtype", "float32", "--verify"]) == 1
    assert "fetch the model again" in capsys.readouterr().err


def test_prepare_reports_a_missing_model(capsys):
    assert main(["no-such-folder"]) == 1
    assert "no such folder" in capsys.readouterr().err


def test_digests_follow_links_to_the_bytes(tmp_path: Path):
    (tmp_path / "blob").write_bytes(b"1")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "w.safetensors").symlink_to(tmp_path / "blob")
    first = digests_of(tmp_path / "snapshot", ["w.safetensors"])
    (tmp_path / "blob").write_bytes(b"2")
    assert digests_of(tmp_path / "snapshot", ["w.safetensors"]) != first
