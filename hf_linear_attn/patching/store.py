"""Contexts by content: what was read once is found again by its tokens, in this process or another."""

import hashlib
import os
import stat
import time
from collections.abc import Iterator
from logging import getLogger
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_linear_attn.checks import check_path, check_type
from hf_linear_attn.errors import ArgumentError, CheckpointError
from hf_linear_attn.patching.context import (
    Context,
    ContextCache,
    empty_cache,
    model_fingerprint,
    read_context,
    read_piece,
)
from hf_linear_attn.patching.context_file import UNFINISHED
from hf_linear_attn.patching.inputs import check_ids

logger = getLogger(__name__)

SUFFIX = ".context"

ABANDONED_S = 3600.0
"""Age at which an unfinished file is taken for one whose writer was killed."""


class Held(NamedTuple):
    """A file of the folder: its size, and when it was last written or read, in seconds since the epoch."""

    path: Path
    nbytes: int
    used_s: float


class ContextStore:
    """Keep states of texts in a folder, one every ``block_size`` tokens, and find the longest that a text begins with.

    Several processes and several models may share a folder; a model finds what the same weights and the same
    conversion have read. The files that were not used for longest are removed when there are too many. Make a new store
    when the model's weights have changed.

    Args:
        folder: Where the files are; it is made.
        model: A patched decoder-only model.
        block_size: Tokens between two states, >= 1. A text is read in blocks of so many.
        max_bytes: The most that all files may take, >= 1; a state that is larger is not kept.

    Raises:
        ArgumentTypeError: If ``folder`` is no path, or a number is no whole one.
        ArgumentError: If the model is not patched, a number is out of range, or the folder cannot be made.

    Example:
        >>> import tempfile, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linear_attn import ContextStore, patch_model
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2)
        >>> model = patch_model(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval())
        >>> store = ContextStore(tempfile.mkdtemp(), model, block_size=8)
        >>> ids = torch.arange(3, 30)[None]
        >>> model.generate(ids, cache=store.longest(ids), max_new_tokens=4, min_new_tokens=4).shape
        torch.Size([1, 31])
        >>> len(store)
        3
    """

    def __init__(
        self, folder: str | Path, model: PreTrainedModel, *, block_size: int = 1024, max_bytes: int = 2**30
    ) -> None:
        for name, value in (("block_size", block_size), ("max_bytes", max_bytes)):
            if check_type(name, value, int) < 1:
                raise ArgumentError(name, "be at least 1", value, "Leave it out for the default.")
        self.folder, self.model = check_path("folder", folder), model
        self.block_size, self.max_bytes = block_size, max_bytes
        self.fingerprint = model_fingerprint(model)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(
                "folder", "be a folder, or one that can be made", str(folder), f"Choose another: {error.strerror}."
            ) from error

    def __len__(self) -> int:
        """Return the number of states in the folder, of whatever model."""
        return len(self._held())

    @property
    def nbytes(self) -> int:
        """What they take together."""
        return sum(held.nbytes for held in self._held())

    def longest(self, ids: Tensor, *, read: bool = True) -> DynamicCache:
        """Return a cache that has read a text as far as its last block, for ``generate(ids, cache=...)``.

        Blocks that are not there are read now, and their states kept. So the answer is the same to the bit whether
        the folder was empty or not.

        Args:
            ids: The whole text ``[T]`` or ``[1, T]``, without padding. At least its last token is left to be read.
            read: Whether to read what the folder does not hold; otherwise the cache may end earlier, or hold nothing.

        Returns:
            A cache of its own, to be used once.

        Raises:
            ArgumentTypeError: If ``ids`` are no tensor of int64 or int32.
            ArgumentError: If they are several texts, or none.
            CheckpointError: If a folder stands where a state's file belongs.
        """
        ids = check_ids("ids", ids).detach()
        ids = ids.view(1, -1) if ids.ndim == 1 else ids
        if ids.ndim != 2 or len(ids) != 1 or not ids.shape[1]:
            raise ArgumentError("ids", "be one text, [T] or [1, T]", tuple(ids.shape), "Ask for each text alone.")
        names = self._names(ids[0])
        cache, done = self._find(names)
        mask = torch.ones_like(ids)
        if read:
            with torch.no_grad():
                for number in range(done, len(names)):
                    end = (number + 1) * self.block_size
                    read_piece(self.model, cache, ids, mask, end - self.block_size, end)
                    cache.context_mask = mask[:, :end]
                    self._keep(names[number], cache)
        found = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        found.layers = cache.layers
        return found

    def _names(self, ids: Tensor) -> list[str]:
        """Name the state after each block: a hash of the model and of all tokens so far."""
        digest = hashlib.sha256(f"{self.fingerprint} {self.block_size}".encode())
        tokens, names = ids.long().cpu(), []
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            digest.update(tokens[start : start + self.block_size].numpy().tobytes())
            names.append(digest.hexdigest())
        return names

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name}{SUFFIX}"

    def _find(self, names: list[str]) -> tuple[ContextCache, int]:
        """Return the cache after the longest prefix in the folder, and its number of blocks."""
        for number in range(len(names), 0, -1):
            path = self._path(names[number - 1])
            if not path.exists():
                continue
            try:
                context = read_context(path, self.model, self.fingerprint)
            except CheckpointError as error:
                if path.is_dir():
                    raise
                # Another process may have removed it just now, which is no damage.
                if path.exists():
                    logger.warning("a stored context is damaged, and read again: %s", error)
                    _remove(path)
                continue
            try:
                os.utime(path)
            except OSError:
                logger.debug("a context was removed while it was read: %s", path)
            return context.release(), number
        return empty_cache(self.model), 0

    def _keep(self, name: str, cache: ContextCache) -> None:
        """Write a state, and make room for it."""
        context = Context(cache, self.fingerprint)
        if context.nbytes > self.max_bytes:
            return
        try:
            context.save(self._path(name))
        except CheckpointError as error:
            logger.warning("a context could not be stored: %s", error)
            return
        self._trim()

    def _trim(self) -> None:
        """Remove what was not used for longest until the rest fits, and what killed writers have left."""
        try:
            with FileLock(self.folder / ".lock", timeout=0):
                held = sorted(self._held(), key=lambda held: held.used_s)
                total = sum(one.nbytes for one in held)
                for one in held:
                    if total <= self.max_bytes:
                        break
                    _remove(one.path)
                    total -= one.nbytes
                for one in self._files(UNFINISHED):
                    if time.time() - one.used_s > ABANDONED_S:
                        _remove(one.path)
        except Timeout:
            # Another process is trimming.
            return

    def _held(self) -> list[Held]:
        return list(self._files(SUFFIX))

    def _files(self, suffix: str) -> Iterator[Held]:
        for path in self.folder.glob(f"*/*{suffix}"):
            try:
                about = path.stat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(about.st_mode):
                yield Held(path, about.st_size, about.st_mtime)


def _remove(path: Path) -> None:
    """Remove a file, if it is still there and may be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("a stored context could not be removed: %s", error)
