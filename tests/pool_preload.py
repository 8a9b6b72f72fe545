"""Imported once by the fork server, so that every rank starts with it."""

import gc
import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
os.fsync = lambda fd: None  # files of tests need survive no power cut, and a disk takes its time

import accelerate.big_modeling  # noqa: E402, F401
import datasets  # noqa: E402, F401
import hydra.core.global_hydra  # noqa: E402, F401
import torch.nn.modules.linear_cross_entropy  # noqa: E402
import transformers.models.gemma2.modeling_gemma2  # noqa: E402
import transformers.models.gemma3.modeling_gemma3  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402
import transformers.models.phi3.modeling_phi3  # noqa: E402, F401

import fourfold.train  # noqa: E402, F401
from fourfold.zero.deepspeed_internals import quiet_start  # noqa: E402

quiet_start(torch.device("cpu"))

gc.collect()
gc.freeze()  # DeepSpeed collects garbage when it starts: do not walk, and copy, this whole heap on every rank
