"""Megatron-core models in checkpoint form: rules by name and parallel layout, and the source that publishes them."""
