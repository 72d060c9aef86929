"""Resolves model names and decides which models are in memory.

catalog.py        names and the hosts behind them
served_model.py   a name that clients can request, and what is known about it before it is loaded
model_host.py     the requests that use a model
engine_loader.py  builds, loads and unloads the engine of a model
residency.py      pure decisions: which models are in memory
lifecycle.py      carries out the decisions
admission.py      slots and queues
memory.py         how much memory a model needs, and how much it takes
"""

from dragoman.models.catalog import Catalog as Catalog
from dragoman.models.engine_loader import EngineFactory as EngineFactory
from dragoman.models.engine_loader import local_engine as local_engine
from dragoman.models.model_host import ModelHost as ModelHost
from dragoman.models.served_model import ServedModel as ServedModel
from dragoman.models.served_model import StaticInfo as StaticInfo
from dragoman.models.served_model import read_static_info as read_static_info
