"""The container `safetensors`: a model in one file, or in shards with an index, and optimizer.pt beside it if any.

It reads and writes the folders of libraries that are neither Trainer nor Accelerate. Input: a file or a folder:

    model.safetensors, or model-00001-of-00002.safetensors ... and model.safetensors.index.json
    epoch_1/ and recipe_state/recipe_state.pt       torchtune's, read
    model/, optimizer/ and lr_scheduler             ColossalAI's, read

Output: the tree {model, optimizer, scheduler, scaler, files}; a single file gives the model alone. A target named
`.safetensors` is a single file, and takes weights without an optimizer.
"""

from __future__ import annotations

from statekit.converters.containers.huggingface.folder import HuggingFaceFolder
from statekit.converters.containers.huggingface.model import find_model, model_apart
from statekit.files.tree import Place


def _plain(folder: Place) -> str:
    model = find_model(folder) or ""
    return model if ".safetensors" in model else model_apart(folder)


CONTAINER = HuggingFaceFolder(
    "safetensors",
    "safetensors: a model in one file, or in shards with an index, and optimizer.pt beside it",
    {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"},
    _plain,
    specificity=10,
    opens_files=True,
    numbers=True,
    names=True,
    suffixes=(".safetensors",),
)
