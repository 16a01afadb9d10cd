"""The exceptions of a worker, in one tree. Messages say what was given and what is allowed."""

from __future__ import annotations


class WorkerError(Exception):
    """Anything that makes a rank stop or refuse to start."""


class WorkerConfigError(WorkerError):
    """A `WorkerConfig` that cannot work."""


class PlanError(WorkerError):
    """A step plan that does not fit the worker's state: lost, malformed or out of range."""


class CopyError(WorkerError):
    """Blocks could not be copied between the device and main memory."""


class ModelError(WorkerError):
    """A model folder that cannot be served as asked."""


class UnsupportedModelError(ModelError):
    """An architecture or a feature of one that no decoder here implements."""


class ParallelismError(ModelError):
    """The model cannot be split over this many ranks."""


class CheckpointError(ModelError):
    """Weights that are missing, cut off or of the wrong shape."""


class AdapterError(WorkerError):
    """An adapter that cannot be used with this model."""


class PeerLostError(WorkerError):
    """A collective failed: another rank of the group died or cannot be reached."""


class RankRefusedError(WorkerError):
    """The controller does not take this rank into its group: it is configured for another one."""


def can_never_work(error: Exception) -> bool:
    """Return whether a rank that fails with this error would fail again however often it is started: what its
    configuration or its model says is wrong. Files that the system could not read may be there the next time.
    """
    return isinstance(error, WorkerConfigError) or (
        isinstance(error, ModelError) and not isinstance(error.__cause__, OSError)
    )
