"""Training data: datasets in the forms that people have, cut into sequences and mixed with recall tasks."""

from hf_linear_attn.distill.data.blocks import Blocking, Blocks, DocumentBlocks, MixedBlocks, StreamBlocks
from hf_linear_attn.distill.data.load import Data, load_data
from hf_linear_attn.distill.data.recall import RecallRows
from hf_linear_attn.distill.data.rows import Batch, Document, Row
from hf_linear_attn.distill.data.steps import Step, tokens_read

__all__ = [
    "Batch",
    "Blocking",
    "Blocks",
    "Data",
    "Document",
    "DocumentBlocks",
    "MixedBlocks",
    "RecallRows",
    "Row",
    "Step",
    "StreamBlocks",
    "load_data",
    "tokens_read",
]
