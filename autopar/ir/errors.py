"""Every error that autopar raises on purpose. Each is a name of the package: ``autopar.InfeasiblePlan``.

    AutoparError
    ├── CaptureError          the model cannot be turned into a graph
    ├── UnsupportedOp         an op cannot be handled as asked
    ├── InvalidPlan           a plan file or object is malformed, or contradicts itself
    ├── PlanMismatch          a plan was made for another model, mesh or batch
    ├── InfeasiblePlan        no plan fits: memory, divisibility, or contradicting constraints
    ├── InexpressiblePlan     what a plan is exported to has no words for it
    ├── InvalidCluster        an unknown GPU or a malformed cluster description
    ├── InvalidModelFile      the MODEL of the command line does not say what to train
    ├── InvalidInput          a call's arguments do not fit the captured program
    ├── LaunchError           ranks cannot be started, or do not find each other
    ├── CheckpointError       a checkpoint is broken, of another model, or cannot be written
    ├── DiskError             a disk fails on which a plan keeps parameters and optimiser state
    ├── NotFinite             a number of training is infinite or not a number
    ├── Diverged              a number of training is far above those of the steps before
    ├── CopiesDiffer          ranks that hold the same parameter have other values of it
    └── UnprovenProgram       a program that autopar made is not proved to train the model: a defect of autopar

A message says what, where, expected and got, and what to try.
"""


class AutoparError(Exception):
    """Base of all errors of autopar."""


class CaptureError(AutoparError):
    """The model cannot be turned into a graph."""


class UnsupportedOp(AutoparError):
    """An op cannot be handled as asked."""


class InvalidPlan(AutoparError):
    """A plan is malformed or contradicts itself."""


class PlanMismatch(AutoparError):
    """A plan was made for another model, mesh or batch."""


class InfeasiblePlan(AutoparError):
    """No plan satisfies the memory limits and constraints."""


class InexpressiblePlan(AutoparError):
    """The system that a plan is exported to cannot do what it says."""


class InvalidCluster(AutoparError):
    """An unknown GPU or a malformed cluster description."""


class InvalidModelFile(AutoparError):
    """The MODEL of the command line does not say what to train."""


class InvalidInput(AutoparError):
    """The arguments of a call do not fit the captured program."""


class LaunchError(AutoparError):
    """Ranks cannot be started, or do not find each other."""


class CheckpointError(AutoparError):
    """A checkpoint is broken, of another model, or cannot be written."""


class DiskError(AutoparError):
    """A disk on which a plan keeps parameters and optimiser state has failed, or has no room."""


class NotFinite(AutoparError):
    """A number of training is infinite or not a number."""


class Diverged(AutoparError):
    """A number of training is far above those of the steps before."""


class CopiesDiffer(AutoparError):
    """Ranks that hold the same parameter have other values of it."""


class UnprovenProgram(AutoparError):
    """A program that autopar made is not proved to compute the model's loss and gradients: a defect of autopar."""
