"""Tests that need Ray are run by `make test-ray`."""

import importlib
import warnings
from importlib.util import find_spec

collect_ignore = [] if find_spec("ray") else ["test_cluster.py", "test_engine.py"]
if not collect_ignore:
    # Importing Ray raises warnings.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("ray.serve")
