"""Sources of weights: modules, Megatron models, safetensors files, stores. No source imports another."""
