"""What loops on a CPU are made of, against float64, and how they are called."""

import copy
import importlib
import multiprocessing
import pickle
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.errors import ArgumentError, BackendError
from hf_linear_attn.evaluation.meters import PeakTensorBytes, cache_bytes
from hf_linear_attn.feature_maps import get_feature_map
from hf_linear_attn.feature_maps.norm_preserving import _bend
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State
from hf_linear_attn.ops import dispatch
from hf_linear_attn.ops.linear_attention import linear_attention
from hf_linear_attn.ops.rotation import LAYOUTS, Rotation

numba = pytest.importorskip("numba")
np = pytest.importorskip("numpy")

from numba.core.dispatcher import Dispatcher  # noqa: E402

from hf_linear_attn.ops.numba import compile as compiling  # noqa: E402
from hf_linear_attn.ops.numba import parts, run  # noqa: E402
from hf_linear_attn.ops.numba import primitives as p  # noqa: E402

FLOAT = np.float32(0)


def test_what_is_compiled_has_a_name_of_its_own() -> None:
    """It is linked by that, also to what another process has compiled and kept, whose numbers begin anew."""
    modules = [importlib.import_module(f"hf_linear_attn.ops.hybrid.numba.{name}") for name in ("prefill", "step")]
    found = {id(x): x.py_func for m in (p, parts, *modules) for x in vars(m).values() if isinstance(x, Dispatcher)}
    names = [(x.__module__, x.__qualname__) for x in found.values()]
    assert len(names) > 20
    assert len(set(names)) == len(names)


@p.within
def each_exp2(to, x, number):
    a, b = p.pointer(x, FLOAT), p.pointer(to, FLOAT)
    for i in range(number):
        b[i] = p.exp2(a[i])


@p.within
def each_log2(to, x, number):
    a, b = p.pointer(x, FLOAT), p.pointer(to, FLOAT)
    for i in range(number):
        b[i] = p.log2(a[i])


@p.within
def each_narrow(to, x, number):
    a, b = p.pointer(x, FLOAT), p.pointer(to, np.uint16(0))
    for i in range(number):
        b[i] = p.narrow(a[i], np.uint16(0))


@p.within
def product(c, a, b, rows, columns, depth, add):
    p.multiply(
        p.pointer(c, FLOAT),
        columns,
        p.pointer(a, FLOAT),
        depth,
        p.pointer(b, FLOAT),
        columns,
        rows,
        columns,
        depth,
        add,
    )


@p.within
def features(to, x, y, weight, dim, columns, name, factor, power, sharpness):
    parts.features_of_vector(
        p.pointer(to, FLOAT), p.pointer(x, FLOAT), p.pointer(y, FLOAT), p.pointer(weight, FLOAT), dim, columns, name,
        np.float32(factor), np.float32(power), np.float32(sharpness),
    )  # fmt: skip


@p.within
def back(x, turns, dim, turned, by_half, at_end):
    p.turn_back(p.pointer(x, FLOAT), p.pointer(turns, FLOAT), dim, turned, by_half, at_end)


def test_powers_and_logarithms():
    x = torch.cat([torch.linspace(-150, 127, 9999), torch.tensor([-torch.inf, torch.nan, 0.0])])
    found, wanted = torch.empty_like(x), x.double().exp2()
    each_exp2(found.data_ptr(), x.data_ptr(), len(x))
    normal = x >= -126
    assert ((found.double() / wanted - 1).abs() < 3e-7)[normal].all()
    assert (found[x < -127] == 0).all()
    assert found[x.isnan()].isnan().all()
    x = torch.linspace(-80, 80, 9999).exp2()
    found = torch.empty_like(x)
    each_log2(found.data_ptr(), x.data_ptr(), len(x))
    torch.testing.assert_close(found.double(), x.double().log2(), rtol=2e-7, atol=2e-7)


def test_bf16_is_rounded_as_torch_rounds_it():
    x = torch.cat([torch.randn(9999), torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 3e38, 1.00390625])])
    found = torch.empty(len(x), dtype=torch.bfloat16)
    each_narrow(found.data_ptr(), x.data_ptr(), len(x))
    torch.testing.assert_close(found, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(64, 88, 64), (5, 27, 3), (1, 16, 1), (4, 7, 9), (3, 8, 20)])
def test_products(rows, columns, depth, add):
    a, b, c = torch.randn(rows, depth), torch.randn(depth, columns), torch.randn(rows, columns)
    wanted = a.double() @ b.double() + (c.double() if add else 0)
    product(c.data_ptr(), a.data_ptr(), b.data_ptr(), rows, columns, depth, add)
    torch.testing.assert_close(c.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", parts.MAPS)
@pytest.mark.parametrize("length", [1e-3, 1.0, 30.0])
def test_features(name, length):
    dim, columns = 11, 9
    x = length * torch.randn(dim, generator=torch.Generator().manual_seed(0))
    weight, y = torch.randn(dim, columns), torch.empty(columns)
    paired = name in ("hedgehog", "norm_preserving")
    found = torch.empty(2 * columns if paired else dim)
    of_vector = (found, x, y, weight)
    features(*(t.data_ptr() for t in of_vector), dim, columns, parts.MAPS[name], 0.5, 2.5, 0.2)
    wide = 0.5 * (x.double() @ weight.double())
    if name == "norm_preserving":
        wanted = _bend(wide, torch.tensor(2.5, dtype=torch.float64), 0.2)
    elif name == "hedgehog":
        wanted = torch.cat([wide.softmax(-1), (-wide).softmax(-1)])
    else:
        wanted = get_feature_map(name, dim).phi(x.double())
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=1e-6 * wanted.abs().max().item())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rotation(layout):
    dim, turned = 12, 8
    angles = torch.rand(turned // 2)
    turns = 1.2 * torch.cat([angles.cos(), angles.sin()])
    x = torch.randn(dim)
    wanted = Rotation(turns.double()[None, None], layout).undo(x.double()[None, None, None], "torch")[0, 0, 0]
    back(x.data_ptr(), turns.data_ptr(), dim, turned, layout.pairs == "half", layout.at_end)
    torch.testing.assert_close(x.double(), wanted, rtol=1e-5, atol=1e-6)


def layer_of(backend="numba", **settings):
    torch.manual_seed(0)
    settings = {"feature_map": "norm_preserving", "window": 5, "sinks": 2, "backend": backend} | settings
    layer = LinearAttention(LinearAttentionConfig(**settings), Sizes(8, 4, 2, 0.3, 8), "layer")
    for parameter in layer.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    return layer


def draw(tokens, rows=2, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, heads, tokens, 8, generator=g) for heads in (4, 2, 2)]


@torch.no_grad()
def generate(layer, state, start=20, end=28, rows=2):
    """Read tokens one by one, after a first piece where the state is new."""
    text, call, found = draw(40, rows), Call(state=state), []
    if not state.length:
        found.append(layer(*(x[:, :, :start] for x in text), call))
    found += [layer(*(x[:, :, t : t + 1] for x in text), call) for t in range(start, end)]
    return torch.cat(found, 2)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("threads", ["PyTorch's", "own"])
def test_heads_are_shared_out_to_threads(threads, rows, monkeypatch):
    """Those of queries, too, where those of keys are fewer than threads."""
    layer, calls = layer_of(), []
    torch.set_num_threads(1)
    expected = generate(layer, State(), rows=rows)
    monkeypatch.setattr(run, "LEAST_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    team, pool = run._team(run.os.getpid()), run._pool(2, run.os.getpid())
    if threads == "own":
        submit = pool.submit
        monkeypatch.setattr(run, "_team", lambda process: None)
        monkeypatch.setattr(
            pool,
            "submit",
            lambda *task: submit(lambda: calls.append(threading.current_thread().name) or task[0](*task[1:])),
        )
    elif team is None:
        pytest.skip("PyTorch brings no OpenMP whose threads can be reached")
    else:
        monkeypatch.setattr(run, "_team", lambda process: lambda *task: calls.append(task) or team(*task))
    state, mask = State(), torch.tensor([True, False])[:rows, None]
    assert torch.equal(generate(layer, state, rows=rows), expected)
    assert calls
    with torch.no_grad():
        layer(*(x[:, :, 28:29] for x in draw(40, rows)), Call(state=state, key_mask=mask))
    assert state.tensors["seen"].tolist() == [29, 28][:rows]


@pytest.mark.parametrize("later", ["before", "after"])
def test_loops_are_compiled_once_and_again_where_what_they_call_has_changed(later, tmp_path, monkeypatch, caplog):
    """Who waits for that is told so. Numba looks for changes in the file of what it keeps alone."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    caplog.set_level("WARNING", compiling.__name__)
    for source in ("before", later):
        monkeypatch.setattr(compiling, "inspect", types.SimpleNamespace(getsource=lambda module, source=source: source))
        # As another process would, which has compiled nothing yet.
        monkeypatch.setitem(globals(), "ask", p.within(plain_ask))
        monkeypatch.setitem(globals(), "tell", p.within(plain_tell))
        assert compiling.entry(types.FunctionType(answer.__code__, globals(), "answer")).address
    said = [x.message for x in caplog.records if x.name == compiling.__name__]
    message = f"compiling the loop of tests.ops for this processor, once: {compiling.HOW_LONG}"
    assert said == [message] * (1 if later == "before" else 2)


def plain_ask(table):
    return p.pointer(table, np.int64(0))[0]


def plain_tell(table, said):
    p.pointer(table, np.int64(0))[1] = said


def answer(table):
    tell(table, ask(table))  # noqa: F821


@p.within
def note_by_turns(table):
    head = p.pointer(table, np.int64(0))
    part = p.turn(table)
    while part < head[1]:
        for unit in range(head[2] * part // head[1], head[2] * (part + 1) // head[1]):
            p.pointer(head[run.HEAD], np.int64(0))[unit] += 1
        part = p.turn(table)


def note(table):
    note_by_turns(table)


def noted(units=7):
    """Return how often each of some units is run."""
    found = np.zeros(units, np.int64)
    run.in_parts(compiling.entry(note), run.parts_of(units, run.LEAST_WORK), units, (found.ctypes.data,), found)
    return found.tolist()


def in_a_fork(queue):
    queue.put(noted())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("threads", ["PyTorch's", "own"])
def test_a_fork_has_threads_of_its_own(threads, monkeypatch):
    """Those of its parent it would wait for in vain."""
    if threads == "own":
        team = run._team
        monkeypatch.setattr(run, "_team", lambda process: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert noted() == [1] * 7
    if threads == "own":
        monkeypatch.setattr(run, "_team", team)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=in_a_fork, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == [1] * 7
    process.join(60)
    assert process.exitcode == 0


def test_python_threads_run_loops_at_once(monkeypatch):
    """Several Python threads run loops at once, each with a team of its own."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(noted, [5] * 200)) == [[1] * 5] * 200


def test_a_step_goes_by_weights_that_are_replaced_or_trained():
    layer, other = layer_of(), layer_of("torch")
    state, wanted = State(), State()
    generate(layer, state), generate(other, wanted)
    for change in (
        lambda part: part.mix_bias.data.add_(1.0),
        lambda part: setattr(part, "mix_bias", torch.nn.Parameter(part.mix_bias.data - 2)),
        lambda part: setattr(part.feature_map.weight_q, "data", part.feature_map.weight_q.data * 0.5),
        lambda part: part.feature_map.register_parameter("weight_k", torch.nn.Parameter(part.feature_map.weight_k * 2)),
    ):
        change(layer), change(other)
        start = int(state.length)
        torch.testing.assert_close(
            generate(layer, state, start, start + 2), generate(other, wanted, start, start + 2), rtol=1e-4, atol=1e-5
        )


def test_a_step_goes_by_weights_of_which_it_needs_a_copy():
    found = []
    for backend in ("numba", "torch"):
        layer, state = layer_of(backend), State()
        weight = layer.feature_map.weight_q
        weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
        generate(layer, state)
        weight.data.mul_(3)
        found.append(generate(layer, state, 28, 30))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def turn_over(layer):
    weight = layer.feature_map.weight_k
    weight.data = weight.data.mT


@pytest.mark.parametrize(
    "change",
    [
        turn_over,
        lambda layer: setattr(layer.feature_map, "scale", 0.3),
        lambda layer: setattr(layer.feature_map, "scaling", 4.0),
        lambda layer: setattr(layer.rule, "eps", 0.5),
    ],
    ids=["weights that lie otherwise", "scale", "scaling", "eps"],
)
def test_a_step_goes_by_what_is_changed_between_steps(change):
    found = []
    for backend in ("numba", "torch"):
        layer, state = layer_of(backend), State()
        generate(layer, state)
        change(layer)
        found.append(generate(layer, state, 28, 30))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_step_goes_by_its_layer():
    """Layers that share weights may share a state, too, and differ in what is not learned."""
    found = []
    for backend in ("numba", "torch"):
        layer, other, state = layer_of(backend), layer_of(backend, eps=0.5), State()
        for name, module in layer.named_modules():
            other.get_submodule(name)._parameters = module._parameters
        generate(layer, state)
        found.append(generate(other, state, 28, 30))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [2, 3])
def test_a_step_that_does_not_fit_its_state_is_refused(rows):
    """It is not taken as the step before it: a loop would read what lies behind its vectors."""
    layer, state, dtype = layer_of(), State(), torch.bfloat16 if rows == 2 else torch.float32
    generate(layer, state)
    with torch.no_grad(), pytest.raises((ArgumentError, RuntimeError)):
        layer(*(x[:, :, 28:29].to(dtype) for x in draw(40, rows)), Call(state=state))


@torch.no_grad()
def test_a_step_goes_by_how_its_tokens_lie():
    """A step before may have left them otherwise in memory, also with room between the entries of a vector."""
    layer, other, state, wanted = layer_of(), layer_of("torch"), State(), State()
    generate(layer, state), generate(other, wanted)
    text = draw(40)
    ways = (
        torch.Tensor.contiguous,
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.stack([x, x], -1)[..., 0],
    )
    for at, way in enumerate([*ways, *reversed(ways)], 28):
        token = [x[:, :, at : at + 1] for x in text]
        found = layer(*map(way, token), Call(state=state))
        torch.testing.assert_close(found, other(*token, Call(state=wanted)), rtol=1e-4, atol=1e-5)


def test_a_step_goes_by_what_is_asked_of_it():
    """What a loop has served before it does not serve where gradients, the state before it or a branch alone are."""
    for change in ("gradients", "kept", "linear", "map", "inference"):
        layer, other, state, wanted = layer_of(), layer_of("torch"), State(), State()
        generate(layer, state), generate(other, wanted)
        assert state.ready is not None
        if change == "map":
            for part in (layer, other):
                # The same weights, and another factor.
                scaled = get_feature_map("norm_preserving", 8, 4, 2, scaling=0.3, scale=0.5)
                scaled._parameters, part.feature_map = part.feature_map._parameters, scaled
        elif change == "linear":
            layer.disabled = other.disabled = frozenset({"linear"})
        before, found = {name: x.clone() for name, x in state.tensors.items()}, []
        snapshot = dict(state.tensors)
        for part, held in ((layer, state), (other, wanted)):
            token = [x[:, :, 28:29].clone().requires_grad_(change == "gradients") for x in draw(40)]
            with torch.set_grad_enabled(change == "gradients"), torch.inference_mode(change == "inference"):
                o = part(*token, Call(state=held, in_place=change != "kept"))
            if change == "gradients":
                o.sum().backward()
                o = torch.cat([o.detach(), token[0].grad])
            found.append(o)
        torch.testing.assert_close(*(x.clone() for x in found), rtol=1e-4, atol=1e-5)
        if change == "kept":
            assert all(torch.equal(snapshot[name], x) for name, x in before.items())


def test_a_step_goes_by_where_its_state_lies():
    """Also where a tensor is given other memory, as offloading does."""
    layer, other, state, wanted = layer_of(), layer_of("torch"), State(), State()
    generate(layer, state), generate(other, wanted)
    before = [x.data for x in state.tensors.values()]
    for x in state.tensors.values():
        x.data = x.data.clone()
    for x in before:
        x.zero_()
    torch.testing.assert_close(generate(layer, state, 28, 32), generate(other, wanted, 28, 32), rtol=1e-4, atol=1e-5)


def test_a_step_goes_by_the_scaling_of_its_call():
    found = []
    for backend in ("numba", "torch"):
        layer, state = layer_of(backend), State()
        generate(layer, state)
        text = [x[:, :, 28:29] for x in draw(40)]
        with torch.no_grad():
            found.append([layer(*text, Call(state=state, scaling=scaling)) for scaling in (None, 1.5, 0.1)])
    for step, wanted in zip(*found, strict=True):
        torch.testing.assert_close(step, wanted, rtol=1e-4, atol=1e-5)


def test_a_normaliser_below_zero_is_moved_away_from_it():
    settings = {"feature_map": "identity", "mix": "gate", "eps": 0.5}
    found, wanted = (generate(layer_of(backend, **settings), State()) for backend in ("numba", "torch"))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_state_and_its_copy_go_on_apart(again):
    layer, state = layer_of(), State()
    generate(layer, state)
    assert state.ready is not None
    other = again(state)
    assert other.ready is None
    expected = generate(layer, state, 28, 32)
    held = {name: x.clone() for name, x in state.tensors.items()}
    assert torch.equal(generate(layer, other, 28, 32), expected)
    assert all(torch.equal(x, held[name]) for name, x in state.tensors.items())


def test_rows_can_be_selected_between_steps():
    layer, state = layer_of(), State()
    generate(layer, state)
    one = State()
    generate(layer, one)
    state.apply(lambda x: x.flip(0), 1)
    text = [x[:, :, 28:29] for x in draw(40)]
    with torch.no_grad():
        found = layer(*(x.flip(0) for x in text), Call(state=state)).flip(0)
        assert torch.equal(found, layer(*text, Call(state=one)))


def test_what_watches_operations_sees_them():
    layer, state = layer_of("auto"), State()
    generate(layer, state)
    expected = generate(layer, copy.deepcopy(state), 28, 30)
    with FlopCounterMode(display=False) as counter:
        found = generate(layer, state, 28, 30)
    assert counter.get_total_flops() > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_only_looks_on_lets_loops_run(monkeypatch):
    """Memory is counted of what users run."""
    layer, state, calls = layer_of("auto"), State(), []
    loop = run.in_parts
    monkeypatch.setattr(
        "hf_linear_attn.ops.hybrid.numba.prefill.in_parts", lambda *task: calls.append(task) or loop(*task)
    )
    with PeakTensorBytes() as counter:
        generate(layer, state)
    assert calls
    assert state.ready is not None
    assert counter.peak > 0
    # What a step looks up is no part of the state.
    assert cache_bytes(state) == sum(x.nbytes for x in state.tensors.values())


def test_autograd_is_told_that_a_state_has_changed():
    layer, state = layer_of(), State()
    layer(*draw(9), Call(state=state))
    weight = torch.ones((), requires_grad=True)
    loss = (weight * state.tensors["kv"].detach()).sum()
    generate(layer, state, 9, 10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_loops_are_refused_where_they_cannot_run(monkeypatch):
    with pytest.raises(BackendError, match="on meta"):
        layer_of().to("meta")(*(x.to("meta") for x in draw(4)))
    q, k, v = draw(4)
    linear_attention(q, k, v, backend="numba")
    monkeypatch.setattr(dispatch, "HAS_NUMBA", False)
    with pytest.raises(BackendError, match=r"pip install 'hf_linear_attn\[cpu\]'"):
        generate(layer_of(), State())
    with pytest.raises(BackendError, match="Numba is not installed"):
        linear_attention(q, k, v, backend="numba")
    torch.testing.assert_close(generate(layer_of("auto"), State()), generate(layer_of("torch"), State()))


def test_dtypes_that_loops_do_not_take_are_pytorch_s():
    layer, state = layer_of("auto").half(), State()
    with torch.no_grad():
        o = layer(*(x.half() for x in draw(9)), Call(state=state))
        step = layer(*(x.half() for x in draw(1)), Call(state=state))
    assert o.dtype == step.dtype == torch.float16
    assert state.ready is None


class Wrapped(torch.Tensor):
    """A tensor of another kind, which may hold its numbers elsewhere."""


def test_tensors_of_other_kinds_are_pytorch_s(monkeypatch):
    calls, layer, state = [], layer_of("auto"), State()
    for place in ("prefill", "step"):
        monkeypatch.setattr(f"hf_linear_attn.ops.hybrid.numba.{place}.in_parts", lambda *task: calls.append(task))
    with torch.no_grad():
        for text in (draw(9), draw(1)):
            layer(*(x.as_subclass(Wrapped) for x in text), Call(state=state))
    assert not calls


def test_a_later_piece_reads_what_came_before_where_nothing_leaves_its_window():
    """The keys that leave with its first queries are masked, and the state is read all the same."""
    text, mask, found = draw(40), torch.ones(2, 40, dtype=torch.bool), []
    mask[:, 10:26] = False
    for backend in ("numba", "torch"):
        layer, state = layer_of(backend), State()
        with torch.no_grad():
            pieces = [
                layer(*(x[:, :, start:end] for x in text), Call(state=state, key_mask=mask[:, start:end]))
                for start, end in ((0, 15), (15, 40))
            ]
        found.append(torch.cat(pieces, 2)[:, :, mask[0]])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_long_window_costs_nothing_in_a_short_text(monkeypatch):
    """The memory that a loop works in goes by the keys that there are."""
    taken, new_empty = [], torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *n, **o: taken.append(n) or new_empty(x, *n, **o))
    with torch.no_grad():
        layer_of(window=4096)(*draw(10))
    assert max(n[0] for n in taken if isinstance(n[0], int)) < 50_000


@torch.no_grad()
def test_nothing_is_read_of_no_rows():
    layer, state = layer_of(), State()
    assert layer(*draw(9, rows=0), Call(state=state)).shape == (0, 4, 9, 8)
    assert layer(*draw(1, rows=0), Call(state=state)).shape == (0, 4, 1, 8)
