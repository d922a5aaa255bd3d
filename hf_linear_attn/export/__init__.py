"""A converted model as a file that runs without this package: ONNX, or a program of ``torch.export``."""

from hf_linear_attn.export.run import Exported, ExportSettings, export_model

__all__ = ["ExportSettings", "Exported", "export_model"]
