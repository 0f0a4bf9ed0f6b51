"""Many short runs of the command line for the price of one: a server process that has imported it, and forks for each.

Modules named `ray` and `torch` lie first on its path and end whoever imports them: a refusal must come before either.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .command import Finished
from .processes import MARK, assert_nothing_left, new_mark

SERVER = """
import json, os, sys
from longprefill.orchestrator import run_command
from longprefill.orchestrator.cli import main

def child(request):
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        file = os.open(request[name], os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.argv = ["longprefill", *request["arguments"]]
    main()

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        child(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), pid, flush=True)
"""


class RefusalServer:
    """`run` takes arguments of the command line. Close it at the end."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="lpt-", dir="/tmp"))
        wires, self._temporary = self._directory / "wires", self._directory / "tmp"
        for path in (wires, self._temporary):
            path.mkdir()
        for name in ("ray", "torch"):
            (wires / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')\n")
        self._mark = new_mark()
        path = os.pathsep.join(filter(None, [str(wires), os.environ.get("PYTHONPATH")]))
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(self._temporary), MARK: self._mark},
            text=True,
        )

    def run(self, *arguments: object, stdin: bytes = b"") -> Finished:
        """One run to its end; nothing may be left of it."""
        files = {name: self._directory / name for name in ("stdin", "stdout", "stderr")}
        files["stdin"].write_bytes(stdin)
        request = {name: str(path) for name, path in files.items()} | {"arguments": [str(word) for word in arguments]}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        code, pid = map(int, self._server.stdout.readline().split())
        assert_nothing_left(self._mark, self._temporary, pid, exempt=self._server.pid)
        return Finished(
            code=code, out=files["stdout"].read_text(), err=files["stderr"].read_text(errors="replace"), seconds=0.0
        )

    def close(self) -> None:
        """Ends the server."""
        self._server.communicate(timeout=10)
        shutil.rmtree(self._directory)
