"""Text generation with a transformers causal language model that can take new weights between any two steps.

The embedded default behind `weightcast serve`: for laptops, tests and small models. Weights reach the same model
through a `ModuleEngine`; the gate keeps generation and installs apart.
"""

from weightcast.engines.transformers.generator import QueueFullError as QueueFullError
from weightcast.engines.transformers.generator import TextGenerator as TextGenerator
from weightcast.engines.transformers.request import Completion as Completion
from weightcast.engines.transformers.request import Delta as Delta
from weightcast.engines.transformers.request import Request as Request
from weightcast.engines.transformers.request import SamplingParams as SamplingParams
from weightcast.engines.transformers.request import TokenLogprobs as TokenLogprobs
from weightcast.engines.transformers.request import VersionSpan as VersionSpan
