"""What every release saved is read alike by this version; see README.md."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_linear_attn import from_pretrained, load_context

from . import make

HERE = Path(__file__).parent


def read_again(folder):
    expected = load_file(folder / "expected.safetensors")
    model = from_pretrained(folder)
    given = make.give(model, expected["input_ids"], load_context(folder / "context.safetensors", model))
    for name, value in given.items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("folder", sorted(HERE.glob("[0-9]*/*/")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_releases_are_read(folder):
    read_again(folder)


def test_what_this_version_would_save_is_read(tmp_path):
    make.make(tmp_path / "now")
    folders = sorted((tmp_path / "now").iterdir())
    assert [path.name for path in folders] == sorted(make.CASES)
    for folder in folders:
        read_again(folder)
    with pytest.raises(FileExistsError):
        make.make(tmp_path / "now")
