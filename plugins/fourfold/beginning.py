"""Where a run begins, agreed between all ranks: the same data on each, and the same checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.checkpoint.board import Board
from fourfold.checkpoint.pieces import read_index
from fourfold.checkpoint.resume import resume
from fourfold.checkpoint.save import Progress
from fourfold.checkpoint.sound import newest_sound, put_aside
from fourfold.mesh import Mesh
from fourfold.output import CHECKPOINTS
from fourfold.zero.engine import ZeroEngine

if TYPE_CHECKING:
    from fourfold.train import Plan


def go_on(plan: "Plan", *, engine: ZeroEngine, mesh: Mesh, board: Board) -> tuple[Progress, Path | None, str]:
    """Load the newest sound checkpoint if the run goes on from one; also which, and what there is to say of it."""
    checkpoint, passed_over = newest_sound(plan.resume, board=board, mesh=mesh)
    if checkpoint is None:
        return Progress(), None, ""
    progress = resume(checkpoint, engine=engine)
    ours = plan.output_dir / CHECKPOINTS
    remarks = put_aside([(path, why) for path, why in passed_over if path.parent == ours]) if mesh.is_main else []
    then = read_index(checkpoint)["run"]["total_steps"]
    if then != plan.total_steps and plan.learning_rate(1) != plan.learning_rate(plan.total_steps):
        remarks.append(f"its learning rate was to fall over {then} updates, this run's falls over {plan.total_steps}")
    return progress, checkpoint, "; ".join([str(checkpoint), *remarks])


def refuse_other_data(plan: "Plan", *, board: Board) -> None:
    """Ranks that read other rows would train on a mixture that nobody asked for, or wait for each other for ever."""
    known = {key: plan.data_identity[key] for key in ("digest", "state", "tokenizer")}
    mine = {**known, "evaluation": plan.data.eval_digest, "updates": plan.total_steps}
    everywhere = board.gather("data", mine)
    others = [rank for rank, one in enumerate(everywhere) if one != everywhere[0]]
    if others:
        raise ValueError(
            f"Rank {others[0]} has other data than rank 0 ({everywhere[others[0]]}, there {everywhere[0]}): every server needs "
            f"the same data.path, and nothing may change while a run starts."
        )
