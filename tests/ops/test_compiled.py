"""What only the compiler shows: instructions that an interpreter does not have."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNT = """
import sys
sys.path.insert(0, "benchmarks")
import torch, triton
from compile_check import gpu_target, signature
from problems import feature_problem
from hf_linear_attn.ops.features.triton.kernels import features_launch
from hf_linear_attn.ops.linear_attention.triton.forward import forward_launches
from hf_linear_attn.ops.triton.plan import Problem, Target
x = torch.empty(1, 1, 8192, 16, dtype=torch.float16, device="meta")
p = Problem(Target("sm_80", 64), x, x, x, None, None, None, None, "elu", True, 0)
planned = [*forward_launches(p, 1e-6)[1], features_launch(feature_problem(p))[1]]
for launch in (launch for launch in planned if launch.role != "scan"):
    code = triton.compile(signature(launch), target=gpu_target("sm_80"), options=launch.options).asm["ptx"]
    a = launch.arguments
    print(launch.role, 32 * launch.tile.warps, a["BT"], a["BD"], a.get("BV", a.get("BM")), code.count("cvt.rna.tf32"))
"""


def test_operands_are_rounded_to_tf32(tmp_path: Path) -> None:
    """The matrix units cut fp32 operands off; sums of positive terms would all be too small."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COUNT]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    counts = {role: tuple(map(int, rest)) for role, *rest in map(str.split, found.stdout.splitlines())}
    threads, BT, BD, _, rounded = counts["state"]
    assert rounded >= BT * BD // threads
    threads, BT, BD, BV, rounded = counts["forward"]
    # phi_q and phi_k, the products of both, and the state.
    assert rounded >= (2 * BT * BD + BT * BT + BD * BV) // threads
    # A weight, which is fp32; x is fp16, which tf32 holds.
    threads, _, BD, BM, rounded = counts["features"]
    assert rounded >= BD * BM // threads
