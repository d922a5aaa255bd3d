import pytest

from tests.evaluation.helpers import byte_tokenizer, tiny_linear, tiny_llama


@pytest.fixture
def text(tmp_path):
    """Return the path of a text of 306 bytes."""
    (tmp_path / "your.txt").write_text("one two three four five six seven " * 9)
    return str(tmp_path / "your.txt")


@pytest.fixture
def models(tmp_path):
    """Save a student with a tokenizer, and its teacher; return the flags that name them."""
    tiny_linear().save_pretrained(tmp_path / "student")
    tiny_llama().save_pretrained(tmp_path / "teacher")
    byte_tokenizer().save_pretrained(tmp_path / "student")
    return ["--model", str(tmp_path / "student"), "--teacher", str(tmp_path / "teacher")]
