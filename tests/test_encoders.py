import json

import pytest
import torch
from transformers import BertConfig, BertModel

from hf_linear_attn.encoders import POOLINGS, Frame, Pooling, is_encoder, pooling_of, sentence_modules
from hf_linear_attn.errors import ArgumentError, CheckpointError
from hf_linear_attn.loading import load_model, position_limit
from tests.distill.tiny import byte_tokenizer, tiny_teacher
from tests.distill.tiny_encoders import (
    framing_tokenizer,
    save_sentence_model,
    tiny_bert,
    tiny_masked_lm,
    tiny_roberta,
)


@pytest.mark.parametrize("left", [False, True])
def test_poolings_see_real_tokens_only(left):
    x = torch.tensor([[1.0, -5.0], [4.0, 2.0], [7.0, 6.0]])
    hidden = torch.full((2, 5, 2), 99.0)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    real = slice(2, 5) if left else slice(0, 3)
    hidden[0, real], mask[0, real] = x, True
    hidden[1], mask[1] = 3.0, True
    weights = torch.arange(real.start + 1, real.stop + 1, dtype=torch.float32)
    expected = {
        "cls": x[0],
        "max": torch.tensor([7.0, 6.0]),
        "mean": x.mean(0),
        "mean_sqrt_len_tokens": x.sum(0) / 3**0.5,
        "weightedmean": (x * weights[:, None]).sum(0) / weights.sum(),
        "lasttoken": x[-1],
    }
    assert expected.keys() == POOLINGS.keys()
    for mode, wanted in expected.items():
        torch.testing.assert_close(Pooling((mode,))(hidden, mask)[0], wanted)
    joined = Pooling(("cls", "mean"))(hidden, mask)
    torch.testing.assert_close(joined[0], torch.cat([expected["cls"], expected["mean"]]))


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean",)),
        ({"pooling_mode_cls_token": True, "include_prompt": True}, ("cls",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ("max", "mean")),
        ({"pooling_mode_lasttoken": True}, ("lasttoken",)),
        ({"pooling_mode_weightedmean_tokens": True, "pooling_mode_mean_sqrt_len_tokens": True},
         ("mean_sqrt_len_tokens", "weightedmean")),
        ({"pooling_mode": "cls"}, ("cls",)),
    ],
)  # fmt: skip
def test_a_sentence_models_pooling_is_read(tmp_path, config, modes):
    name = save_sentence_model(tmp_path / "m", tiny_bert(), config)
    assert pooling_of(name).modes == modes
    assert pooling_of(name, "max").modes == ("max",)


def test_without_a_description_the_mean_is_taken(tmp_path):
    assert pooling_of(None).modes == pooling_of(str(tmp_path)).modes == ("mean",)
    assert pooling_of(None, "mean+cls").modes == ("cls", "mean")
    with pytest.raises(ArgumentError, match=r"`pooling` must be known, got 'men'.*available: cls, lasttoken, max"):
        pooling_of(None, "men")


def test_descriptions_that_cannot_be_used_are_named(tmp_path):
    name = save_sentence_model(tmp_path / "m", tiny_bert(), {"pooling_mode_mean_tokens": False})
    with pytest.raises(CheckpointError, match=r"`pooling` must be described .*names no pooling that is known"):
        pooling_of(name)
    (tmp_path / "m" / "1_Pooling" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        pooling_of(name)
    modules = tmp_path / "m" / "modules.json"
    for content, message in (
        ("{", "reading modules.json failed"),
        ('{"0": 1}', "modules.json is no list of modules"),
        (json.dumps([{"path": "0_Transformer", "type": "Transformer"}]), "have its Transformer at the folder's root"),
        (json.dumps([{"path": "", "type": "T"}, {"path": "../x", "type": "Pooling"}]), "modules inside its folder"),
    ):
        modules.write_text(content)
        with pytest.raises(CheckpointError, match=message):
            sentence_modules(name)


def test_frames():
    assert Frame.of(framing_tokenizer()) == ((2,), (3,))
    assert Frame.of(framing_tokenizer()).around([7, 8]) == [2, 7, 8, 3]
    assert Frame.of(byte_tokenizer()) == ((1,), ())


def test_encoders_are_told_from_decoders():
    assert is_encoder(tiny_bert())
    assert is_encoder(tiny_masked_lm())
    assert not is_encoder(tiny_teacher())
    assert not is_encoder(tiny_bert(is_decoder=True))


@pytest.mark.parametrize("make", [tiny_bert, tiny_masked_lm, tiny_roberta])
def test_the_class_that_a_checkpoint_names_is_loaded(tmp_path, make):
    model = make()
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), kind="encoder")
    assert type(loaded) is type(model)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), loaded.parameters(), strict=True))


def test_a_pooler_that_is_not_there_is_not_drawn(tmp_path):
    BertModel(tiny_bert().config, add_pooling_layer=False).save_pretrained(tmp_path)
    assert load_model(str(tmp_path), kind="encoder").pooler is None


def test_weights_that_would_be_drawn_are_refused(tmp_path):
    model = tiny_bert()
    model.save_pretrained(tmp_path / "no head")
    config = json.loads((tmp_path / "no head" / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "no head" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"`model` must hold all weights of an encoder.*lacks cls\.predictions"):
        load_model(str(tmp_path / "no head"), kind="encoder")
    state = {name: x for name, x in model.state_dict().items() if "layer.1." not in name}
    model.save_pretrained(tmp_path / "no layer", state_dict=state)
    with pytest.raises(CheckpointError, match=r"hold all weights of an encoder.*lacks encoder\.layer\.1\."):
        load_model(str(tmp_path / "no layer"), kind="encoder")
    (tmp_path / "no layer" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="be an encoder that can be loaded"):
        load_model(str(tmp_path / "no layer"), kind="encoder")


def test_positions_that_padding_takes_are_not_counted():
    assert position_limit(tiny_bert()) == 130
    assert position_limit(tiny_roberta()) == 128
    assert position_limit(BertModel(BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1))) == 512
