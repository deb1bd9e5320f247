"""What is where: blocks of bytes in memories and files. Does not know tokens, trees, eviction order or torch."""

from tiers.errors import BadRecordError, DirectoryError, DirectoryInUseError, NoSpaceError, SlotError, TierError
from tiers.fence import Device, DeviceCopies
from tiers.nvme import Nvme, Recovered
from tiers.ram import HostMemory
from tiers.record import Geometry, RecordName
from tiers.slots import SlotAllocator, SlotState
from tiers.store import TieredStore
from tiers.tier import Landed, Place
from tiers.worker import ThreadWorker, Wake, Worker

__all__ = [
    "BadRecordError", "Device", "DeviceCopies", "DirectoryError", "DirectoryInUseError", "Geometry", "HostMemory",
    "Landed", "NoSpaceError", "Nvme", "Place", "RecordName", "Recovered", "SlotAllocator", "SlotError", "SlotState",
    "ThreadWorker", "TierError", "TieredStore", "Wake", "Worker",
]
