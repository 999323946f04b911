"""Samples for every data rank, in one order."""

from .loader import ShardedDataLoader as ShardedDataLoader
from .loader import prepare_dataloader as prepare_dataloader
