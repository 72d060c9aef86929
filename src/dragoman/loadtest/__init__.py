"""Load on any server of OpenAI's chat completions, and what it was seen to do. `dragoman bench` shows it.

    target      one server: what it takes, one streamed request, what came when
    connection  HTTP/1.1, quick enough not to be what is measured
    prompts     texts of a wanted number of tokens that have a wanted share in common
    sweep       so many requests at once, then more
    figures     from what was seen to percentiles and rates
    report      the figures as text, with what one has to know to read them
    plot        the figures as an SVG picture

1. Tokens are those that the server counts in its usage, never pieces of a stream.
2. A request either has figures or is an error with its words; none is left out.
"""
