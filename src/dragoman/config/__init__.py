"""The configuration: settings from a file, environment variables and flags."""

from dragoman.config.settings import Flags, Limits, Loaded, ModelSpec, Settings, load, load_settings

__all__ = ["Flags", "Limits", "Loaded", "ModelSpec", "Settings", "load", "load_settings"]
