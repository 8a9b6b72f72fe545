"""What a user did wrong, told once; what went wrong on a rank, told with its number."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

USER_ERROR_EXIT = 2
INTERRUPTED_EXIT = 130
FIRST_WORD = 8.0  # seconds that the first process of a server gets to say what all of them found


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def run_and_exit(work: Callable[[], int]) -> None:
    """Run `work` and exit with its code. A ValueError that fourfold raised is the user's: one paragraph, by one rank of
    each node, exit 2; by another one too if it alone met it.

    Anything else is ours or the machine's: the whole trace, headed by the rank, exit 1. The process leaves by
    os._exit after an error: other ranks may be blocked in a collective, and interpreter shutdown would join them.
    """
    try:
        code = work()
    except KeyboardInterrupt:
        if local_rank() == 0:
            print("\nfourfold: interrupted at once, without a checkpoint", file=sys.stderr, flush=True)
        _leave(INTERRUPTED_EXIT)
    except Exception as error:
        if isinstance(error, ValueError) and _is_ours(error):
            tell_and_exit(error)
        print(f"[rank {rank()} of {world_size()}] {traceback.format_exc()}", file=sys.stderr, flush=True)
        _leave(1)
    else:
        sys.exit(code)


def tell_and_exit(error: ValueError) -> None:
    """Of the user's making."""
    let_the_first_speak()
    where = f"[rank {rank()}] " if local_rank() else ""
    print(f"\nfourfold: {where}{error}\n", file=sys.stderr, flush=True)
    _leave(USER_ERROR_EXIT)


def let_the_first_speak() -> None:
    """On other processes of a server, wait: the first one meets the same error, and the launcher ends all when it has
    left. Who leaves before it would have it ended unheard. Returns on other processes only if it did not leave."""
    if local_rank() != 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(FIRST_WORD)


def _is_ours(error: BaseException) -> bool:
    """Whether a line of this package raised it, rather than a library that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).is_relative_to(Path(__file__).parent)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
