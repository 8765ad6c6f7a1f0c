"""From what the user names to files: every way to get it wrong says what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.models import smollm2
from engine.models.cache_folder import MANIFEST, prepared, verify
from engine.models.files import ModelFiles
from engine.models.source import ModelNotAvailableError, resolve_model
from engine.settings import ModelSettings
from tests.cluster.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOONPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def resolve(source: Path | str, dtype: str = "float32") -> ModelFiles:
    return resolve_model(ModelSettings(source=str(source), dtype=dtype))


def test_a_folder_in_the_right_dtype_is_used_where_it_is(tiny: Path, cache: Path):
    files = resolve(tiny)
    assert (files.path, files.dtype) == (tiny, "float32")
    assert not cache.exists()


def test_another_dtype_is_converted_once_and_found_again(tiny: Path, cache: Path):
    first = resolve(tiny, "bfloat16")
    assert first.path.is_relative_to(cache)
    assert json.loads((first.path / "config.json").read_text())["dtype"] == "bfloat16"
    made = (first.path / MANIFEST).stat().st_mtime_ns
    assert resolve(tiny, "bfloat16") == first
    assert (first.path / MANIFEST).stat().st_mtime_ns == made
    assert verify(first.path) == []


def test_the_fingerprint_follows_the_bytes_not_the_place(tiny: Path, tmp_path: Path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(tiny, copy)
    assert resolve(copy).fingerprint == resolve(tiny).fingerprint
    assert resolve(tiny, "bfloat16").fingerprint != resolve(tiny).fingerprint
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert resolve(copy).fingerprint != resolve(tiny).fingerprint


def test_a_damaged_copy_is_made_again(tiny: Path):
    files = resolve(tiny, "bfloat16")
    weights = next(files.path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-10])
    again = resolve(tiny, "bfloat16")
    assert again == files
    assert verify(again.path) == []


def test_verify_finds_a_flipped_bit(tiny: Path):
    files = resolve(tiny, "bfloat16")
    weights = next(files.path.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert verify(files.path) == [weights.name]


@pytest.mark.parametrize(
    ("gone", "named"), [("config.json", "config.json"), ("model.safetensors", "safetensors"), ("tokenizer.json", "tokenizer")]
)
def test_what_a_folder_lacks_is_named(tiny: Path, tmp_path: Path, gone: str, named: str):
    copy = tmp_path / "broken"
    shutil.copytree(tiny, copy)
    (copy / gone).unlink()
    with pytest.raises(ModelNotAvailableError, match=named):
        resolve(copy)


def test_pickled_weights_are_never_read(tiny: Path, tmp_path: Path):
    copy = tmp_path / "pickled"
    shutil.copytree(tiny, copy)
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelNotAvailableError, match="pickled"):
        resolve(copy)


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("no-such-folder", "no such folder"),
        ("missing.gguf", "no such file"),
        ("somebody/some-model", "download somebody/some-model elsewhere"),
        ("../escape/../x y", "not a Hugging Face id"),
    ],
)
def test_a_model_that_is_not_there_says_what_to_do(source: str, advice: str):
    with pytest.raises(ModelNotAvailableError, match=advice):
        resolve(source)


def test_a_file_that_is_no_gguf_says_so(tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelNotAvailableError, match=r"x\.gguf could not be read"):
        resolve(tmp_path / "x.gguf")
    assert not [p for p in (tmp_path / "cache" / "models").iterdir() if p.is_dir()]  # nothing half-made is left


@pytest.mark.parametrize("content", [b"no zip", None])
def test_a_wrong_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None):
    wheel = tmp_path / "llm.whl"
    if content is not None:
        wheel.write_bytes(content)
    monkeypatch.setenv(smollm2.WHEEL_VARIABLE, str(wheel))
    with pytest.raises(ModelNotAvailableError, match=r"llm\.whl|MOONPOOL_SMOLLM2_WHEEL"):
        resolve("smollm2")


def test_a_wheel_with_another_model_inside_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import zipfile

    wheel = tmp_path / "llm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.MEMBER, b"something else")
    monkeypatch.setenv(smollm2.WHEEL_VARIABLE, str(wheel))
    with pytest.raises(ModelNotAvailableError, match="checksum"):
        resolve("smollm2")


PREPARE = """
import sys
from pathlib import Path
from engine.models.cache_folder import prepared

folder, log = Path(sys.argv[1]), Path(sys.argv[2])

def build(target):
    with log.open("a") as file:
        file.write("built\\n")
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"x" * 100)

prepared(folder, "m", "float32", {"kind": "test"}, build)
"""


def test_processes_that_ask_at_once_build_once(tmp_path: Path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", PREPARE, str(tmp_path / "made"), str(log)]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert log.read_text() == "built\n"


def test_a_build_that_fails_leaves_nothing(tmp_path: Path):
    def build(target: Path) -> None:
        (target / "half").write_text("x")
        raise ModelNotAvailableError("no")

    with pytest.raises(ModelNotAvailableError, match="no"):
        prepared(tmp_path / "made", "m", "float32", {}, build)
    assert [path.name for path in tmp_path.iterdir()] == ["made.lock"]
