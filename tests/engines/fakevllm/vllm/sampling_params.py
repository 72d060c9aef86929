from .values import SamplingParams as SamplingParams
from .values import StructuredOutputsParams as StructuredOutputsParams
