"""Which engine answers to which name, and which of them are in memory.

catalog.py    names, and the hosts that answer to them
model.py      a name that can be asked for
making.py     how the engine of a model is made
aside.py      work beside the event loop that nobody has to wait for at the end
host.py       an engine on its way from a wish to a running thing, and back
residency.py  which models are in memory: pure decisions
lifecycle.py  the decisions, carried out
memory.py     how much memory a model needs
footprint.py  how much processes have
foreseen.py   what is known before a model is loaded
"""

from dragoman.models.catalog import Catalog
from dragoman.models.engine_factory import MakeOf, made_here
from dragoman.models.model_host import Host
from dragoman.models.served_model import Model
from dragoman.models.static_info import Foreseen, foreseen

__all__ = ["Catalog", "Foreseen", "Host", "MakeOf", "Model", "foreseen", "made_here"]
