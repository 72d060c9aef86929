"""Anthropic messages.

decode     what a request says: `history` and `blocks` read its messages, `tools` and `typed` its tools
encode     events to a stream, the reply to a message
errors     errors in Anthropic's words
signature  what is written under a thought
"""

from dragoman.protocols.messages.decode import decode as decode
from dragoman.protocols.messages.decode import decode_count as decode_count
from dragoman.protocols.messages.encode import MessagesEncoder as MessagesEncoder
from dragoman.protocols.messages.encode import encode_count as encode_count
from dragoman.protocols.messages.encode import encode_reply as encode_reply
from dragoman.protocols.messages.errors import encode_error as encode_error
from dragoman.protocols.messages.errors import status as status
