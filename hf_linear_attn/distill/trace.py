"""How much memory a step holds, counted by running it without numbers.

Torch's fake tensors have shapes, dtypes and lifetimes but no storage; so the very code that trains tells what it keeps,
whatever the model and the machine. Texts fill their rows, so that there is no mask.

What a GPU holds is counted on a CPU: our kernels' ops say what they allocate, and launch nothing. Torch's own
operations are those of its CPU.
"""

import copy
import importlib.util
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.stages import Stage
from hf_linear_attn.layers import spans
from hf_linear_attn.ops import dispatch, features
from hf_linear_attn.ops.triton import run
from hf_linear_attn.ops.triton.plan import Launch, Target

Device = Literal["cpu", "cuda"]

H100 = Target("sm_90", 132)
"""The GPU that kernels are planned for; others cut texts into other segments, whose sums are small."""


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of the tensors that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # What code asks of numbers is whether they are well.
            return 1.0 if args[0].dtype.is_floating_point else True
        # Our own ops are opaque to fake tensors: what is in them holds memory too.
        whole = OPDEFS.get(func._schema.name) if func.namespace == "hf_linear_attn" else None
        if whole is not None:
            with self:
                return whole._init_fn(*args, **(kwargs or {}))
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                self.note(x)
        return found

    def note(self, x: Tensor) -> None:
        """Count a tensor's storage while it lives."""
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._forget, key, size).atexit = False

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


class Held(NamedTuple):
    """Bytes of a step.

    Attributes:
        models: Weights and buffers of each model that is there.
        gradients: Of what is trained.
        most: The most that a forward and backward hold beside the models, gradients among them.
        largest: Of the largest tensor that is trained, in fp32.
    """

    models: dict[str, int]
    gradients: int
    most: int
    largest: int


def trace_step(
    make_stage: Callable[[dict[str, nn.Module]], Stage],
    models: dict[str, nn.Module],
    *,
    rows: int,
    length: int,
    forwards: int,
    parts: int,
    sharded: bool,
    autocast: bool,
    device: Device,
) -> Held:
    """Count what a step of a stage holds, of models without storage (on the device ``meta``).

    Args:
        make_stage: Makes the stage of the models by their names.
        models: ``student`` and, where there is one of its own, ``teacher``.
        rows: Sequences of a forward.
        length: Their tokens.
        forwards: Forwards of a step.
        parts: Ranks among which each sequence is split; what they hand each other is not counted.
        sharded: Whether gradients go as they come, since each process keeps its share of them.
        autocast: Whether forwards are computed in bf16.
        device: Where the step would run.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), Tracker() as tracker, ExitStack() as stack:
        # A mask shows what numbers hold.
        for name in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            kept = ALL_MASK_ATTENTION_FUNCTIONS[name]
            stack.callback(ALL_MASK_ATTENTION_FUNCTIONS.__setitem__, name, kept)
            ALL_MASK_ATTENTION_FUNCTIONS[name] = lambda *arguments, **options: None
        if device == "cuda":
            stack.enter_context(as_on_gpu())
        sizes, stored = {}, {}
        for name, model in models.items():
            before = tracker.alive
            stored[name] = with_storage(model)
            sizes[name] = tracker.alive - before
        stage = make_stage(stored)
        stored["student"].train()
        if sharded:
            for parameter in stored["student"].parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_let_go)  # type: ignore[no-untyped-call]
        ids = torch.zeros(rows, length, dtype=torch.int64)
        batch = Batch(ids, torch.ones(ids.shape), torch.ones_like(ids, dtype=torch.bool), None, tuple(range(rows)))
        if parts > 1:
            batch = batch.cut(0, -(-length // parts))

        def learn(part: Tensor) -> None:
            with torch.autocast("cpu", enabled=False):
                part.backward()  # type: ignore[no-untyped-call]

        stage.learn = learn
        start = tracker.peak = tracker.alive
        for _ in range(min(forwards, 2)):
            with torch.autocast("cpu", torch.bfloat16, autocast):
                loss = stage.loss(batch)
            if loss.requires_grad:
                learn(loss)
            del loss
        gradients = sum(p.grad.untyped_storage().nbytes() for p in stage.parameters if p.grad is not None)
        largest = max(p.numel() for p in stage.parameters) * 4
        return Held(sizes, gradients, tracker.peak - start, largest)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Make layers take the path that they take on a GPU, without launching kernels, within a ``with`` block."""
    # Without Triton, what kernels allocate cannot be counted.
    kernels = importlib.util.find_spec("triton") is not None

    def wants_kernels(backend: str, device: torch.device) -> bool:
        return kernels and backend in ("auto", "triton")

    changes: list[tuple[Any, str, Any]] = [
        (dispatch, "_obstacle", lambda device: None),
        (spans, "walks", lambda layer, whole: False),
        (run, "target_of", lambda device: H100),
        (Launch, "run", lambda launch, arguments=None: None),
        *((module, "wants_kernels", wants_kernels) for module in (dispatch, features)),
    ]
    with ExitStack() as stack:
        for place, name, other in changes:
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, other)
        yield


def _let_go(parameter: Tensor) -> None:
    parameter.grad = None


def with_storage(model: nn.Module) -> nn.Module:
    """Return a copy of a module, its weights and buffers in storage that the mode in use gives, tied ones in common."""
    memo: dict[int, Any] = {}
    for x in (*model.parameters(), *model.buffers()):
        new = torch.empty_like(x, device="cpu", requires_grad=False)
        memo[id(x)] = nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new
    return copy.deepcopy(model, memo)
