"""Text generation with a transformers causal language model, whose weights can be updated between any two steps.

The default engine of `weightcast serve`, for laptops, tests and small models. A `ModuleEngine` installs weights into
the same model; the gate keeps generation and installs apart.
"""

from weightcast.engines.transformers.generator import QueueFullError as QueueFullError
from weightcast.engines.transformers.generator import TextGenerator as TextGenerator
from weightcast.engines.transformers.request import Completion as Completion
from weightcast.engines.transformers.request import Delta as Delta
from weightcast.engines.transformers.request import Request as Request
from weightcast.engines.transformers.request import SamplingParams as SamplingParams
from weightcast.engines.transformers.request import TokenLogprobs as TokenLogprobs
from weightcast.engines.transformers.request import VersionSpan as VersionSpan
