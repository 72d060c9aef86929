from ...values import EngineDeadError as EngineDeadError
