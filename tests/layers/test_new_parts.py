"""A new mixing rule, a new update rule: one file each, that is found, converts a model, generates, saves and loads."""

import importlib

import pytest
import torch

from hf_linear_attn import LinearAttentionConfig, from_pretrained, patch_model
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.layers import mixes, rules
from hf_linear_attn.layers.registry import discover
from tests.patching.zoo import tiny_model

MIX = '''
"""Half of each branch."""
import torch
from hf_linear_attn.layers.mixes.base import Mix

class Half(Mix):
    name = "half"

    def weights(self):
        return {"share": torch.full((self.sizes.num_heads, 1, 1), 0.5)}

    def join(self, near, far, weights):
        share = weights["share"] * (far.number > 0)[:, None, :, None]
        return torch.lerp(near.attend(), far.o, share)
'''

RULE = '''
"""The last value that was read, whatever is asked."""
import torch
from hf_linear_attn.layers.rules.base import Reading, Rule
from hf_linear_attn.layers.state import Slot

class Last(Rule):
    name = "last"

    def slots(self, kv_heads, feature_dim, value_dim, *others):
        return {"last": Slot((kv_heads, value_dim))}

    def read(self, call, state):
        v, key_mask, delay = call.v, call.key_mask, call.delay
        before = v.new_zeros(v.shape[0], v.shape[1], v.shape[3]) if state is None else state["last"].to(v.dtype)
        real = torch.ones(v.shape[0], v.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        places = torch.where(real, torch.arange(1, v.shape[2] + 1), 0).cummax(1)[0]
        places = torch.nn.functional.pad(places, (delay, 0))[:, : v.shape[2]]
        values = torch.cat([before[:, :, None], v], 2)
        o = values.gather(2, places[:, None, :, None].expand(-1, v.shape[1], -1, v.shape[3]))
        read = max(v.shape[2] - delay, 0)
        final = torch.where(real, torch.arange(1, v.shape[2] + 1), 0)[:, :read]
        last = final.amax(1) if read else torch.zeros(len(v), dtype=torch.long)
        kept = values.gather(2, last[:, None, None, None].expand(-1, v.shape[1], 1, v.shape[3]))[:, :, 0]
        return Reading(o.repeat_interleave(call.phi_q.shape[1] // v.shape[1], 1), {"last": kept.float()})
'''


@pytest.fixture
def add(tmp_path, monkeypatch):
    """Return a function that adds a file to a package of parts, as if it had been there when that was imported."""

    def function(package, known, base, source):
        (tmp_path / "mine_for_tests.py").write_text(source)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        monkeypatch.setitem(known, "nothing", None)
        known.pop("nothing")
        importlib.invalidate_caches()
        for name, cls in discover(package.__name__, package.__path__, base).items():
            monkeypatch.setitem(known, name, cls)

    return function


def check(tmp_path, **settings):
    model = patch_model(tiny_model("causal", "llama"), "elu", **settings).eval()
    ids = torch.arange(3, 20)[None]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **options), expected)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(from_pretrained(tmp_path / "saved")(ids).logits, model(ids).logits)


def test_a_mix_is_one_file(add, tmp_path):
    add(mixes, mixes.MIXES, mixes.Mix, MIX)
    check(tmp_path, window=4, sinks=1, mix="half")


@pytest.mark.parametrize("window", [None, 4])
def test_a_rule_is_one_file(add, tmp_path, window):
    add(rules, rules.RULES, rules.Rule, RULE)
    check(tmp_path, window=window, update_rule="last")


def test_what_a_mix_needs_and_a_rule_has_not_is_refused_when_the_config_is_made(add):
    add(rules, rules.RULES, rules.Rule, RULE)
    message = (
        r"`mix` must be one that needs no mass, which update_rule='last' has not, got 'shared'.*available: gate, key"
    )
    with pytest.raises(ArgumentError, match=message):
        LinearAttentionConfig(window=4, mix="shared", update_rule="last")
    with pytest.raises(
        ArgumentError, match=r"`update_rule` must be a known rule, got 'dleta'.*available: additive, decay, .*last"
    ):
        LinearAttentionConfig(update_rule="dleta")
