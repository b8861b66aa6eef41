"""What ranks run on folders that `transformers` wrote or will read; they do not import it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from tests.interop.models import built
from tests.models.small import IDS
from tpkernels import GPT, initialize_model_parallel
from tpkernels.interop import huggingface, safetensors
from tpkernels.interop.full_state_dict import full_state_dict, load_full_state_dict


def logits_of_folder(folder: str) -> torch.Tensor:
    """Of a model that ranks load from what `save_pretrained` wrote."""
    initialize_model_parallel(dist.get_world_size())
    config = huggingface.gpt_config(json.loads(Path(folder, "config.json").read_text()))
    model = GPT(config, sequence_parallel=True)
    load_full_state_dict(model, huggingface.from_huggingface(safetensors.read(folder)))
    return model(IDS).detach()


def write_folder(folder: str, kind: str) -> torch.Tensor:
    initialize_model_parallel(dist.get_world_size())
    model = built(kind, 7)
    whole = huggingface.to_huggingface(full_state_dict(model))
    safetensors.write(Path(folder, "model.safetensors"), whole)
    return model(IDS).detach()
