"""Encoders from end to end: rows, losses, distillation, saving, and what is refused."""

import copy
import json
import math
import random
import string

import pytest
import torch

from hf_linear_attn import from_pretrained, patch_model
from hf_linear_attn.distill import DistillationSettings, distill
from hf_linear_attn.distill.data import Batch, load_data
from hf_linear_attn.distill.losses import hidden_loss
from hf_linear_attn.encoders import Frame, Pooling, embed, hidden_states, pooling_of
from hf_linear_attn.errors import ArgumentError, CheckpointError
from hf_linear_attn.evaluation.embedding import embed_all
from tests.distill.tiny import tiny_teacher
from tests.distill.tiny_encoders import (
    framing_tokenizer,
    save_sentence_model,
    tiny_bert,
    tiny_masked_lm,
    tiny_roberta,
)

MEAN = Pooling()


@pytest.fixture
def sentences(tmp_path):
    """Return a file of texts of very different lengths, each of a few letters of its own."""
    rng = random.Random(0)
    lines = []
    for _ in range(160):
        letters = rng.sample(string.ascii_letters + string.digits, 3)
        words = ["".join(rng.choices(letters, k=4)) for _ in range(rng.randint(1, 6))]
        lines.append(json.dumps({"text": " ".join(words + words[: rng.randint(0, 4)])}) + "\n")
    path = tmp_path / "sentences.jsonl"
    path.write_text("".join(lines))
    return str(path)


def encoder_settings(**changes):
    base = {
        "block_tokens": 16, "length_factors": [1, 2, 4], "rows": 8, "transfer_steps": 2, "distill_steps": 3,
        "heldout_rows": 12, "log_every": 1, "progress": False, "distill_lr": 1e-3, "map_lr": 1e-2,
    }  # fmt: skip
    return DistillationSettings.from_preset("encoder", **(base | changes))


def test_a_row_is_one_text_between_special_tokens(sentences):
    tokenizer = framing_tokenizer()
    train, heldout = load_data(encoder_settings(dataset=sentences), tokenizer)
    for data in (train, heldout):
        batch = data.batch(range(8), 32)
        assert batch.position_ids is None
        assert batch.input_ids.shape[1] == batch.real.sum(1).max() <= 32
        for ids, real in zip(batch.input_ids, batch.real, strict=True):
            row = ids[real].tolist()
            assert (row[0], row[-1]) == (2, 3)
            assert not {0, 2, 3} & set(row[1:-1])
    # Long texts are cut into several.
    whole = {tokenizer.decode(data.text_row(n, 64).input_ids[1:-1]) for data in (train, heldout) for n in range(200)}
    pieces = {tokenizer.decode(train.text_row(n, 16).input_ids[1:-1]) for n in range(300)}
    assert all(any(piece in text for text in whole) for piece in pieces)
    assert max(map(len, pieces)) == 14


@pytest.mark.parametrize("streaming", [False, True])
def test_chats_become_texts_too(tmp_path, streaming):
    row = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]}
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 40)
    tokenizer = framing_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    data = load_data(encoder_settings(dataset=str(tmp_path / "a.jsonl"), streaming=streaming), tokenizer)[0]
    assert tokenizer.decode(data.text_row(0, 64).input_ids) == "[CLS]Why?|Because.|[SEP]"


def test_the_loss_of_hidden_states_is_measured_against_their_spread():
    generator = torch.Generator().manual_seed(0)
    x = 7 + 3 * torch.randn(4, 50, 8, generator=generator)
    real = torch.arange(50)[None] < torch.tensor([50, 9, 30, 1])[:, None]
    assert hidden_loss(x, x, real).tolist() == [0, 0, 0, 0]
    mean = x[real].mean(0).expand_as(x)
    loss = hidden_loss(mean, x, real)
    assert (loss * real.sum(1)).sum() / real.sum() == pytest.approx(1, rel=0.05)
    noise = x.masked_fill(real[..., None], 0) + mean * real[..., None]
    torch.testing.assert_close(hidden_loss(noise, x, real), loss)


@pytest.mark.parametrize("make", [tiny_bert, tiny_masked_lm, tiny_roberta])
def test_hidden_states_are_those_of_each_layer(make):
    model = make()
    batch = Batch(torch.randint(5, 260, (2, 9)), torch.ones(2, 9), torch.arange(9)[None] < torch.tensor([[9], [4]]))
    states = hidden_states(model, batch.input_ids, batch.real)
    assert len(states) == 2
    inner = model.base_model(input_ids=batch.input_ids, attention_mask=batch.real.long())
    torch.testing.assert_close(states[-1], inner.last_hidden_state)
    torch.testing.assert_close(embed(model, batch.input_ids, batch.real, MEAN), MEAN(states[-1], batch.real))


def test_a_student_of_six_layers_comes_near_its_teacher(sentences):
    """The small version of what docs/results/notebook.md tells of encoders."""
    teacher, tokenizer = tiny_bert(layers=6, hidden_size=32, initializer_range=0.3), framing_tokenizer()
    settings = encoder_settings(
        dataset=sentences, transfer_steps=15, distill_steps=60, distill_lr=2e-3, heldout_rows=48
    )
    untrained = distill(settings.with_changes(transfer_steps=0, distill_steps=0), teacher, tokenizer=tokenizer)
    result = distill(settings, teacher, tokenizer=tokenizer)
    before, after = (1 - found.metrics["student"]["cosine_mean"] for found in (untrained, result))
    assert after <= 0.03
    assert after < 0.7 * before
    texts = [list(range(5, 5 + size)) for size in (1, 40, 7, 90)]
    frame = Frame.of(tokenizer)
    together, alone = (embed_all(result.student, texts, frame, MEAN, pad=0, batch=batch) for batch in (4, 1))
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [tiny_bert, tiny_masked_lm, tiny_roberta])
@pytest.mark.parametrize("trainable", ["full", "lora"])
def test_encoders_learn_and_load_again(tmp_path, sentences, make, trainable):
    make().save_pretrained(tmp_path / "teacher")
    framing_tokenizer().save_pretrained(tmp_path / "teacher")
    settings = encoder_settings(
        model=str(tmp_path / "teacher"), dataset=sentences, output_dir=str(tmp_path / "run"), trainable=trainable,
    )  # fmt: skip
    result = distill(settings)
    assert all(math.isfinite(record["loss_nats"]) for record in result.history)
    ids, mask = torch.tensor([[2, 9, 8, 7, 3]]), torch.ones(1, 5, dtype=torch.bool)
    loaded = from_pretrained(tmp_path / "run")
    assert type(loaded).__name__ == make().__class__.__name__
    torch.testing.assert_close(embed(loaded, ids, mask, MEAN), embed(result.student, ids, mask, MEAN))
    card = (tmp_path / "run" / "README.md").read_text()
    assert "mean cosine to the teacher" in card
    assert "recall" not in card.split("## Limits")[1]
    # The student goes on learning from the same teacher.
    changes = {"stages": ["embed"], "distill_steps": 1, "trainable": "full"}
    more = settings.with_changes(student=str(tmp_path / "run"), output_dir=None, **changes)
    assert distill(more).metrics["student"]["cosine_mean"] > 0.8


def test_a_sentence_model_stays_one(tmp_path, sentences):
    name = save_sentence_model(tmp_path / "teacher", tiny_bert(), {"pooling_mode_cls_token": True})
    result = distill(encoder_settings(model=name, dataset=sentences, output_dir=str(tmp_path / "run")))
    for file in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        assert json.loads((tmp_path / "run" / file).read_text()) == json.loads(
            (tmp_path / "teacher" / file).read_text()
        )
    assert (tmp_path / "run" / "2_Normalize").is_dir()
    assert pooling_of(str(tmp_path / "run")).modes == ("cls",)
    assert result.metrics["student"]["cosine_mean"] > 0


def test_the_pooling_is_what_is_learned(sentences):
    teacher, tokenizer = tiny_bert(), framing_tokenizer()
    losses = {
        pooling: distill(encoder_settings(dataset=sentences, pooling=pooling), teacher, tokenizer=tokenizer).history
        for pooling in ("mean", "cls")
    }
    assert losses["mean"][0] | {"elapsed_s": 0, "tokens_per_s": 0, "peak_mib": 0} == losses["cls"][0] | {
        "elapsed_s": 0, "tokens_per_s": 0, "peak_mib": 0,
    }  # fmt: skip
    assert losses["mean"][2]["loss_nats"] != losses["cls"][2]["loss_nats"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recall_share": 0.3}, r"`recall_share` must be 0.0 for an encoder, got 0.3.*predicts no next token"),
        ({"softmax_budget": 0.5}, "`softmax_budget` must be 0.0 for an encoder"),
        ({"teacher_logits": "x"}, "`teacher_logits` must be None for an encoder"),
        ({"shard": True}, "`shard` must be False for an encoder"),
        ({"stages": ["distill", "embed"]}, r"`stages` must all be an encoder's.*got \['distill'\]"),
        ({"embedding_share": 1.5}, r"`embedding_share` must lie in 0\.\.1"),
    ],
)
def test_settings_of_language_models_are_refused(changes, message):
    with pytest.raises(ArgumentError, match=message):
        encoder_settings(**changes)


def test_defaults_give_way_to_an_encoder():
    settings = DistillationSettings(stages=["transfer", "embed"], window=None, sinks=0)
    assert (settings.encoder, settings.recall_share) == (True, 0.0)
    assert not DistillationSettings().encoder


def test_an_encoder_is_not_taught_next_tokens(tmp_path, sentences):
    teacher, tokenizer = tiny_masked_lm(), framing_tokenizer()
    settings = DistillationSettings(
        window=None, sinks=0, dataset=sentences, recall_share=0.0, heldout_rows=0, progress=False
    )
    with pytest.raises(ArgumentError, match=r"`stages` must be an encoder's, `transfer` and `embed`.*preset `encoder`"):
        distill(settings, teacher, tokenizer=tokenizer)
    # Without a trained head, loading it for next tokens would draw one.
    tiny_bert().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"hold all weights of a causal language model.*lacks"):
        distill(settings.with_changes(model=str(tmp_path)))


def test_a_decoder_that_embeds_is_distilled_alike(sentences, tokenizer):
    teacher = tiny_teacher()
    changes = {"dataset": sentences, "pooling": "lasttoken", "window": 4, "sinks": 1}
    result = distill(encoder_settings(**changes), teacher, tokenizer=tokenizer)
    assert result.metrics["student"]["cosine_mean"] > 0


def test_a_copy_is_as_its_teacher(sentences):
    teacher, tokenizer = tiny_bert(), framing_tokenizer()
    student = patch_model(copy.deepcopy(teacher), feature_map="hedgehog")
    settings = encoder_settings(dataset=sentences, transfer_steps=1, distill_steps=0)
    result = distill(settings, teacher, student, tokenizer)
    assert 0 < result.metrics["student"]["cosine_mean"] < 1
    assert result.settings.feature_map == "hedgehog"
