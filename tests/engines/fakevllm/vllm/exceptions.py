from .values import VLLMClientError as VLLMClientError
from .values import VLLMValidationError as VLLMValidationError
