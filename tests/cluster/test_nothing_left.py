"""What is left on the machine after a cluster: nothing."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.cluster.conftest import TEXT, ClusterProcess, all_free, complete, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_stop_leaves_no_process_no_socket_and_no_shared_memory(tiny_settings: dict[str, Any], tmp_path: Path):
    shm_before = set(os.listdir("/dev/shm"))
    cluster = ClusterProcess(tiny_settings, log=tmp_path / "launcher.log")
    root = psutil.Process(cluster.pid)
    family = [root, *root.children(recursive=True)]
    ports = {
        c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in {p.pid for p in family}
    }
    answered = threading.Event()

    def keep_asking() -> None:
        with contextlib.suppress(openai.OpenAIError):  # the cluster stops under it: an error is a right answer
            complete(cluster, "to the end " + TEXT, 1500, extra_body={"ignore_eos": True})
        answered.set()

    asker = threading.Thread(target=keep_asking)
    asker.start()
    eventually(lambda: not all_free(cluster), what="a request is under way")
    cluster.stop()
    asker.join(30)
    assert answered.is_set()
    gone, alive = psutil.wait_procs(family, timeout=15)
    assert not alive, [p.cmdline() for p in alive]
    assert len(gone) == len(family)
    left = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert not left & ports
    eventually(lambda: set(os.listdir("/dev/shm")) <= shm_before, within_s=10, what="/dev/shm is as it was")
