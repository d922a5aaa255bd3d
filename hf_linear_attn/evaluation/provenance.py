"""Where figures come from: the versions, the machine and the commit."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions and the machine that the figures come from."""
    versions: dict[str, str | None] = {}
    for package in ("hf_linear_attn", "torch", "transformers", "triton", "accelerate", "lm_eval"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        **versions,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device.type,
        "device_name": name,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def source_commit() -> str | None:
    """Return the commit of this package's source, marked where it was changed, or None where it is no checkout."""
    here = ["git", "-C", str(Path(__file__).parent)]
    try:
        # A package installed inside another repository is not of that repository's commit.
        subprocess.run([*here, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True)
        found = subprocess.run(
            [*here, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
