"""A conversation as the model's own chat template writes it, cut into what may hold control tokens and what may not.

    request -> turns, telling   what the template would lose or refuse is put so that it takes it
            -> entries          the values templates know: messages, tools
            -> marks, sandbox   the template runs, with its content marked, within bounds of time and size
            -> Prompt           segments of text, whether they end inside a thought, what could not be honoured

What a template can do is found out once, when it is loaded (`habits`). Content never becomes control tokens: the rules
for that are in `marks`.
"""

from dragoman.prompt.content_isolation import Segment
from dragoman.prompt.template import ChatTemplate, Prompt

__all__ = ["ChatTemplate", "Prompt", "Segment"]
