"""A run on disk, complete or not at all, for any mesh."""

from .async_saver import AsyncSaver as AsyncSaver
from .directory import newest_checkpoint as newest_checkpoint
from .load import load_checkpoint as load_checkpoint
from .save import save_checkpoint as save_checkpoint
from .torch_states import TorchStates as TorchStates
