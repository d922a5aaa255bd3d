"""A folder in which the pages' code runs: what they call `your/model` is a tiny model there."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import zstandard
from datasets import Dataset
from transformers import BertConfig, BertForMaskedLM

from hf_linear_attn import patch_model
from tests.distill.tiny import byte_tokenizer, tiny_gpt2, tiny_teacher

ROOT = Path(__file__).parents[2]
MAP = """
import torch
from hf_linear_attn.feature_maps import FeatureMap, register_feature_map

@register_feature_map
class Mine(FeatureMap):
    name, formula, paper = "mine", "max(x, 0)^4", "none"

    @property
    def feature_dim(self):
        return self.head_dim

    def phi(self, x):
        return torch.relu(x) ** 4
"""


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Write the models and files that the pages name."""
    folder = tmp_path_factory.mktemp("pages")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = {
        "your/model": tiny_teacher(),
        "your/instruct": tiny_teacher(),
        "meta-llama/Llama-3.1-8B": tiny_teacher(),
        "gpt2": tiny_gpt2(256),
        "your/encoder": BertForMaskedLM(BertConfig(vocab_size=259, max_position_embeddings=64, **sizes)),
        "runs/student": patch_model(tiny_teacher(), feature_map="norm_preserving", window=8, sinks=2),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    (folder / "your.txt").write_text("one two three four " * 60)
    (folder / "your.jsonl").write_text('{"body": "one two three four five six seven eight"}\n' * 60)
    (folder / "mine.py").write_text(MAP)
    instruct = byte_tokenizer()
    instruct.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    instruct.chat_template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    instruct.save_pretrained(folder / "your/instruct")
    write_datasets(folder)
    return folder


def write_datasets(folder):
    """Write the datasets that the pages name, one of each form."""
    said = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because of that, and of all that came before it."},
    ]
    rows = {
        "stories.jsonl": {"text": "one two three four five six seven eight"},
        "sentences.jsonl": {"text": "one two three four five six seven eight"},
        "chats.jsonl": {"messages": said},
        "alpaca.json": {"instruction": "Translate.", "input": "Himmel", "output": "sky, and heaven, and all above"},
    }
    for name, row in rows.items():
        (folder / name).write_text((json.dumps(row) + "\n") * 60)
    (folder / "pairs.csv").write_text("prompt,completion\n" + "The sky is, blue on most days of the year\n" * 60)
    Dataset.from_dict(
        {"question": ["2 + 2?"] * 60, "answer": [" It is 4, as it always was and will be."] * 60}
    ).to_parquet(folder / "problems.parquet")
    (folder / "stories.jsonl.zst").write_bytes(zstandard.compress((folder / "stories.jsonl").read_bytes()))
    (folder / "corpus").mkdir()
    for name in ("your.txt", "stories.jsonl"):
        shutil.copy(folder / name, folder / "corpus")


@pytest.fixture
def desk(models, tmp_path, monkeypatch):
    """Work in a copy of that folder, beside the repository's own recipes and examples."""
    shutil.copytree(models, tmp_path / "desk")
    for name in ("recipes", "examples"):
        (tmp_path / "desk" / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path / "desk")
    return tmp_path / "desk"
