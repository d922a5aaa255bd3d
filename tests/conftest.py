"""Settings that must hold before anything imports Triton."""

import os

import torch

if not torch.cuda.is_available():
    # Without a GPU the kernels are tested in Triton's interpreter, which has to be chosen before the first import.
    os.environ.setdefault("TRITON_INTERPRET", "1")
