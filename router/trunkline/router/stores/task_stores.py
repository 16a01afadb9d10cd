"""The stores of tasks and of what they work on."""

from __future__ import annotations

from trunkline.kvstore.records import RecordStore
from trunkline.router.stores.background_store import BackgroundStore
from trunkline.router.stores.batch_store import BatchStore
from trunkline.router.stores.file_store import FileStore
from trunkline.router.stores.owned_records import QuotaOf, no_quota
from trunkline.router.stores.task_store import TaskStore


class TaskStores:
    """Files, batches and background responses of all tenants, and the tasks that are not over."""

    def __init__(self, records: RecordStore, quota_of: QuotaOf = no_quota) -> None:
        """`quota_of`: as in `owned_records.py`."""
        self.tasks = TaskStore(records)
        self.files = FileStore(records, quota_of)
        self.batches = BatchStore(records, self.tasks, quota_of)
        self.background = BackgroundStore(records, self.tasks, quota_of)
