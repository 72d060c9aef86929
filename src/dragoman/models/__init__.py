"""Resolves model names and decides which models are in memory.

catalog.py          names and the hosts behind them
served_model.py     a name that clients can request
model_host.py       a model's engine, and the requests that use it
engine_factory.py   builds engines
residency.py        pure decisions: which models are in memory
lifecycle.py        carries out the decisions
admission.py        slots and queues
memory_estimate.py  how much memory a model needs
process_memory.py   how much memory processes have
static_info.py      what is known about a model before it is loaded
"""

from dragoman.models.catalog import Catalog as Catalog
from dragoman.models.engine_factory import EngineFactory as EngineFactory
from dragoman.models.engine_factory import local_engine as local_engine
from dragoman.models.model_host import ModelHost as ModelHost
from dragoman.models.served_model import ServedModel as ServedModel
from dragoman.models.static_info import StaticInfo as StaticInfo
from dragoman.models.static_info import read_static_info as read_static_info
