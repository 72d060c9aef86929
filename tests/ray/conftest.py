"""What needs Ray is run by `make test-ray`; the rest everywhere."""

import importlib
import warnings
from importlib.util import find_spec

collect_ignore = [] if find_spec("ray") else ["test_cluster.py", "test_engine.py"]
if not collect_ignore:
    # What Ray warns of when it is imported is not ours to mend.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("ray.serve")
