from ..values import LoRARequest as LoRARequest
