"""Products of fp32 by any of PyTorch's switches for TF32; they are global, so each is set in a process of its own."""

import os
import subprocess
import sys

import pytest

EVERY_OPERATION = """
import torch
from hf_linear_attn import LinearAttentionConfig, linear_attention
from hf_linear_attn.feature_maps import get_feature_map
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State
from hf_linear_attn.ops.delta_rule import delta_rule
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.step import decode_state, decode_step_
from hf_linear_attn.ops.triton.plan import Problem, Target
from hf_linear_attn.ops.window import window_attention

def drawn():
    return [torch.randn(1, 2, 9, 16).requires_grad_() for _ in range(3)]

for run in (
    lambda q, k, v: linear_attention(q, k, v, backend="triton")[0],
    lambda q, k, v: delta_rule(q, k, v, torch.rand(1, 2, 9), backend="triton")[0],
    lambda q, k, v: window_attention(q, k, v, window=4, scaling=0.25, backend="triton"),
    lambda q, k, v: features_of(get_feature_map("hedgehog", 16, 2), q + k + v, "q", backend="triton"),
):
    given = drawn()
    run(*given).sum().backward()
    assert all(x.grad.isfinite().all() for x in given)
with torch.no_grad():
    decode_step_(*(x[:, :, :1] for x in drawn()), decode_state(1, 2, 16, 16, device="cpu"), backend="triton")
    settings = LinearAttentionConfig(feature_map="norm_preserving", window=4, backend="triton")
    layer, state = LinearAttention(settings, Sizes(16, 2, 2, 0.25, 16), "layer"), State()
    layer(*drawn(), Call(state=state))
    layer(*(x[:, :, :1] for x in drawn()), Call(state=state))
x = torch.empty(1, 1, 64, 64, device="meta")
problem = Problem(Target("sm_90", 132), x, x, x, None, None, None, None, "elu", True, 0)
print(problem.precision)
"""

NEW, NEW_OF_GPU = "torch.backends.fp32_precision = {!r}", "torch.backends.cuda.matmul.fp32_precision = {!r}"
OLD, OLD_OF_GPU = "torch.set_float32_matmul_precision({!r})", "torch.backends.cuda.matmul.allow_tf32 = {!r}"
SWITCHES = {
    "none": ("tf32x3",),
    "new": ("tf32", NEW.format("tf32")),
    "new, of GPUs": ("tf32", NEW_OF_GPU.format("tf32")),
    "Transformers": ("tf32", "from transformers.utils import import_utils; import_utils.enable_tf32(True)"),
    "old": ("tf32", OLD.format("high")),
    "old, of GPUs": ("tf32", OLD_OF_GPU.format(True)),
    "on for all, off for GPUs": ("tf32x3", NEW.format("tf32"), NEW_OF_GPU.format("ieee")),
    "new after old": ("tf32x3", OLD.format("high"), NEW_OF_GPU.format("ieee")),
    "old after new": ("tf32x3", NEW.format("tf32"), OLD.format("highest")),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_every_operation_runs_and_heeds_the_switch(name: str) -> None:
    expected, *statements = SWITCHES[name]
    script = "\n".join(("import torch", *statements, EVERY_OPERATION))
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [expected]
