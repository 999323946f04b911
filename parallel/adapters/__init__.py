"""LoRA adapters on sharded layers: their layout, modules, and files."""
