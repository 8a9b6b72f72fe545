"""Imported once by the server of ranks (pool.py), so that every rank starts with it."""

import atexit
import gc
import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)

import accelerate.big_modeling  # noqa: E402, F401
import torch.nn.modules.linear_cross_entropy  # noqa: E402

import fourfold.train  # noqa: E402
import fourfold.verify.ranks  # noqa: E402, F401
from fourfold.zero.deepspeed_internals import quiet_start  # noqa: E402

quiet_start(torch.device("cpu"))
atexit.register(os._exit, 0)  # of the server: libraries tell of leaks when an interpreter ends
gc.collect()
gc.freeze()  # DeepSpeed collects garbage when it starts: do not walk, and copy, this whole heap on every rank
