"""Imported once by the fork server, so that every rank starts with it."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)

import transformers.models.llama.modeling_llama  # noqa: E402, F401

from fourfold.zero.deepspeed_internals import quiet_start  # noqa: E402

quiet_start(torch.device("cpu"))
