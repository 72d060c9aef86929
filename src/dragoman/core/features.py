"""The features that a request may ask for and an engine may support. The values are the public names.

An engine declares features in `Engine.supports`. A protocol lists the requested ones in `GenerationRequest.asked`.
The server answers for features that an engine does not declare: a route with 501, a parameter by reporting it as
ignored. It implements stop strings, the number of choices and streaming for every engine, and `max_tokens` for engines
that do not declare it.
"""

from enum import StrEnum, auto


class Feature(StrEnum):
    # Kinds of generation.
    CHAT = auto()
    COMPLETION = auto()
    TOKEN_PROMPT = auto()
    INFILL = auto()

    # Other calls.
    TOKENIZE = auto()
    ADD_SPECIAL = auto()
    """Tokenize a text with the tokens that the model needs around it."""
    TOKEN_TEXTS = auto()
    """The text of each token."""
    RENDER = auto()
    GENERATION_PROMPT = auto()
    """Render a chat without what its template puts before a reply."""
    COUNT_TOKENS = auto()
    EMBEDDINGS = auto()

    # Requests and replies beyond text.
    TOKEN_IDS = auto()
    LOGPROBS = auto()
    PROMPT_LOGPROBS = auto()
    IMAGES = auto()
    DOCUMENTS = auto()
    TOOLS = auto()
    STRICT_TOOLS = auto()
    CONSTRAINT = auto()
    THINKING = auto()
    PREFILL = auto()
    """Continue the last message, which is from the assistant."""
    TEMPLATE_OPTIONS = auto()
    SERVICE_TIER = auto()
    """Passed on to the server that runs the model."""
    USAGE = auto()
    """Reported by the engine in `Finished`."""

    # Parameters that the engine applies itself.
    TEMPERATURE = auto()
    TOP_P = auto()
    TOP_K = auto()
    MIN_P = auto()
    SEED = auto()
    REPETITION_PENALTY = auto()
    PRESENCE_PENALTY = auto()
    FREQUENCY_PENALTY = auto()
    LOGIT_BIAS = auto()
    STOP_TOKEN_IDS = auto()
    IGNORE_EOS = auto()
    MAX_TOKENS = auto()

    # Implemented by the server.
    STOP = auto()
    CHOICES = auto()
    BEST_OF = auto()

    # Supported by none of the built-in engines.
    AUDIO = auto()
    BETWEEN_TOOLS = auto()
    CITATIONS = auto()
    CUSTOM_TOOLS = auto()
    FILES = auto()
    ITEMS = auto()
    SERVER_TOOLS = auto()
    STORE = auto()
    STRUCTURAL_TAG = auto()
    THINKING_DISPLAY = auto()
    TOOL_CHANGES = auto()
    TOOL_GRAMMAR = auto()
    TRUNCATION = auto()
    VERBOSITY = auto()
    UNKNOWN = auto()
    """A field that the protocol does not have."""


SAMPLING_FEATURES = frozenset(
    {
        *(Feature.TEMPERATURE, Feature.TOP_P, Feature.TOP_K, Feature.MIN_P, Feature.SEED, Feature.LOGIT_BIAS),
        *(Feature.REPETITION_PENALTY, Feature.PRESENCE_PENALTY, Feature.FREQUENCY_PENALTY),
    }
)
