"""Imported by the server that ranks are forked from: what takes seconds to import."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mbridge  # noqa: F401
    import transformers.models.deepseek_v3
    import transformers.models.qwen3
    import transformers.models.qwen3_moe  # noqa: F401

    from megatron_core import trainer  # noqa: F401
