"""Runs fourfold again and again without importing the libraries again: one JSON request a line in, one exit code out.

A server of its own: multiprocessing has one forkserver for all, and that is the rank pool's.
"""

import json
import os
import sys
import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import fourfold.train  # noqa: F401
    from fourfold.cli import main


def run(request: dict[str, Any]) -> int:
    """In the child: become the process that was asked for."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for path, number in ((request["out"], 1), (request["err"], 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["__main__.py", *request["words"]]
    try:
        main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = run(json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
