"""How layers are cut into recomputed stretches: arithmetic shared by the model and the planner, imports no torch."""

from math import ceil, sqrt

from fourfold.schema import Checkpointing


def default_every_n(num_layers: int) -> int:
    """round(sqrt(layers)): the stretch length that balances kept inputs and recomputed activations (Chen et al. 2016)."""
    return max(1, round(sqrt(num_layers)))


def stretch_sizes(num_layers: int, *, checkpointing: Checkpointing, every_n: int | None = None) -> list[int]:
    """Layers of each stretch, in order; the last may be shorter. Empty for `none`: nothing is recomputed."""
    if checkpointing == Checkpointing.none:
        return []
    size = 1
    if checkpointing == Checkpointing.every_n:
        size = default_every_n(num_layers) if every_n is None else every_n
    count = ceil(num_layers / size)
    return [min(size, num_layers - index * size) for index in range(count)]
