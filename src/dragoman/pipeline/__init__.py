"""Stages: transforms of a stream of events.

A stage is called with the events that are ready and returns the events to pass on. It may hold events back; `Finished`
releases everything. The joined result does not depend on how the stream is cut into lists and the text into deltas.
`generate` has the list of stages.
"""

from collections.abc import Callable, Sequence

from dragoman.core.events import Event

Stage = Callable[[Sequence[Event]], Sequence[Event]]
