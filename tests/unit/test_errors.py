"""Who hears of an error, with which exit code; each case is a process of its own, as ranks are."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold import errors

PRELUDE = "import sys; from fourfold.errors import run_and_exit\n"


def run(body: str, *, rank: int = 0, local_rank: int | None = None, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `body`, the source of a function `work`, as rank `rank` of 4."""
    local = rank if local_rank is None else local_rank
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(local)}
    script = folder / "script.py"
    script.write_text(f"{PRELUDE}{body}\nrun_and_exit(work)\n")
    return subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=60)


# a ValueError raised by a line of the package: here legality.py's
OURS = "from fourfold import legality\ndef work(): legality._raise(['seq_len=0: use 1 or more.'])"


def test_a_user_error_is_one_paragraph_on_one_rank(tmp_path: Path) -> None:
    result = run(OURS, folder=tmp_path)
    assert result.stderr == "\nfourfold: seq_len=0: use 1 or more.\n\n"
    assert result.stdout == ""
    assert result.returncode == errors.USER_ERROR_EXIT == 2


def test_the_first_rank_speaks_for_the_others(tmp_path: Path) -> None:
    """A launcher ends all when one has left: who is quicker than the first must not have it ended unheard."""
    script = tmp_path / "script.py"
    script.write_text(f"{PRELUDE}{OURS}\nrun_and_exit(work)\n")
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    waiting = subprocess.Popen([sys.executable, script], env=environment, stderr=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(3)
    waiting.terminate()  # as the launcher does
    assert waiting.communicate(timeout=10)[1] == ""
    assert waiting.returncode == -signal.SIGTERM


def test_what_one_rank_alone_met_is_told_by_it(tmp_path: Path) -> None:
    result = run(f"from fourfold import errors\nerrors.FIRST_WORD = 0.1\n{OURS}", rank=3, folder=tmp_path)
    assert result.stderr == "\nfourfold: [rank 3] seq_len=0: use 1 or more.\n\n"
    assert result.returncode == 2


def test_each_server_hears_of_it(tmp_path: Path) -> None:
    assert "seq_len=0" in run(OURS, rank=2, local_rank=0, folder=tmp_path).stderr


@pytest.mark.parametrize("body", ["def work(): raise ValueError('of a library')", "def work(): return 1 // 0"])
@pytest.mark.parametrize("rank", [0, 3])
def test_anything_else_shows_its_trace_and_rank(body: str, rank: int, tmp_path: Path) -> None:
    """L03: the error of a rank above 0 is not lost."""
    result = run(body, rank=rank, folder=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith(f"[rank {rank} of 4] Traceback")
    assert "script.py" in result.stderr
    assert result.stderr.rstrip().splitlines()[-1].partition(":")[0] in ("ValueError", "ZeroDivisionError")


def test_a_second_interrupt(tmp_path: Path) -> None:
    result = run("def work(): raise KeyboardInterrupt", folder=tmp_path)
    assert (result.returncode, result.stderr) == (
        errors.INTERRUPTED_EXIT,
        "\nfourfold: interrupted at once, without a checkpoint\n",
    )


@pytest.mark.parametrize("code", [0, 130])
def test_the_code_of_the_work(code: int, tmp_path: Path) -> None:
    assert run(f"def work(): return {code}", folder=tmp_path).returncode == code


def test_other_threads_do_not_hold_a_failed_rank(tmp_path: Path) -> None:
    body = "import threading, time\nthreading.Thread(target=time.sleep, args=(300,)).start()\n" + OURS
    assert run(body, folder=tmp_path).returncode == 2


def test_printed_lines_are_not_lost(tmp_path: Path) -> None:
    body = "def work():\n    sys.stdout.write('before')\n    raise RuntimeError('after')"
    assert run(body, folder=tmp_path).stdout == "before"


def test_without_a_launcher_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (errors.rank(), errors.world_size(), errors.local_rank()) == (0, 1, 0)
