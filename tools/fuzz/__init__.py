"""Fuzzing: random inputs for every way into the server, and an oracle that judges every answer.

    python -m tools.fuzz [TARGET ...] [--engine scripted|smollm2] [--requests N] [--seed TEXT] [--only N] [--resume]

    targets      what is fuzzed; TARGETS is the table
      requests   JSON requests: every route and protocol, valid and mutated
      http       raw bytes on a connection
      sse        an upstream server that answers with mutated or hostile bytes
      schemas    JSON schemas, regular expressions and grammars: over HTTP, and in process
      templates  chat templates and conversations, in process
      gguf       damaged model files, in process
      ipc        frames between the server's processes, in process
    cases        what one case is, and where its randomness comes from
    oracle       judges an answer: shapes (bodies) and streams (events)
    client       connections that read strictly
    runner       cases against a server; monitor: what is checked between batches
    isolation    in-process targets run in a child process, which may crash or hang
    state        progress, findings and the corpus

Rules
1. A case is a function of the seed and its number. `--only N` repeats it.
2. A case that once failed is kept in corpus/regressions and runs first.
3. A status of 500 and above is a finding unless the case asks for a fault or for a documented refusal.
"""
