"""Stock vLLM servers, with no code of ours beside them: they reload a folder that a store's version was exported to."""
