"""Text and nothing else: what the model writes is what the reader gets.

reply := text
"""

from dragoman.formats.syntax import ModelFormat

PLAIN = ModelFormat(name="plain")
