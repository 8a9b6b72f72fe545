"""The newest checkpoint whose files are as they were written: each rank reads its share of them once."""

from pathlib import Path

from fourfold.checkpoint.board import Board
from fourfold.checkpoint.find import ToResume, none_is_sound
from fourfold.checkpoint.kept import set_aside, step_of
from fourfold.checkpoint.pieces import fault
from fourfold.mesh import Mesh


def newest_sound(wanted: ToResume | None, *, board: Board, mesh: Mesh) -> tuple[Path | None, list[tuple[Path, str]]]:
    """(the checkpoint or None, those passed over and why), the same on every rank: among those that the first rank found.

    Raises ValueError if none of them is sound.
    """
    if mesh.is_main:
        found = wanted or ToResume([])
        board.post("candidates", [[str(one) for one in found.candidates], [[str(p), w] for p, w in found.passed_over]])
    candidates, damaged = board.read("candidates", of=0)
    if not candidates:
        return None, []
    passed_over = [(Path(path), why) for path, why in damaged]
    for number, checkpoint in enumerate(map(Path, candidates)):
        mine = fault(checkpoint, share=mesh.rank, shares=mesh.layout.world_size)
        faults = [found for found in board.gather(f"sound/{number}", mine) if found]
        if not faults:  # older ones are nobody's business
            return checkpoint, [(path, why) for path, why in passed_over if step_of(path) > step_of(checkpoint)]
        passed_over.append((checkpoint, faults[0]))
    raise none_is_sound(Path(candidates[0]).parent, passed_over)


def put_aside(passed_over: list[tuple[Path, str]]) -> list[str]:
    """On the main rank: rename damaged checkpoints, so that they are neither the newest nor counted by rotation; returns
    a sentence about each."""
    return [f"{path.name} was passed over ({why}) and kept as {set_aside(path).name}" for path, why in passed_over]
