"""Process groups that keep to the timeout of the run. torch 2.15 gives every other group its own default of 10 or 30
minutes, whatever the default group has; and tells what a group has in no public way, which this file alone knows."""

from datetime import timedelta

import torch.distributed as dist


def timeout_of(group: dist.ProcessGroup | None = None) -> timedelta:
    """Of collectives in `group`, by default the group of all processes. The shortest, where it has several backends; that of
    the fake backend, which waits for nobody and has no options, is torch's default."""
    group = group or dist.group.WORLD
    assert group is not None
    backends = [group._get_backend(device) for device in group._device_types]
    found = [backend.options._timeout for backend in backends if backend.options is not None]
    return min(found, default=dist.constants.default_pg_timeout)


def new_group(ranks: list[int], *, like: dist.ProcessGroup) -> dist.ProcessGroup:
    """Only its members take part. With the timeout of `like`."""
    made = dist.new_group(ranks, timeout=timeout_of(like), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), made
    return made
