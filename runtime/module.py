"""The module that ``parallelize`` hands back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.ir.analysis.token_work import token_work
from autopar.ir.errors import CheckpointError, InvalidInput
from autopar.ir.plan import Plan
from autopar.runtime.call_sizes import CallSizes
from autopar.runtime.checkpoint.finite import check_finite
from autopar.runtime.checkpoint.pretrained import PretrainedFolder
from autopar.runtime.data import Dataloader
from autopar.runtime.engine import Engine
from autopar.runtime.loss_scaler import LossScaler
from autopar.runtime.packed_data import PackedDataloader
from autopar.runtime.packing import Packing
from autopar.runtime.state import clip_grad_norm, gather_full, join_pieces, load_full, piece_of
from autopar.runtime.torch_private import incompatible_keys
from autopar.runtime.whole import ordered, stages_of, whole_tensors

# Makes the engine from the first call's args, kwargs and target.
Builder = Callable[[tuple[Any, ...], Mapping[str, Any], Any], Engine]


class ParallelModule(nn.Module):
    """A model that trains as its plan says, on this rank's part of every tensor.

    Parameters, buffers and state dict have the names of the original model; parameters are DTensors where they
    are sharded. A parameter that fuses several (query, key and value) is kept as its pieces, each named with its
    place in the whole: ``attn.c_attn.weight[:, 0:768]``. Whole state dicts have it in one piece. Only those of this
    rank's pipeline stages are here. An optimiser takes ``parameters()`` as it would those of the model.

    ``train()`` and ``eval()`` choose the mode, which is at first that of the model. In that mode each submodule has the
    mode that it had when the model was handed over, so that one that is frozen stays frozen; in the other all have it.
    A mode is captured when it is first needed, under the same plan and over the same parameters.
    """

    def __init__(
        self, engine: Engine | Builder, *, pretrained: PretrainedFolder | None = None, training: bool = True
    ) -> None:
        """engine: or, when capture waits for the first call, what makes it then. pretrained: how a library keeps it.

        training: the mode that the model is in.
        """
        super().__init__()
        self.training = training
        self._pretrained = pretrained
        self._engine = engine if isinstance(engine, Engine) else None
        self._build = None if isinstance(engine, Engine) else engine
        self._scaler: LossScaler | None = None
        self._nothing: list[nn.Parameter] = []  # in a list: it is no parameter of the model

    @property
    def engine(self) -> Engine:
        """The engine that runs the plan. Raises InvalidInput before the model is captured."""
        if self._engine is None:
            raise InvalidInput(
                "the model is not captured yet: that waits for the first call of step() or forward(), and only then "
                "are there parameters and a plan.\n  try: parallelize(..., example_inputs=...)"
            )
        return self._engine

    # Training.

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Forward, backward and gradient sums over one batch; leaves gradients for the optimiser.

        The arguments are those of the model, with this data-parallel rank's rows of the batch, the same on all
        ranks that share them. Returns the detached loss of the global batch, the same number on every rank.
        In eval mode the model computes as it does there, with gradients all the same.
        Raises InvalidInput if the arguments do not fit.
        """
        inputs, sizes = self._agreed("step", args, kwargs, target)
        with self.engine.accord.watched():
            return self.engine.step(inputs, self.training, sizes)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for this rank's rows, in train or eval mode; gradients flow through it.

        The batch is as large as that of a step; arguments that the model can do without, as labels, may be left out.
        An output without rows, as a loss that the model computes, is that of the global batch. A loss that is a mean
        over this rank's rows gives the parameters the gradient of the mean over all ranks, summed during backward, as
        with DistributedDataParallel. Under a pipeline every rank gets the output of the last stage, within
        ``torch.no_grad()`` only. All ranks call together.
        """
        inputs, sizes = self._agreed("forward", args, kwargs, None)
        with self.engine.accord.watched():
            return self.engine.forward(inputs, self.training, sizes)

    def loss(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """The loss of the global batch, without gradients; the arguments are those of ``step``. For held-out data.

        Returns the same number on every rank, under every plan. In eval mode nothing of training changes: no buffer,
        no random number. All ranks call together. Raises InvalidInput if the arguments do not fit.
        """
        inputs, sizes = self._agreed("loss", args, kwargs, target)
        with self.engine.accord.watched():
            return self.engine.loss(inputs, self.training, sizes)

    def _agreed(
        self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[dict[str, torch.Tensor], CallSizes]:
        """The inputs of a call that all ranks make, and their sizes, or the same error on every rank."""
        args, kwargs, target = self._first_call(args, kwargs, target)
        engine = self.engine
        failure: Exception | None = engine.background.failure() or engine.frozen.failure()
        inputs: dict[str, torch.Tensor] = {}
        try:
            inputs = engine.signature.bind(args, kwargs, target, engine.device)
        except InvalidInput as error:
            failure = error
        has_gradients = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if call == "step" and not has_gradients:
            failure = InvalidInput(
                "step() is within torch.no_grad() or inference_mode(), where there is no backward.\n"
                "  try: step() outside of it, or loss()"
            )
        given = ", ".join(engine.signature.inputs[name].label for name in inputs)
        without = " without gradients" if call == "forward" and not has_gradients else ""
        own = engine.signature.sizes(inputs)
        try:
            sizes = engine.agree_to_run(f"{call}({given}){without}", self.training, failure, own)
        except CheckpointError:
            engine.background.drop()  # of a write beside training, on whichever rank its end was seen first
            raise
        plain = call == "forward"
        absent = engine.signature.absent(inputs) if plain else frozenset()
        variant = engine.variant("model" if plain else "loss", self.training, absent, sizes)
        engine.signature.require(variant.required, inputs, args, kwargs, target)
        return inputs, sizes

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> tuple[Any, Any, Any]:
        """Capture if that has waited for this call; its arguments are the global batch, of which we take our rows."""
        if self._engine is None and self._build is not None:
            self._engine, self._build = self._build(args, kwargs, target), None
            self._engine.scaler = self._scaler
            return tuple(self.shard_batch(args)), self.shard_batch(kwargs), self.shard_batch(target)
        return args, kwargs, target

    def attach_scaler(self, scaler: LossScaler) -> None:
        """Have ``scaler`` scale the loss of every step. LossScaler calls this."""
        self._scaler = scaler
        if self._engine is not None:
            self._engine.scaler = scaler

    def expert_load(self) -> dict[str, torch.Tensor]:
        """How many tokens each expert got in the last step or forward, by layer: path -> (number of experts,).

        Counted over the global batch, a token once for each expert it was sent to. Empty for a model without experts.
        All ranks call together.
        """
        self.engine.agree_to("expert_load()")
        return self.engine.expert_load()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their joint 2-norm, over every rank and stage, is at most ``max_norm``.

        Returns the norm before. All ranks call together.
        """
        engine = self.engine
        engine.agree_to(f"clip_grad_norm_({float(max_norm)})")
        parameters = [(p, engine.stored[name]) for name, p in self.named_parameters()]
        return clip_grad_norm(parameters, max_norm, engine.mesh, engine.disk)

    # Data.

    @property
    def plan(self) -> Plan:
        """The plan that is run. Raises InvalidInput before the model is captured."""
        return self.engine.plan

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks groups that get different rows of the batch."""
        return self.plan.data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """Number of this rank's piece of rows of a global batch."""
        return self.engine.mesh.piece(self.plan.inputs)

    def shard_batch(self, batch: Any) -> Any:
        """This rank's rows of every tensor in ``batch`` (a tensor, or containers of them) of the global batch."""
        engine = self.engine
        try:
            return engine.signature.shard(batch, self.data_parallel_rank)
        except InvalidInput as error:
            engine.accord.fail(error)

    def dataloader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        pin_memory: bool = False,
        pack: bool = False,
        max_tokens: int | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Dataloader:
        """This rank's rows of the batches of ``dataset``, to be passed to ``step``. All ranks call together.

        dataset: samples by number, or an iterable of them. batch_size: samples of the *global* batch, as many on every
        data-parallel rank (None: the rows of the plan's); more where ``collate_fn`` packs several into a row. shuffle:
        anew in each epoch, from ``seed`` alone (None: unless the dataset is an iterable).
        drop_last: leave out the rows of an epoch that do not fill a batch; else the epoch's first ones fill it up.
        collate_fn, num_workers, pin_memory: as ``torch.utils.data.DataLoader`` has them; ``collate_fn`` gets this
        rank's rows.
        pack: samples are documents (``input_ids``, and ``labels`` where they differ, or a sequence of tokens), of which
        as many as fit are packed into the plan's rows, at most ``max_tokens`` (None: the plan's length) in each, so
        that rows are as much work for the model; documents are kept apart by ``position_ids``, which the model has to
        take. lengths: of every document in tokens (None: all are read once). drop_last then leaves out a last batch
        that is less than half full.
        Raises InvalidInput, on every rank, if no batch can be made.
        """
        self.engine.agree_to("dataloader(...)")
        size = self.plan.batch.global_size if batch_size is None else batch_size
        ranks = self.data_parallel_size
        if size < ranks or (pack and size % ranks):
            same = "as many for each" if pack else "at least one for each"
            raise InvalidInput(
                f"batch_size is {size}; expected samples of the global batch, {same} of {ranks} "
                f"data-parallel ranks.\n  try: batch_size={max(1, size // ranks) * ranks}"
            )
        options: dict[str, Any] = {
            "rank": self.data_parallel_rank,
            "shuffle": shuffle,
            "seed": seed,
            "num_workers": num_workers,
            "drop_last": drop_last,
            "pin_memory": pin_memory,
            "failed": self.engine.accord.fail,
            "agreed": self.engine.agree_to,
        }
        if not pack:
            return Dataloader(dataset, size, ranks=ranks, collate_fn=collate_fn, **options)
        tokens = self.engine.signature.length if max_tokens is None else max_tokens
        packing = Packing(size, ranks, tokens, token_work(self.engine.captured).of)
        # As many shards of the sequence as there may be, each of two chunks.
        multiple = 2 * self.plan.stage_mesh.size // ranks
        return PackedDataloader(dataset, packing, multiple=multiple, lengths=lengths, **options)

    # State.

    @property
    def code(self) -> str:
        """Source of this rank's program."""
        return "\n\n".join(stage.module.code for stage in self.engine.local)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank's stages under their original names; of tied ones the first name."""
        engine = self.engine
        engine.reshard()
        for parameter in engine.captured.parameters.values():
            if parameter.name not in engine.layouts:
                continue
            value = engine.tensor(parameter.name)
            assert isinstance(value, nn.Parameter)
            for name in parameter.names[:1] if remove_duplicate else parameter.names:
                yield (f"{prefix}.{name}" if prefix else name), value

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Parameters of this rank's stages.

        Where none of them trains, one without elements follows, as an optimiser refuses to have nothing.
        """
        own = [parameter for _, parameter in self.named_parameters(recurse=recurse)]
        yield from own
        if not any(parameter.requires_grad for parameter in own):
            self._nothing = self._nothing or [nn.Parameter(torch.empty(0, device=self.engine.device))]
            yield from self._nothing

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers of this rank's stages under their original names."""
        for name in self.engine.buffers:
            yield (f"{prefix}.{name}" if prefix else name), self.engine.tensor(name)

    def state_dict(  # type: ignore[override]  # the base class has overloads for deprecated positional arguments
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """This rank's parts, as DTensors where sharded, in the order of the model's state dict, aliases included."""
        destination = {} if destination is None else destination
        persistent = {b.name: (b.name, *b.aliases) for b in self.engine.captured.buffers.values() if b.persistent}
        found: dict[str, torch.Tensor] = {
            name: value if keep_vars else value.detach()
            for name, value in self.named_parameters(remove_duplicate=False)
        }
        for name, value in self.named_buffers():
            found.update(dict.fromkeys(persistent.get(name, ()), value))
        destination.update({prefix + name: found[name] for name in ordered(self.engine, found)})
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy values in: from whole tensors (another model's state dict) or from parts stored alike.

        Names of other stages are skipped. Raises InvalidInput on missing names, unknown names and wrong shapes.
        """
        engine = self.engine
        aliases = {alias: p.name for p in engine.captured.parameters.values() for alias in p.names}
        aliases |= {alias: buffer.name for buffer in engine.captured.buffers.values() for alias in buffer.aliases}
        wholes = {name for p in engine.captured.parameters.values() for name in p.whole_names}
        known = {*aliases, *wholes, *(buffer.name for buffer in engine.captured.buffers.values()), *engine.state_order}
        unknown = [name for name in state_dict if name not in known]
        given = {aliases.get(name, name): value for name, value in state_dict.items() if name in known}
        for parameter in engine.captured.parameters.values():
            for name in parameter.whole_names:
                if parameter.part is not None and name in state_dict:
                    given[parameter.name] = piece_of(state_dict[name], parameter, name)
        own = dict(self.named_parameters()) | {
            name: value for name, value in self.named_buffers() if name in engine.state_order
        }
        missing = [name for name in own if name not in given]
        if strict and (missing or unknown):
            raise InvalidInput(
                f"state dict: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}.\n"
                "  try: the state dict of the model that the plan was made for, or strict=False"
            )
        for name, value in own.items():
            if name in given:
                load_full(value, given[name], name, engine.stored.get(name), engine.mesh)
        return incompatible_keys(missing, unknown)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state dict, plain tensors on the CPU of every rank. All ranks call together."""
        self.engine.agree_to("full_state_dict()")
        lazy = whole_tensors(self.engine)
        read = {id(value): value.read() for value in {id(value): value for value in lazy.values()}.values()}
        return {name: read[id(value)] for name, value in lazy.items()}

    def save_pretrained(self, path: str | os.PathLike[str], *, max_shard_size: int | str = "5GB") -> None:
        """Write the model as the folder that ``from_pretrained`` of its library reads. All ranks call together.

        Of Hugging Face models: config.json and model.safetensors, or several files of at most ``max_shard_size`` bytes
        and their index. Of a model of peft its adapters alone: adapter_config.json and adapter_model.safetensors, in a
        folder of its own for each that is not called default. Rank 0 writes, tensor by tensor as they are gathered; an
        error leaves the folder as it was.
        Raises InvalidInput if the model is of no such library, CheckpointError if it cannot be written, NotFinite if a
        parameter that trains is infinite or not a number.
        """
        if self._pretrained is None:
            raise InvalidInput(
                f"{self.engine.captured.name} is not a model of transformers, nor of peft, so it has no config.\n"
                "  expected: what autopar.from_pretrained returns, or parallelize of a transformers.PreTrainedModel\n"
                "    or a peft.PeftModel\n"
                "  try: autopar.save(pm, optimizer, path), or torch.save(pm.full_state_dict(), file)"
            )
        self.engine.agree_to(f"save_pretrained({os.fspath(path)!r})")
        check_finite(self, path)
        self._pretrained.save(self.engine, path, max_shard_size)

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Every parameter's whole gradient on the CPU of every rank; zeros where there is none. All ranks call."""
        engine = self.engine
        engine.agree_to("full_gradients()")
        parameters = [p for p in engine.captured.parameters.values() if p.requires_grad]
        full = gather_full(
            parameters, stages_of(engine), self._gradient_here, engine.stored, engine.mesh, engine.device
        )
        return join_pieces(parameters, full)

    def _gradient_here(self, name: str) -> torch.Tensor | None:
        return self.engine.tensor(name).grad
