from tests.engines.running import with_engine

__all__ = ["with_engine"]
