"""Identifies what the replies of a model depend on besides the request: its file, its engine, its options, the version.

    fingerprint := "dragoman-" version "-" digest

A file is identified by its path, size and date, so that nothing is read. The same model on two machines usually has two
fingerprints.
"""

import hashlib
import json
from importlib import metadata

from dragoman.config.model_spec import ModelSpec
from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError
from dragoman.core.urls import remove_credentials
from dragoman.core.version import __version__

DIGEST_LENGTH = 12


def describe_spec(spec: ModelSpec) -> str:
    """Describe the engine, the file and the options of a model. Blocks."""
    file: list[object] = [spec.source]
    try:
        path = None if spec.file is None else spec.locate()
        if path is not None:
            stat = path.stat()
            file = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    except (ConfigError, OSError):
        # The source identifies a model without a file.
        pass
    return json.dumps([spec.engine, file, spec.options], sort_keys=True, default=str)


def model_fingerprint(spec: ModelSpec | None, engine: Engine) -> str:
    """The fingerprint of a loaded model. Blocks."""
    if spec is None:
        cls = type(engine)
        described = f"{cls.__module__}.{cls.__qualname__}"
    else:
        # Clients see the digest, so it must not depend on a secret.
        described = remove_credentials(describe_spec(spec)) + _package_version(spec.engine)
    digest = hashlib.sha256(described.encode()).hexdigest()
    return f"dragoman-{__version__}-{digest[:DIGEST_LENGTH]}"


def _package_version(engine: str) -> str:
    """The version of the package that an engine is named after, such as vllm."""
    try:
        return metadata.version(engine)
    except metadata.PackageNotFoundError:
        return ""
