"""What takes the place of vLLM's attention in a converted layer: its state lies in a page of vLLM's cache."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.linear_attn import BailingLinearAttentionBackend, BailingLinearAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from hf_linear_attn.layers import LinearAttention
from hf_linear_attn.layers.pool import Pool, Rows, Texts, can_step, pool_slots, read_, read_rows_, step_rows_
from hf_linear_attn.ops.library import own_precision
from hf_linear_attn.ops.rotation import Layout, Rotation
from hf_linear_attn.serving.vllm.engine import BACKEND, OPERATION
from hf_linear_attn.serving.vllm.pages import Part, page_of


class Text(NamedTuple):
    """New tokens of one request.

    Attributes:
        start: Number of the first among the tokens of a call.
        end: The same behind the last.
        length: Tokens of the request read before.
        source: The page that holds what was read.
        targets: The pages that shall hold it afterwards: one, or one for each token where some may be rejected.
    """

    start: int
    end: int
    length: int
    source: int
    targets: list[int]


class Several(NamedTuple):
    """New tokens of several requests that are read at once, filled up to one length.

    Attributes:
        each: The requests.
        texts: How many tokens they have read, and how many come.
        at: Numbers of the tokens among those of a call ``[B, T]``; behind the end of a text, of its last.
        real: Which of these, in order, are no filling.
        tokens: Their numbers among those of a call.
    """

    each: list[Text]
    texts: Texts
    at: Tensor
    real: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, each: list[Text], device: torch.device) -> "Several":
        """Lay requests out side by side; nothing is asked of the device."""
        new = [text.end - text.start for text in each]
        most = max(new)
        at = [min(text.start + i, text.end - 1) for text in each for i in range(most)]
        real = [row * most + i for row, count in enumerate(new) for i in range(count)]
        tokens = [token for text in each for token in range(text.start, text.end)]
        facts = [[text.targets[0] for text in each], [text.length for text in each], new]
        places, lengths, counts = torch.tensor(facts, device=device)
        whole = torch.tensor(at, device=device).view(len(each), most)
        both = (torch.tensor(x, device=device) for x in (real, tokens))
        return cls(each, Texts(places, lengths, counts, most), whole, *both)


@dataclass
class Metadata:
    """What a call of the model is made of.

    Attributes:
        texts: Requests of which more than one token is read, or that have none to step from.
        at: Where the single tokens of all others stand among the tokens; None where there are none.
        rows: Their pages, and how many tokens they have read.
        positions: Of all tokens; None where vLLM does not say.
        rotations: Those that layers have asked for.
    """

    texts: list[Text]
    at: slice | Tensor | None
    rows: Rows
    positions: Tensor | None
    rotations: dict[tuple[int, int], Rotation] = field(default_factory=dict)

    @cached_property
    def readings(self) -> list["Text | Several"]:
        """The texts, those of like lengths together, so that less than half of a reading is filling."""
        return _together(self.texts, self.rows.places.device)

    @cached_property
    def all_readings(self) -> list["Text | Several"]:
        """The same of all requests, for layers without a step."""
        return _together(self.singles + self.texts, self.rows.places.device)

    @cached_property
    def singles(self) -> list[Text]:
        """The single tokens as texts."""
        tokens = range(self.at.start, self.at.stop) if isinstance(self.at, slice) else self.at
        if tokens is None:
            return []
        every = zip(map(int, tokens), self.rows.lengths.tolist(), self.rows.places.tolist(), strict=True)
        return [Text(token, token + 1, length, place, [place]) for token, length, place in every]

    def rotation(self, rotary: Any, read: "Text | Several | None" = None) -> Rotation | None:
        """Return how new tokens of texts are turned, in all layers alike; without texts the single ones, of a row each.

        ``rotary`` is what turns them, None where that is not to be undone.
        """
        at = self.at if read is None else read.at if isinstance(read, Several) else slice(read.start, read.end)
        if rotary is None or self.positions is None or at is None:
            return None
        # Readings are kept as long as this is.
        key = id(rotary), id(read)
        if key not in self.rotations:
            turns = rotary.cos_sin_cache[self.positions[at]]
            layout = Layout("half" if rotary.is_neox_style else "next")
            turns = turns[:, None] if read is None else turns if isinstance(read, Several) else turns[None]
            self.rotations[key] = Rotation(turns, layout)
        return self.rotations[key]


class Builder(BailingLinearAttentionMetadataBuilder):  # type: ignore[misc]
    """Make :class:`Metadata`.

    It derives from a builder of vLLM's since the runner tells how many drafted tokens were accepted to that one only.
    """

    @classmethod
    def get_cudagraph_support(cls, *args: Any) -> AttentionCGSupport:
        """Decline: a graph of the whole model would hold one batch's requests."""
        return AttentionCGSupport.NEVER

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        *,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
    ) -> Metadata:
        """Sort the requests of a call into single tokens, read all at once, and texts, read one by one."""
        common, device = common_attn_metadata, common_attn_metadata.seq_lens.device
        mode = self.vllm_config.cache_config.mamba_cache_mode
        table = mamba_get_block_table_tensor(common.block_table_tensor, common.seq_lens, self.kv_cache_spec, mode)
        starts = common.query_start_loc_cpu.tolist()
        drafts = num_accepted_tokens is not None
        known = common.seq_lens if drafts else common.seq_lens_cpu_upper_bound
        ends = (common.seq_lens if known is None else known).tolist()
        steps: list[int] = []
        read: list[int] = []
        for i, (start, end) in enumerate(pairwise(starts)):
            if end > start:
                # The first token of a text has no state to step.
                single = end - start == 1 < ends[i] and not drafts
                (steps if single else read).append(i)
        texts = []
        if read:
            pages = table.tolist()
            accepted = None if num_accepted_tokens is None else num_accepted_tokens.tolist()
            drafted = None if num_decode_draft_tokens_cpu is None else num_decode_draft_tokens_cpu.tolist()
            for i in read:
                count = starts[i + 1] - starts[i]
                source = pages[i][0 if accepted is None else max(accepted[i] - 1, 0)]
                each = drafted is not None and drafted[i] >= 0
                targets = pages[i][:count] if each else pages[i][:1]
                texts.append(Text(starts[i], starts[i + 1], ends[i] - count, source, targets))
        at: slice | Tensor | None = None
        rows = torch.tensor(steps, dtype=torch.int64, device=device)
        if steps:
            tokens = [starts[i] for i in steps]
            together = tokens[-1] - tokens[0] == len(tokens) - 1
            at = slice(tokens[0], tokens[-1] + 1) if together else torch.tensor(tokens, device=device)
        shortest = min((ends[i] - 1 for i in steps), default=1)
        single = Rows(table[rows, 0].long(), common.seq_lens[rows].long() - 1, shortest)
        return Metadata(texts, at, single, common.positions)


class Backend(BailingLinearAttentionBackend):  # type: ignore[misc]
    """Name the builder."""

    @staticmethod
    def get_name() -> str:
        """Return the name under which it is registered."""
        return BACKEND

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """Return the builder of metadata."""
        return Builder


class ConvertedAttention(nn.Module, MambaBase):  # type: ignore[misc]
    """Attend linearly, with a converted layer, where vLLM's attention did.

    ``value_dim`` is the size V of a value, ``dtype`` that of keys and values. ``rotary`` is the module by which vLLM
    turns queries and keys, where the layer undoes that.
    """

    def __init__(
        self, part: LinearAttention, name: str, value_dim: int, dtype: torch.dtype, rotary: Any = None
    ) -> None:
        super().__init__()
        # In a tuple, and so no modules of this one: weights are loaded under their own names.
        self._held = (part, rotary)
        self.layer_name, self.value_dim = name, value_dim
        self.slots = pool_slots(part, value_dim)
        self.page: tuple[Part, ...] = page_of(self.slots, dtype)
        self.kv_cache: tuple[Tensor, ...] = ()
        self._pool: tuple[tuple[Tensor, ...], Pool] | None = None

    @property
    def mamba_type(self) -> Any:
        """The backend by which vLLM finds the builder of metadata."""
        return MambaAttentionBackendEnum[BACKEND]

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a page's tensors."""
        return tuple(part.shape for part in self.page)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return their dtypes."""
        return tuple(part.dtype for part in self.page)

    @property
    def page_nbytes(self) -> int:
        """The size of a page, unpadded."""
        return sum(part.nbytes for part in self.page)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """Describe the pages; all layers' are as large as the largest."""
        spec = super().get_kv_cache_spec(vllm_config)
        if isinstance(spec, MambaSpec) and spec.page_size_padded is None:
            largest = max(layer.page_nbytes for layer in converted_layers(vllm_config))
            if largest > self.page_nbytes:
                spec = MambaSpec(**(vars(spec) | {"page_size_padded": largest}))
        return spec

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attend from tokens ``[N, H * D]``, as vLLM's attention does, and return ``[N, H * V]``."""
        part = self._held[0]
        out = query.new_zeros(query.shape[0], part.sizes.num_heads * self.value_dim)
        torch.ops.vllm.hf_linear_attn_attend(query, key, value, out, self.layer_name)
        return out

    def attend(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """Fill ``out`` for the requests of the current call."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            # Memory is being measured: there are neither requests nor pages.
            return
        m: Metadata = metadata[self.layer_name]
        part, rotary = self._held
        pool = self._pool_of_cache()
        q, k = (x.view(len(x), -1, part.sizes.head_dim) for x in (query, key))
        v = value.view(len(value), -1, self.value_dim)
        out = out.view(len(out), -1, self.value_dim)
        with own_precision(q.device):
            if m.at is not None and can_step(part):
                q1, k1, v1 = (x[m.at][:, :, None] for x in (q, k, v))
                out[m.at] = step_rows_(part, q1, k1, v1, pool, m.rows, m.rotation(rotary))[:, :, 0]
                readings = m.readings
            else:
                readings = m.all_readings
            for read in readings:
                rotation = m.rotation(rotary, read)
                if isinstance(read, Several):
                    for text in read.each:
                        _move(text, pool)
                    q1, k1, v1 = (x[read.at].transpose(1, 2) for x in (q, k, v))
                    o = read_rows_(part, q1, k1, v1, pool, read.texts, rotation)
                    out[read.tokens] = o.transpose(1, 2).flatten(0, 1)[read.real]
                else:
                    _move(read, pool)
                    here = slice(read.start, read.end)
                    q1, k1, v1 = (x[here].transpose(0, 1)[None] for x in (q, k, v))
                    o = read_(part, q1, k1, v1, pool, read.targets[0], read.length, rotation)
                    out[here] = o[0].transpose(0, 1)

    def _pool_of_cache(self) -> Pool:
        """Return the pages that vLLM has bound to this layer, by the names of what lies in them."""
        if self._pool is None or self._pool[0] is not self.kv_cache:
            tensors = zip(self.page, self.kv_cache, strict=True)
            named = {part.name: x for part, x in tensors if part.name in self.slots}
            self._pool = self.kv_cache, Pool(self.slots, named)
        return self._pool[1]


def _pieces(text: Text) -> list[Text]:
    """Divide a text of which the state after every token has a page of its own."""
    first, length = text.start, text.length
    sources = [text.source, *text.targets]
    return [Text(first + i, first + i + 1, length + i, sources[i], [target]) for i, target in enumerate(text.targets)]


def _move(text: Text, pool: Pool) -> None:
    """Bring a text's state to where it shall be afterwards."""
    if text.targets[0] != text.source and text.length:
        pool.copy_(text.source, text.targets[0])


def _together(texts: list[Text], device: torch.device) -> list[Text | Several]:
    """Put texts of like lengths together; what is drafted has a state for each token, and goes by itself."""
    found: list[Text | Several] = []
    alike: dict[int, list[Text]] = {}
    for text in texts:
        if len(text.targets) == 1:
            alike.setdefault((text.end - text.start - 1).bit_length(), []).append(text)
        else:
            found += _pieces(text)
    for each in alike.values():
        found.append(each[0] if len(each) == 1 else Several.of(each, device))
    return found


def converted_layers(vllm_config: VllmConfig) -> list[ConvertedAttention]:
    """List the converted layers of the model that is being served."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if isinstance(layer, ConvertedAttention)]


def _attend(query: Tensor, key: Tensor, value: Tensor, out: Tensor, layer_name: str) -> None:
    get_forward_context().no_compile_layers[layer_name].attend(query, key, value, out)


def _attend_nothing(query: Tensor, key: Tensor, value: Tensor, out: Tensor, layer_name: str) -> None:
    return


_name = OPERATION.removeprefix("vllm::")
if not hasattr(torch.ops.vllm, _name):
    direct_register_custom_op(op_name=_name, op_func=_attend, mutates_args=["out"], fake_impl=_attend_nothing)
