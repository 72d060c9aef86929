"""The configuration: settings from a file, environment variables and flags.

loading       merges the file, the environment and the flags
config_file   reads a file; records each error with its line
settings      the settings of a server; `sections` has the nested ones
model_spec    one entry of `models`
diagnostics   errors and warnings about settings, with their locations
quantities    sizes and durations
"""

from dragoman.config.loading import Flags, LoadedConfig, load, load_settings
from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits, Settings

__all__ = ["Flags", "Limits", "LoadedConfig", "ModelSpec", "Settings", "load", "load_settings"]
