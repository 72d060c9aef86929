from tests.engines.running import halves_path, with_engine, with_halves

__all__ = ["halves_path", "with_engine", "with_halves"]
