"""Renders requests with the model's chat template and isolates their content from control tokens.

    request -> message_folding, plain_text_tools    rewrite what the template would drop or reject
            -> template_messages                    the messages and tools as templates expect them
            -> content_isolation, sandbox           run the template with marked content, within limits
            -> prefill                              cut after the text that the reply continues
            -> Prompt                               segments of text, the open reasoning tag, ignored parameters

`template_capabilities` probes what a template supports once, when it is loaded.
"""

from dragoman.prompt.content_isolation import Segment
from dragoman.prompt.template import ChatTemplate, Prompt

__all__ = ["ChatTemplate", "Prompt", "Segment"]
