"""Where weights come from: modules, Megatron models, safetensors files, stores. Sources don't know of each other."""
