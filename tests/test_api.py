"""The public names, and what importing them costs."""

import subprocess
import sys

import hf_linear_attn
from hf_linear_attn.errors import explain

PUBLIC = {
    "LinearAttentionConfig",
    "LinearAttentionState",
    "available_feature_maps",
    "from_pretrained",
    "linear_attention",
    "patch_model",
    "register_feature_map",
    "unpatch_model",
}


def test_the_public_names_are_those_of_the_documentation():
    assert set(hf_linear_attn.__all__) >= PUBLIC
    for name in hf_linear_attn.__all__:
        assert getattr(hf_linear_attn, name).__doc__


def test_importing_needs_no_heavy_dependency():
    code = """
import sys
for absent in ("triton", "matplotlib", "lm_eval", "peft", "datasets"):
    sys.modules[absent] = None
import torch, hf_linear_attn
q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
assert hf_linear_attn.linear_attention(q, k, v, return_state=False).shape == (1, 2, 5, 4)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_is_quick_where_transformers_is_there():
    code = """
import sys, time
began = time.process_time()
from transformers import AutoModelForCausalLM, LlamaForCausalLM
before, theirs = set(sys.modules), time.process_time()
import hf_linear_attn
from hf_linear_attn import from_pretrained, linear_attention, patch_model
took, compared = time.process_time() - theirs, theirs - began
# On a busy machine everything takes more: a share of what Transformers took does not.
assert took < 0.08 * compared, f"{took:.2f} s, and Transformers {compared:.2f} s"
print(*{name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert set(done.stdout.split()) <= {"hf_linear_attn", "torch", "transformers"}


def test_ops_and_feature_maps_do_not_import_transformers():
    code = """
import sys
sys.modules["transformers"] = None
import types
package = types.ModuleType("hf_linear_attn")
package.__path__ = [sys.argv[1]]
sys.modules["hf_linear_attn"] = package
import hf_linear_attn.ops
"""
    subprocess.run([sys.executable, "-c", code, hf_linear_attn.__path__[0]], check=True)


def test_errors_have_one_form():
    message = explain("window", "be at least 1", 0, "Use None for no window.", where="model.layers.0")
    assert message == "`window` must be at least 1, got 0 (model.layers.0). Use None for no window."
