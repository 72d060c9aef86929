"""Load tests for any server of the OpenAI chat completions API. Used by `dragoman bench`.

    target      the server under test: sends one streamed request and records arrival times
    prompts     prompts with a given number of tokens and a given shared prefix
    sweep       runs the load at each concurrency level
    figures     percentiles and rates
    report      the figures as text
    plot        the figures as SVG

1. Token counts come from the usage that the server reports, never from the number of stream pieces.
2. Every request has either figures or an error message.
"""
