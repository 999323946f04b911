"""Save a training run into checkpoint directories atomically, and load it on the same mesh or on another one."""

from .directory import newest_checkpoint as newest_checkpoint
from .load import load_checkpoint as load_checkpoint
from .save import AsyncSaver as AsyncSaver
from .save import save_checkpoint as save_checkpoint
from .torch_states import TorchStates as TorchStates
