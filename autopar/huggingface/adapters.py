"""The folder that ``PeftModel.from_pretrained`` reads: what peft saves of a model with adapters, and its configuration.

peft itself writes it, from a copy of the module tree without values: which tensors belong to an adapter, under what
names, is different for each of its methods. Those tensors alone are gathered from the ranks.
"""

from __future__ import annotations

import copy
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.ir.errors import CheckpointError
from autopar.runtime.agreement import agree
from autopar.runtime.lazy_tensor import LazyTensor
from autopar.runtime.whole import whole_tensors

if TYPE_CHECKING:
    from autopar.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class AdapterFormat:
    """skeleton: the ``PeftModel`` with its parameters and buffers on the meta device, but for those saved last."""

    skeleton: Any

    @classmethod
    def of(cls, model: nn.Module) -> AdapterFormat:
        """The format of a model's adapters, from its copy on the meta device."""
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )
        for buffer in model.buffers():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
        return cls(copy.deepcopy(model, memo))

    def save(self, engine: Engine, path: str | os.PathLike[str], max_shard_size: int | str) -> None:
        """Write every adapter. All ranks call together; rank 0 writes. An adapter is one file of any size."""
        tensors = whole_tensors(engine)
        names = agree(lambda: self._saved(tensors))
        # Reading gathers, so every rank reads everything.
        values = {name: tensors[name].read() for name in names}
        agree(lambda: self._write(Path(path), tensors, values) if dist.get_rank() == 0 else None)

    def _saved(self, tensors: Mapping[str, LazyTensor]) -> list[str]:
        """Names of the tensors that peft needs to save all adapters."""
        from peft import get_peft_model_state_dict

        blank = _blank(tensors)
        names = {id(value): name for name, value in blank.items()}
        found: set[str] = set()
        for adapter, config in self.skeleton.peft_config.items():
            if config.is_prompt_learning:
                # Of a prompt peft saves what its encoder makes.
                found |= {name for name, p in self.skeleton.named_parameters() if p.requires_grad and name in blank}
                continue
            saved = get_peft_model_state_dict(self.skeleton, blank, adapter)
            found |= {names[id(value)] for value in saved.values()}
        return [name for name in tensors if name in found]

    def _write(self, folder: Path, tensors: Mapping[str, LazyTensor], values: dict[str, torch.Tensor]) -> None:
        """All files beside those that are there, and then in their place."""
        temporary = folder / f".saving-{uuid.uuid4().hex[:8]}"
        try:
            self.skeleton.load_state_dict(values, strict=False, assign=True)
            temporary.mkdir(parents=True)
            self.skeleton.save_pretrained(str(temporary), state_dict=_blank(tensors) | values)
            for file in sorted(temporary.rglob("*")):
                target = folder / file.relative_to(temporary)
                if file.is_dir():
                    target.mkdir(exist_ok=True)
                else:
                    os.replace(file, target)
        except Exception as error:  # whatever a library says, all ranks are to say it
            raise CheckpointError(f"writing {folder} failed: {type(error).__name__}: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _blank(tensors: Mapping[str, LazyTensor]) -> dict[str, torch.Tensor]:
    """Tensors without values, each an object of its own; tied ones too."""
    return {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in tensors.items()}
