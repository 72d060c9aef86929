"""Anthropic messages."""

from dragoman.protocols.messages.decode import decode as decode
from dragoman.protocols.messages.decode import decode_count as decode_count
from dragoman.protocols.messages.encode import MessagesEncoder as MessagesEncoder
from dragoman.protocols.messages.encode import encode_count as encode_count
from dragoman.protocols.messages.encode import encode_error as encode_error
from dragoman.protocols.messages.encode import encode_reply as encode_reply
from dragoman.protocols.messages.encode import rate_headers as rate_headers
from dragoman.protocols.messages.encode import status as status
