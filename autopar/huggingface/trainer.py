"""``transformers.Trainer`` around a ParallelModule.

Trainer keeps what it is good at: arguments, schedules, logging, callbacks, when to save and to evaluate. Six things it
cannot do for a model that is spread over ranks, and they are overridden here:

    wrapping      Accelerate would wrap the model in DistributedDataParallel; the plan already divides it
    batches       each rank gets its rows of the plan's global batch, the same on ranks that share them
    a step        forward and backward are one call, which pipelines need; the loss is that of the global batch
    evaluation    the same batches on ranks that share them are counted once; the loss is that of the global batch
    clipping      the norm is over parameters of all stages and shards
    checkpoints   weights in the form of ``save_pretrained``, optimiser and data so that any plan can go on from them
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from transformers.utils import logging

from autopar.ir.errors import InvalidInput
from autopar.ir.torch_private import pytree
from autopar.runtime.checkpoint.loading import load
from autopar.runtime.checkpoint.saving import save
from autopar.runtime.data import Dataloader
from autopar.runtime.module import ParallelModule

_STATE = "autopar"
_log = logging.get_logger(__name__)


class ParallelTrainer(Trainer):
    """``Trainer(model=pm, ...)`` for a model of ``parallelize`` or ``from_pretrained``. Every rank makes one.

    The batch size is the plan's, for evaluation too: ``per_device_train_batch_size`` and ``per_device_eval_batch_size``
    are not read, except with a collator that flattens a rank's samples into one row (``DataCollatorWithFlattening``),
    of which they say the number, as with Trainer. Rows at the end of a dataset that do not fill a global batch are not
    evaluated. Raises InvalidInput for arguments that contradict the plan, and for what is not supported: going back to
    the best checkpoint.
    """

    def __init__(self, model: ParallelModule, args: TrainingArguments, **kwargs: Any) -> None:
        """kwargs: those of Trainer."""
        plan = model.plan
        refused = {
            "gradient_accumulation_steps": (args.gradient_accumulation_steps > 1, "the plan cuts batches itself"),
            "fp16": (args.fp16, f"the plan computes in {plan.precision}"),
            "bf16": (args.bf16 and plan.precision != "bf16", f"the plan computes in {plan.precision}"),
            "fp16_full_eval": (args.fp16_full_eval, "the parameters are those of training"),
            "bf16_full_eval": (args.bf16_full_eval, "the parameters are those of training"),
            "load_best_model_at_end": (args.load_best_model_at_end, "load the folder of that checkpoint yourself"),
            "auto_find_batch_size": (args.auto_find_batch_size, "the batch size is the plan's"),
        }
        for name, (given, reason) in refused.items():
            if given:
                raise InvalidInput(f"TrainingArguments.{name}={getattr(args, name)}: {reason}.\n  try: leave it out")
        args.ignore_data_skip = True  # the loader's own state says where the data stands
        args.remove_unused_columns = False  # that looks at the signature of the model, which is another here
        self._loader: Dataloader | None = None
        self._first_of_copies: list[int] | None = None
        super().__init__(model=model, args=args, **kwargs)
        if args.label_names is None:
            # As Trainer finds them in the signature of the model.
            names = [given.label for given in model.engine.signature.inputs.values()]
            self.label_names = [
                name for name in names if "label" in name or name in ("start_positions", "end_positions")
            ]
        self.model_accepts_loss_kwargs = False  # the loss is a mean over the global batch already

    @property
    def _parallel(self) -> ParallelModule:
        model = self.model
        assert isinstance(model, ParallelModule)
        return model

    def create_accelerator_and_postprocess(self) -> None:
        """As Trainer does, but that ``prepare`` leaves the model as it is."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, **_: model
        self.accelerator.gather_for_metrics = self._gathered

    def get_train_dataloader(self) -> Any:
        """This rank's rows, reshuffled every epoch."""
        args = self.args
        self._loader = self._parallel.dataloader(
            self.train_dataset,
            self._samples_of(self.args.per_device_train_batch_size),
            seed=args.seed if args.data_seed is None else args.data_seed,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            drop_last=True,
        )
        return self._loader

    def _samples_of(self, on_each: int) -> int | None:
        """Samples of a global batch, where ``on_each`` rank they become one row; None for the rows of the plan."""
        flattens = isinstance(self.data_collator, DataCollatorWithFlattening)
        return on_each * self._parallel.data_parallel_size if flattens else None

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices decay; biases and the scales of norms do not."""
        return [name for name, parameter in model.named_parameters() if parameter.dim() > 1]

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward, backward and gradient sums. Returns the loss of the global batch."""
        if not self._parallel.training:
            self._parallel.train()
        loss = self._parallel.step(**self._prepare_inputs(inputs))
        return loss.to(self.args.device)

    # Evaluation.

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """This rank's rows of the global batches of a dataset, or of the one called so; in order."""
        named = isinstance(eval_dataset, str)
        dataset = self.eval_dataset[eval_dataset] if named else eval_dataset
        return self._held_out(self.eval_dataset if dataset is None else dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """This rank's rows of the global batches of a dataset, in order."""
        return self._held_out(test_dataset)

    def _held_out(self, dataset: Any) -> Dataloader:
        if dataset is None:
            raise InvalidInput("there is nothing to evaluate on.\n  try: ParallelTrainer(..., eval_dataset=...)")
        loader = self._parallel.dataloader(
            dataset,
            self._samples_of(self.args.per_device_eval_batch_size),
            shuffle=False,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            drop_last=True,
        )
        if hasattr(dataset, "__len__") and (left := len(dataset) % loader.batch_size):
            _log.warning(
                f"{left} of {len(dataset)} rows do not fill a global batch of {loader.batch_size} and are not evaluated"
            )
        return loader

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """The loss of the global batch; this rank's rows of the outputs and labels, if they are wanted."""
        if prediction_loss_only and self._parallel.engine.captured.has_loss:
            return self._parallel.loss(**self._prepare_inputs(inputs)).to(self.args.device), None, None
        found: tuple[Any, Any, Any] = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return found

    def _gathered(self, data: Any, use_gather_object: bool = False) -> Any:
        """The rows of all data-parallel ranks, in the order of the global batch, each from one rank of those alike."""
        if self._first_of_copies is None:
            places: list[int] = [0] * dist.get_world_size()
            dist.all_gather_object(places, self._parallel.data_parallel_rank)
            self._first_of_copies = [places.index(place) for place in range(self._parallel.data_parallel_size)]
        ranks = self._first_of_copies

        def gathered(own: torch.Tensor) -> torch.Tensor:
            everywhere = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(everywhere, own.contiguous())
            return torch.cat([everywhere[rank] for rank in ranks])

        return pytree.tree_map_only(torch.Tensor, gathered, data)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self._parallel.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._parallel.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what ``from_pretrained`` reads. All ranks call together."""
        folder = output_dir or self.args.output_dir
        assert folder is not None, "TrainingArguments has a default"
        self._parallel.save_pretrained(folder)
        if self.processing_class is not None and self.args.should_save:
            self.processing_class.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self._loader is not None, "inside training"
        save(
            self._parallel,
            self._plain_optimizer(),
            os.path.join(output_dir, _STATE),
            scheduler=self.lr_scheduler,
            step=self.state.global_step,
            data=self._loader.state_dict(),
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing yet: parameters are read together with the optimiser's state, which there is not until later."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self._loader is not None, "inside training"
        folder = os.path.join(checkpoint, _STATE)
        found = load(self._parallel, self._plain_optimizer(), folder, scheduler=self.lr_scheduler)
        self._loader.load_state_dict(found.data)

    def _plain_optimizer(self) -> Any:
        """Without Accelerate's wrapper, which has another step."""
        return getattr(self.optimizer, "optimizer", self.optimizer)
