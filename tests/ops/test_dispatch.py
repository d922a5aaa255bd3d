import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_linear_attn import LinearAttentionConfig, linear_attention
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError, BackendError
from hf_linear_attn.feature_maps import load_feature_maps
from hf_linear_attn.feature_maps.elementwise import elementwise_map
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State
from hf_linear_attn.ops import dispatch as backend_choice
from hf_linear_attn.ops.step import decode_state, decode_step_
from hf_linear_attn.ops.triton import plan
from tests.ops.oracle import DEVICE


def tensors(dim: int = 4, **kwargs: object) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 2, 3, dim, **kwargs) for _ in range(3))


def refusal(reason: str) -> str:
    return re.escape(f"`backend` must be able to run here, got 'triton'. {reason}")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dim": 320}, "q has head size 320, and the kernels hold at most 256; use backend='torch'."),
        ({"dim": 520, "dtype": torch.bfloat16}, "q has head size 520, and the kernels hold at most 512; use"),
        (
            {"dtype": torch.float64},
            "the kernels take bf16, fp16 and fp32, not float64; use backend='torch'.",
        ),
    ],
)
def test_refuses_what_kernels_do_not_hold(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(BackendError, match=refusal(reason)):
        linear_attention(*tensors(**arguments), backend="triton")
    linear_attention(*tensors(**arguments), backend="auto")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": (1, 2, 3)}, ArgumentError, r"`k` must have 4 dimensions \[B, heads, tokens, dim\], got \(1, 2, 3\)"),
        ({"k": (2, 2, 3, 4), "v": (2, 2, 3, 4)}, ArgumentError, "`k` must have q's batch size 1"),
        ({"k": (1, 2, 3, 5)}, ArgumentError, "`k` must have q's head dim 4"),
        ({"q": (1, 3, 3, 4)}, ArgumentError, "`k` must have a head count that divides q's 3, got 2"),
        ({"v": (1, 2, 5, 4)}, ArgumentError, r"`v` must match k's \[B, HKV, S\] = \(1, 2, 3\), got \(1, 2, 5, 4\)"),
        ({"q": (1, 2, 5, 4)}, ArgumentError, "`k` must have q's 5 tokens where causal, got 3"),
        ({"v": (1, 2, 0, 4), "k": (1, 2, 0, 4)}, ArgumentError, "`k` must not be empty"),
        ({"k": {"device": "meta"}}, ArgumentError, f"`k` must be on q's device {DEVICE}, got 'meta'. Move k or q"),
        (
            {"v": {"dtype": torch.float16}},
            ArgumentTypeError,
            "`v` must have q's dtype torch.float32, got torch.float16",
        ),
        ({"q": {"dtype": torch.int64}}, ArgumentTypeError, "`q` must be bf16, fp16, fp32 or fp64, got torch.int64"),
    ],
)
@pytest.mark.parametrize("name", ["torch", "triton", "reference"])
def test_refuses_tensors_that_do_not_fit(changes: dict, error: type[Exception], message: str, name: str) -> None:
    given = dict(zip("qkv", tensors(), strict=True))
    for which, change in changes.items():
        given[which] = given[which].to(**change) if isinstance(change, dict) else torch.randn(change)
    with pytest.raises(error, match=message):
        linear_attention(**given, backend=name)


@pytest.mark.parametrize("bounds", [[2, 3], [0, 2], [0, 2, 1, 3], [0, 10]], ids=str)
def test_refuses_boundaries_that_leave_tokens_out(bounds: list[int]) -> None:
    # On a GPU nobody waits to see it: the device stops.
    q, k, v = (x.cpu() for x in tensors())
    message = f"`cu_seqlens` must rise from 0 to T = 3, got {re.escape(str(bounds))}. Prepend 0 to the lengths' sum"
    with pytest.raises(ArgumentError, match=message):
        linear_attention(q, k, v, cu_seqlens=torch.tensor(bounds, device="cpu"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cu_seqlens": [0, 3]}, ArgumentTypeError, "`cu_seqlens` must be a tensor or None, got 'list'"),
        (
            {"cu_seqlens": torch.tensor([0, 3], device="meta")},
            ArgumentError,
            "`cu_seqlens` must be on q's device .*Move",
        ),
        ({"state": (1, 2)}, ArgumentTypeError, "`state` must be a LinearAttentionState or None, got 'tuple'"),
        ({"feature_map": 3}, ArgumentTypeError, "`feature_map` must be a name, a FeatureMap or None, got 3"),
        ({"q": [1.0]}, ArgumentTypeError, "`q` must be a tensor, got 'list'"),
        (
            {"positions": torch.zeros(1, 3)},
            ArgumentTypeError,
            "`positions` must be int64 or int32, got torch.float32",
        ),
        (
            {"positions": torch.zeros(1, 2, dtype=torch.long)},
            ArgumentError,
            r"`positions` must have shape \[B, T\] = \(1, 3\), got \(1, 2\)",
        ),
    ],
    ids=["cu_seqlens", "cu_seqlens elsewhere", "state", "feature_map", "q", "positions", "positions of a shape"],
)
def test_refuses_arguments_of_another_kind(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_attention(**dict(zip("qkv", tensors(), strict=True)) | changes)


@pytest.mark.parametrize("feature_map", ["elu", "hedgehog"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_autocast_changes_nothing(feature_map: str, backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in (torch.randn(1, 2, 70, 16) for _ in range(3)))

    def run() -> torch.Tensor:
        torch.manual_seed(0)
        return linear_attention(q, k, v, feature_map=feature_map, return_state=False, backend=backend)

    expected = run()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        found = run()
    gradients = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (found, expected))
    for x, y in zip((found, *next(gradients)), (expected, *next(gradients)), strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x, y)


def test_refuses_features_wider_than_kernels_hold() -> None:
    with pytest.raises(BackendError, match=refusal("q has head size 320")):
        linear_attention(*tensors(160), feature_map="hedgehog", backend="triton")


def test_refuses_cpu_tensors_unless_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reason = "the tensors are on the CPU, where kernels run only interpreted"
    q, k, v = tensors(device="cpu")
    with pytest.raises(BackendError, match=refusal(reason)):
        linear_attention(q, k, v, backend="triton")
    with pytest.raises(BackendError, match=refusal(reason)):
        decode_step_(q, k, v, decode_state(1, 2, 4, 4, device="cpu"), backend="triton")


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """Forget what runs here, before and after."""
    for remembered in (backend_choice._version_obstacle, backend_choice._gpu_obstacle):
        remembered.cache_clear()
    yield
    for remembered in (backend_choice._version_obstacle, backend_choice._gpu_obstacle):
        remembered.cache_clear()


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, "Triton is not installed (pip install 'triton>=3.6'); use backend='torch'."),
        ("3.5.1", "Triton 3.5.1 is older than 3.6, the first version that the kernels are built for"),
    ],
)
def test_refuses_missing_or_old_triton(found: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if found is None:
            raise backend_choice.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(backend_choice, "version", version)
    with pytest.raises(BackendError, match=refusal(reason)):
        linear_attention(*tensors(), backend="triton")


@pytest.mark.usefixtures("asked_anew")
def test_refuses_unsupported_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_choice, "target_of", lambda device: None)
    with pytest.raises(BackendError, match="is not supported; kernels exist for NVIDIA sm_80 and newer and for AMD"):
        linear_attention(*tensors(), backend="triton")


@pytest.mark.parametrize(
    ("major", "minor", "arch"),
    [
        (7, 5, None),
        (8, 0, "sm_80"),
        (8, 6, "sm_86"),
        (8, 9, "sm_89"),
        (9, 0, "sm_90"),
        (10, 0, "sm_90"),
        (12, 0, "sm_89"),
    ],
)
def test_knows_processors(major: int, minor: int, arch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        multi_processor_count = 100

    Properties.major, Properties.minor = major, minor
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    target = plan.target_of.__wrapped__(torch.device("cuda", 0))
    assert target == (None if arch is None else plan.Target(arch, 100))


@pytest.mark.parametrize("name", ["elu", "relu", "squared_relu", "exp", "sigmoid", "identity"])
@pytest.mark.parametrize("which", ["torch", "triton"])
def test_maps_agree_at_the_extremes(name: str, which: str) -> None:
    # One key of one token: the state is phi(k) v itself.
    k = torch.tensor([-30.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 9.99, 10.0, 10.01, 30.0])[None, None, None]
    _, state = linear_attention(k, k, torch.ones(1, 1, 1, 1), feature_map=name, backend=which)
    expected = elementwise_map(name).phi(k.double())
    torch.testing.assert_close(state.z.double()[0], expected[0, 0], rtol=2e-6, atol=1e-12)


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    ("major", "found", "outcome"),
    [
        (10, "3.7.1", "refused"),
        (10, "3.8.0", None),
        (11, "3.6.0", "refused"),
        # Consumer Blackwell has other matrix units.
        (12, "3.6.0", None),
        (9, "3.8.0+git1234", "warned"),
        (9, "3.9.0", None),
        (9, "3.10.0", None),
        (8, "3.6.0", None),
    ],
)
def test_triton_known_to_make_wrong_code_is_named(
    major: int, found: str, outcome: str | None, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr(backend_choice, "version", lambda name: found)
    monkeypatch.setattr(backend_choice, "target_of", lambda device: plan.Target("sm_90", 132))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    reason = backend_choice.device_obstacle(gpu)
    assert backend_choice.device_obstacle(gpu) == reason
    said = reason if outcome == "refused" else str(recwarn.pop(UserWarning).message) if outcome else None
    if said is not None:
        assert said.startswith(f"Triton {found} on A GPU ")
        assert "triton-lang/triton" in said
        assert "install triton>=3." in said
    # One warning at most, and none for those refused.
    assert len(recwarn) == 0
    assert (reason is not None) == (outcome == "refused")
    # With an assembler of one's own, what Triton brings does not matter.
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/usr/local/cuda/bin/ptxas")
    backend_choice._gpu_obstacle.cache_clear()
    assert (backend_choice.device_obstacle(gpu) is not None) == (outcome == "refused")
    assert len(recwarn) == 0


def test_a_fallback_names_its_cause_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_choice, "wants_kernels", lambda backend, device: True)
    with pytest.warns(RuntimeWarning, match="q has head size 4096, and .*: PyTorch's operations take its place"):
        backend_choice.choose_backend(
            "auto", torch.device("cpu"), lambda: "q has head size 4096, and kernels hold less"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend_choice.choose_backend(
            "auto", torch.device("cpu"), lambda: "q has head size 4096, and kernels hold less"
        )


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"mix": "shared"}, "no kernel reads the update rule 'additive' with the mix 'shared'"),
        ({"feature_map": "cubed"}, "no kernel computes the feature map Cubed"),
    ],
)
def test_a_layer_whose_steps_no_kernel_takes_says_so_once(
    users_map: Path, settings: dict[str, str], cause: str
) -> None:
    """Also with a map of the user's, which would take the slow way without a word."""
    load_feature_maps(users_map)
    backend_choice._warn_once.cache_clear()
    config = LinearAttentionConfig(**({"feature_map": "elu", "window": 2, "backend": "triton"} | settings))
    layer, state = LinearAttention(config, Sizes(16, 2, 1, 0.25), "layer"), State()
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 1, 1, 16)

    @torch.no_grad()
    def read_two_tokens() -> None:
        for _ in range(2):
            layer(q, k, k, Call(state=state))

    with pytest.warns(RuntimeWarning, match=cause):
        read_two_tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_two_tokens()
