"""The configuration: settings from a file, environment variables and flags."""

from dragoman.config.loading import Flags, Loaded, load, load_settings
from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits, Settings

__all__ = ["Flags", "Limits", "Loaded", "ModelSpec", "Settings", "load", "load_settings"]
