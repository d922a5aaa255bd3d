"""Settings that must hold before anything imports Triton, and what all tests and doctests share."""

import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# A case may take any time on a busy machine.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

if not torch.cuda.is_available():
    # Without a GPU the kernels are tested in Triton's interpreter, which has to be chosen before the first import.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Where there is no network Transformers tries for half a minute, where there is one a hub would have a say.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Whichever test comes first on a machine waits for loops to be compiled: none has to expect that it is told so.
logging.getLogger("hf_linear_attn.ops.numba").setLevel("ERROR")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the sweep convert otherwise than it does by default."""
    group = parser.getgroup("sweep")
    group.addoption("--update-rule", default="additive", help="the update rule that the sweep converts with")
    group.addoption("--rotary", default="keep", help="whether the sweep converts with the rotation undone")


USERS_MAP = """
import torch
from hf_linear_attn.feature_maps import FeatureMap, register_feature_map

@register_feature_map
class Cubed(FeatureMap):
    name, formula, paper = "cubed", "max(x, 0)^3", "a file of mine"

    @property
    def feature_dim(self):
        return self.head_dim

    def phi(self, x):
        return torch.relu(x) ** 3
"""


@pytest.fixture(autouse=True)
def _maps_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the feature maps that a test or a doctest registers: other tests draw from all that there are."""
    from hf_linear_attn.feature_maps import base

    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))


@pytest.fixture
def users_map(tmp_path: Path) -> Path:
    """Return a user's file that registers the feature map ``cubed``."""
    (tmp_path / "mine.py").write_text(USERS_MAP)
    return tmp_path / "mine.py"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run a test on one thread: sums have one order, and tests do not fight for cores with threads of torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Let the compiler know no graph when a test begins, nor when it is over."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """Return a context in which no file can become longer than a number of bytes, as on a disk that is full."""

    @contextmanager
    def full_after(nbytes: int) -> Iterator[None]:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limit[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, before)

    return full_after
