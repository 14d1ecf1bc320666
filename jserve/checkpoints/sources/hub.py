"""Files of the Hugging Face Hub, through huggingface_hub where it is installed; its own cache keeps them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from jserve.checkpoints.manifest import MANIFEST_NAME
from jserve.checkpoints.sources.uri import HubSource
from jserve.errors import SourceError, UnsupportedModel
from jserve.progress import Progress

__all__ = ["fetch_from_hub"]


def fetch_from_hub(source: HubSource, *, progress: Progress) -> Path:
    """The file or folder that ``source`` names, on this machine.

    A repository as a whole is fetched only if it is a checkpoint that jserve wrote; what else it may be is told
    before anything large is fetched. Raises SourceError and UnsupportedModel.
    """
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise SourceError(
            f"hf://{source.repo} needs huggingface_hub, which is not installed", fix="pip install 'jserve[hf]'"
        ) from None
    progress.note(f"fetching hf://{source.repo} through huggingface_hub")
    try:
        if source.member is not None:
            return Path(hub.hf_hub_download(source.repo, source.member))
        names = sorted(hub.HfApi().list_repo_files(source.repo))
        if MANIFEST_NAME in names:
            return Path(hub.snapshot_download(source.repo))
    except Exception as error:  # The library raises classes of several HTTP clients, which differ by its version.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(f"cannot fetch hf://{source.repo}: {reason}") from error
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if ggufs:
        raise SourceError(
            f"hf://{source.repo} holds {len(ggufs)} GGUF files; MODEL is one file",
            fix=f"name it, such as hf://{source.repo}/{ggufs[0]}",
        )
    raise UnsupportedModel(
        f"hf://{source.repo} is a Hugging Face repository without a GGUF file; reading safetensors is not built yet",
        fix="take the model as GGUF",
    )
