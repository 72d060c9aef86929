from ...client import AsyncLLM as AsyncLLM
