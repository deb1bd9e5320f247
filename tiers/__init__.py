"""What is where: blocks of bytes in memories and files. Does not know tokens, trees, eviction order or torch.

So far: the slot allocator (`slots.py`) and the outcomes of a look-up and a copy (`tier.py`), which the device
pool uses; the tiers below HBM plug in here.
"""

from tiers.errors import SlotError, TierError
from tiers.slots import SlotAllocator, SlotState
from tiers.tier import CopyOutcome, Look, Tier

__all__ = ["CopyOutcome", "Look", "SlotAllocator", "SlotError", "SlotState", "Tier", "TierError"]
