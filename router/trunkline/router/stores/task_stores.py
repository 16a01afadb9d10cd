"""The stores of tasks and of what they work on."""

from __future__ import annotations

from trunkline.kvstore.records import RecordStore
from trunkline.router.stores.background_store import BackgroundStore
from trunkline.router.stores.batch_store import BatchStore
from trunkline.router.stores.file_store import FileStore
from trunkline.router.stores.task_store import TaskStore


class TaskStores:
    """Files, batches and background responses of all tenants, and the tasks that are not over."""

    def __init__(self, records: RecordStore, owner_bytes_max: int = 0) -> None:
        """`owner_bytes_max`: quota of each tenant; 0: none."""
        self.tasks = TaskStore(records)
        self.files = FileStore(records, owner_bytes_max)
        self.batches = BatchStore(records, self.tasks, owner_bytes_max)
        self.background = BackgroundStore(records, self.tasks, owner_bytes_max)
