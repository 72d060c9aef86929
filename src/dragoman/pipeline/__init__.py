"""Stages: transforms of a stream of events, fed list by list.

A stage is called with the events that are ready and returns the events that may go on. What it must hold back it keeps;
`Finished` makes it let go of everything. However the stream is cut into lists and the text into deltas, the joined
result is the same. The list of stages that a generation passes is in `generate`.
"""

from collections.abc import Callable, Sequence

from dragoman.core.events import Event

Stage = Callable[[Sequence[Event]], Sequence[Event]]
