"""What a killed process has started ends, and what it has created goes."""

import os
import select
import signal
import socket
import subprocess
import sys
import types

import pytest

from plurax import errors
from plurax.distributed.initialize import end_at_once
from plurax.server import ray_transport
from plurax.server.ray_transport import RayTransport

KILLED = """
import os, signal, subprocess, sys
from plurax.reaper import Reaper
reaper = Reaper(10)
reaper.tell("=PLURAX_DRIVER=abc")
reaper.tell(sys.argv[1])
code = "import signal; signal.alarm(60); print(1, flush=True); signal.pause()"
for mark in ("abc", "another"):
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True,
                             stdout=subprocess.PIPE, env={**os.environ, "PLURAX_DRIVER": mark})
    child.stdout.readline()
    print(child.pid)
print(reaper._popen.pid, flush=True)
if sys.argv[2] == "dismissed":
    reaper.dismiss()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["killed", "dismissed"])
def test_marked_processes_end_and_folders_go_with_a_killed_process(tmp_path, how):
    folder = tmp_path / "folder"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, folder, how], stdout=subprocess.PIPE, text=True
    ) as killed:
        marked, another, reaper = (int(killed.stdout.readline()) for _ in range(3))
        ends = []
        for pid in (reaper, marked) if how == "killed" else ():
            try:
                ends.append(os.pidfd_open(pid))
            except ProcessLookupError:  # it has ended
                continue
        assert killed.wait(20) == -signal.SIGKILL
    try:
        for end in ends:
            assert select.select([end], [], [], 20)[0], "a process lives on"
            os.close(end)
        assert folder.is_dir() == (how == "dismissed")
        os.kill(another, 0)
        if how == "dismissed":
            os.kill(marked, signal.SIGKILL)
    finally:
        os.kill(another, signal.SIGKILL)


@pytest.mark.parametrize("before", [lambda *_: None, signal.SIG_DFL, signal.SIG_IGN])
def test_ray_does_not_replace_the_handler_that_saves(before):
    outer = signal.signal(signal.SIGTERM, before)
    try:
        with ray_transport._own_sigterm():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, outer)


@pytest.mark.parametrize("gone", [None, "raylet", "head"])
def test_the_end_of_ray_is_said(monkeypatch, gone):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as head, ours, theirs:
        transport = types.SimpleNamespace(
            _head="{}:{}".format(*head.getsockname()), _raylet=ours, _own=True
        )
        if gone is None:
            RayTransport._check_ray(transport)
            assert sys.excepthook is not end_at_once
            return
        said = {"raylet": r"\(raylet\) has ended", "head": "head of the Ray cluster .* has ended"}
        {"raylet": theirs, "head": head}[gone].close()
        with pytest.raises(errors.PeerError, match=said[gone]):
            RayTransport._check_ray(transport)
    # Ray's own would ask the head, and wait for it for a minute.
    assert sys.excepthook is end_at_once
    assert not transport._own
