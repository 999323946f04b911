"""Data loading: each data-parallel rank gets its share of the samples, in one global order."""

from .loader import ShardedDataLoader as ShardedDataLoader
from .loader import prepare_dataloader as prepare_dataloader
