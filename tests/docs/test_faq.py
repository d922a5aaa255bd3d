"""What the troubleshooting page quotes is what the package says."""

import re
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, DynamicCache, MambaConfig, MambaForCausalLM

from hf_linear_attn import LinearAttentionConfig, patch_model
from hf_linear_attn.distill import DistillationSettings, distill
from hf_linear_attn.distill.cli import main
from hf_linear_attn.errors import HFLinearAttnError
from hf_linear_attn.patching.call_cache import NAME
from tests.distill.tiny import byte_tokenizer, tiny_teacher

PAGE = (Path(__file__).parents[2] / "docs/faq.md").read_text()
QUOTED = re.findall(r"^### (`.*)$", PAGE, re.MULTILINE)


def patched():
    return patch_model(tiny_teacher())


def bert():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return BertForMaskedLM(BertConfig(vocab_size=8, **sizes))


def mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1))


def short_cache():
    cache = DynamicCache(config=patched().config)
    cache.layers.pop()
    return cache


IDS = torch.ones(1, 6, dtype=torch.long)
CAUSES = {
    "`feature_map` must be a registered name": lambda: patch_model(tiny_teacher(), feature_map="elo"),
    "`model` must be a softmax model": lambda: patch_model(patched()),
    "`model` must be a Transformers PreTrainedModel": lambda: patch_model(torch.nn.Linear(1, 1)),
    "`model` must have self-attention": lambda: patch_model(mamba()),
    "`window` must be None": lambda: patch_model(bert(), window=4),
    "`sinks` must be >= 0": lambda: patch_model(tiny_teacher(), sinks=2),
    "`kept` must be >= 0": lambda: patch_model(tiny_teacher(), kept=2),
    "`output_attentions` must be False": lambda: patched()(IDS, output_attentions=True),
    "`attention_mask` must be causal or bidirectional": lambda: patched()(
        IDS, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool).triu()
    ),
    "`cache` must have a layer": lambda: patched()(IDS, **{NAME: short_cache()}),
    "`format_version` must be at most": lambda: LinearAttentionConfig.from_dict({"format_version": 99}),
    "`output_dir` must be the folder to write": lambda: main(["--model", "nowhere"]),
    "`shard` must be False": lambda: distill(
        DistillationSettings(shard=True, progress=False), teacher=tiny_teacher(), tokenizer=byte_tokenizer()
    ),
}


def test_every_quoted_error_has_its_cause_here():
    assert len(QUOTED) >= 10
    assert [sum(text.startswith(start) for start in CAUSES) for text in QUOTED] == [1] * len(QUOTED)


@pytest.mark.parametrize("quoted", QUOTED)
def test_errors_read_as_quoted(quoted):
    cause = next(cause for start, cause in CAUSES.items() if quoted.startswith(start))
    with pytest.raises(HFLinearAttnError) as error:
        cause()
    pattern = ".*".join(re.escape(part) for part in quoted.removesuffix("...").rstrip().split("..."))
    assert re.match(pattern, str(error.value), re.DOTALL), str(error.value)
