"""The reference page is what the models say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cluster.config.flags import FLAGS
from cluster.config.keys import env_name, known_fields
from cluster.config.reference import render

REPOSITORY = Path(__file__).parents[2]


def test_the_page_is_up_to_date() -> None:
    page = REPOSITORY / "docs" / "configuration.md"
    assert page.read_text() == render(), "run: python -m cluster.config.reference"


def test_the_page_has_every_setting_and_flag() -> None:
    page = render()
    for key, field in known_fields().items():
        assert f"**`{key}`** (" in page
        assert f"`{env_name(key)}`" in page
        assert field.description is not None
        assert field.description in page
    for flag, key in FLAGS.values():
        assert key in known_fields()
        assert f"| `{flag}` | `{key}` |" in page


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    target = tmp_path / "page.md"
    subprocess.run([sys.executable, "-m", "cluster.config.reference", str(target)], cwd=REPOSITORY, check=True, timeout=60)
    assert target.read_text() == render()
