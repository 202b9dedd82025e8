"""The job of ``autopar train``, as every rank gets it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from autopar.data.corpus import STDLIB, Corpus, open_corpus
from autopar.ir.errors import InvalidInput
from autopar.ir.plan import Plan
from autopar.load_model import load_model_file
from autopar.model_file import ModelFile
from autopar.runtime.environment import Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """model: MODEL of the command line; plan: path. seq_len: None for that of the plan, or the model file's default.

    steps: in all, those before a checkpoint included. save, resume: folders of checkpoints. job: the folder of both, so
    that the same job starts, or goes on from the newest checkpoint there that is not damaged. save_every: steps between
    two checkpoints (None: one after the last step; of a ``job``, one after each tenth of the steps). keep: how many of
    them stay. seed: of weights and data; the checkpoint's, if one is resumed.
    data: a corpus, as ``--data`` names it (None: the model file's own batches, or its example inputs). token_dtype: of
    its ``.bin`` files. eval_data: a corpus that is not trained on. eval_every: steps between evaluations (None: one
    after the last step). eval_batches: global batches of an evaluation, at most. json: report one JSON object at the
    end, and nothing else. keep_alive: supervise the ranks. failures: in a row after which a supervised job ends.
    on_nan: "stop", "skip" or "rollback", what to do about a loss or gradient norm that is not finite or has jumped.
    max_jump: above so many times the median of the steps before, it has (None: it never has).
    check_copies_every: steps between comparisons of what several ranks hold (None: no comparison).
    exclude_stragglers: a supervised job goes on without a rank that is slow. disk: folder on a local disk of every
    node, for what the plan keeps there.
    """

    model: str
    plan: str
    steps: int
    seq_len: int | None = None
    compare_single: bool = False
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    seed: int = 0
    save: str | None = None
    save_every: int | None = None
    resume: str | None = None
    job: str | None = None
    keep: int = 1
    data: str | None = None
    token_dtype: str = "uint16"
    eval_every: int | None = None
    eval_data: str | None = None
    eval_batches: int = 8
    json: bool = False
    environment: Environment = field(default_factory=Environment)
    keep_alive: bool = False
    failures: int = 3
    on_nan: str = "stop"
    max_jump: float | None = None
    check_copies_every: int | None = None
    exclude_stragglers: bool = False
    disk: str | None = None

    def opened(self) -> OpenedJob:
        """The job with what it names. Raises what would go wrong on every rank, before there are any."""
        if self.optimizer not in ("adamw", "sgd"):
            raise InvalidInput(f"unknown optimizer {self.optimizer!r}; expected adamw or sgd")
        self._check_folders()
        self._check_numbers()
        if self.eval_every is not None and self.eval_data is None:
            raise InvalidInput("--eval-every needs data that is not trained on.\n  try: --eval-data WHERE")
        if self.steps < 1:
            raise InvalidInput(f"--steps {self.steps}: expected at least 1")
        plan = Plan.load(self.plan)
        if self.keep_alive and any(stage.on_disk for stage in plan.stages):
            raise InvalidInput(
                "--keep-alive copies the state of every step to host memory, and the plan keeps state on disk, since "
                "host memory has no room for it.\n"
                "  try: without --keep-alive, and with checkpoints (--job DIR), from which the same command goes on"
            )
        source = load_model_file(self.model)
        seq_len = plan.model.seq if self.seq_len is None else self.seq_len
        source.meta_inputs(plan.batch.global_size, seq_len)
        corpus = None if self.data is None else open_corpus(self.data, self.token_dtype)
        held_out = None if self.eval_data is None else open_corpus(self.eval_data, self.token_dtype)
        return OpenedJob(job=self, plan=plan, source=source, corpus=corpus, held_out=held_out, seq_len=seq_len)

    @property
    def saves_to(self) -> str | None:
        """The folder that checkpoints are written to."""
        return self.save if self.job is None else self.job

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is written after ``step`` steps."""
        every = self.save_every
        if every is None and self.job is not None:
            every = max(1, self.steps // 10)
        return self.saves_to is not None and (step == self.steps or (every is not None and step % every == 0))

    def compares_after(self, step: int) -> bool:
        """Whether what several ranks hold is compared after ``step`` steps: so often, and before a checkpoint."""
        every = self.check_copies_every
        return every is not None and (step % every == 0 or self.saves_after(step))

    def _check_folders(self) -> None:
        for option, folder in (("--save", self.save), ("--resume", self.resume)):
            if self.job is not None and folder is not None:
                raise InvalidInput(
                    f"--job {self.job} saves to its folder and resumes from it; {option} {folder} contradicts that.\n"
                    f"  try: --job without {option}, or --save and --resume without --job"
                )
        for option, given in (("--save-every", self.save_every is not None), ("--keep", self.keep != 1)):
            if given and self.saves_to is None:
                raise InvalidInput(f"{option} needs a folder to save to.\n  try: --save DIR, or --job DIR")
        if self.keep < 1:
            raise InvalidInput(f"--keep {self.keep}: expected at least 1")

    def _check_numbers(self) -> None:
        if self.on_nan not in ("stop", "skip", "rollback"):
            raise InvalidInput(f"--on-nan {self.on_nan}: expected stop, skip or rollback")
        if self.max_jump is not None and not self.max_jump > 1:
            raise InvalidInput(
                f"--max-jump {self.max_jump}: expected more than 1, times the median of the steps before"
            )
        if self.exclude_stragglers and not self.keep_alive:
            raise InvalidInput("--exclude-stragglers needs ranks that are supervised.\n  try: --keep-alive")
        if self.on_nan == "rollback" and self.saves_to is None:
            raise InvalidInput("--on-nan rollback goes back to a checkpoint.\n  try: --job DIR, or --save DIR")
        if self.on_nan == "rollback" and self.compare_single:
            raise InvalidInput(
                "--compare-single trains beside it on one process, which does not go back.\n  try: --on-nan skip"
            )

    def with_absolute_paths(self) -> TrainingJob:
        """For processes that start in another folder."""

        def absolute(path: str | None) -> str | None:
            return None if path is None else str(Path(path).absolute())

        if self.model.startswith("hf:"):
            model = f"hf:{absolute(self.model.removeprefix('hf:'))}"
        else:
            path, colon, function = self.model.partition(":")
            model = f"{absolute(path)}{colon}{function}"
        return replace(
            self,
            model=model,
            plan=str(Path(self.plan).absolute()),
            save=absolute(self.save),
            resume=absolute(self.resume),
            job=absolute(self.job),
            disk=absolute(self.disk),
            data=self.data if self.data == STDLIB else absolute(self.data),
            eval_data=self.eval_data if self.eval_data == STDLIB else absolute(self.eval_data),
        )

    def to_json(self) -> str:
        """The job as JSON, for other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainingJob:
        """The job of a JSON object; fields left out have their defaults."""
        fields = json.loads(text)
        return cls(**fields | {"environment": Environment(**fields.get("environment", {}))})


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedJob:
    """A job, its plan, model file and corpora, and the length of its sequences (None: the model file's default)."""

    job: TrainingJob
    plan: Plan
    source: ModelFile
    corpus: Corpus | None
    held_out: Corpus | None
    seq_len: int | None
