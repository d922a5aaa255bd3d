"""Encoders small enough to train in a test."""

import json
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)

from tests.distill.tiny import tokenizer_of_bytes

SIZES = {
    "vocab_size": 261,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "max_position_embeddings": 130,
    # Large weights: a model whose outputs depend on its inputs.
    "initializer_range": 0.3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def framing_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes that puts [CLS] and [SEP] around a text, as BERT's does."""
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return tokenizer_of_bytes("[CLS] $A [SEP]", **special)


def tiny_bert(cls: type[PreTrainedModel] = BertModel, layers: int = 2, **changes: object) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cls(BertConfig(num_hidden_layers=layers, **(SIZES | changes))).eval()


def tiny_masked_lm() -> PreTrainedModel:
    return tiny_bert(BertForMaskedLM)


def tiny_roberta() -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return RobertaModel(RobertaConfig(num_hidden_layers=2, pad_token_id=1, **SIZES)).eval()


def save_sentence_model(folder: Path, model: PreTrainedModel, pooling: dict[str, object]) -> str:
    """Save an encoder as sentence-transformers does."""
    model.save_pretrained(folder)
    framing_tokenizer().save_pretrained(folder)
    parts = (("", "models.Transformer"), ("1_Pooling", "models.Pooling"), ("2_Normalize", "models.Normalize"))
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.{kind}"}
        for n, (path, kind) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 128, "do_lower_case": False}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16} | pooling))
    (folder / "2_Normalize").mkdir()
    return str(folder)
